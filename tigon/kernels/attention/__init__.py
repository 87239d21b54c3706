"""Attention for training and decoding, its masks and the buffers of the KV cache."""
