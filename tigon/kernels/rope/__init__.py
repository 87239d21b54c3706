"""Rotary position embeddings, alone and fused with the norms of queries and keys."""
