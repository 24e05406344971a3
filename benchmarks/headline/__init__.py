"""What `gpu_headline.py` is made of."""
