"""Operators of linear attention: the causal convolution before it, and its recurrences."""
