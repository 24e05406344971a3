"""The built-in policies; a plugin like any other, using only kvcompress's public modules."""
