"""Random eviction for kvcompress; imports nothing, since `kvcompress --help` imports it too."""
