"""Gated activations and the grouped matrix products of experts."""
