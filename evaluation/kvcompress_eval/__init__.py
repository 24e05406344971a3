"""Demonstrations and measurements of policies; uses only kvcompress's public modules."""
