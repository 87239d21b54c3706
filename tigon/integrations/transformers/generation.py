"""Generation with transformers' arguments."""

from transformers import GenerationMixin


class TigonGeneration(GenerationMixin):
    """transformers' `generate` over the forward pass of a Tigon model."""
