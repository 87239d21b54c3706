"""Measures of a model: perplexity, and parity with transformers."""

from tigon.eval.parity import Parity, parity, report
from tigon.eval.perplexity import Perplexity, perplexity

__all__ = ["Parity", "Perplexity", "parity", "perplexity", "report"]
