"""Loads, saves and converts checkpoints in Hugging Face format."""
