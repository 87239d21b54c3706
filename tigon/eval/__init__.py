"""Measures of a model: perplexity, and parity with transformers."""

from tigon.eval.layers import LayerError, compare_layers
from tigon.eval.likelihood import Likelihood, log_likelihoods
from tigon.eval.parity import Parity, parity, report
from tigon.eval.perplexity import Perplexity, Windows, find_windows, perplexity, score

__all__ = [
    "LayerError", "Likelihood", "Parity", "Perplexity", "Windows", "compare_layers", "find_windows",
    "log_likelihoods", "parity", "perplexity", "report", "score",
]  # fmt: skip
