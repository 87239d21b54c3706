"""Normalization operators: RMSNorm, the sandwich norms of Gemma and GLM, and the gradient norm."""
