"""Losses of logits, or of hidden states and the head's weight, which may be vocabulary-parallel."""
