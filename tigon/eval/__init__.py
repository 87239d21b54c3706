"""Measures of a model: perplexity, and parity with transformers."""

from tigon.eval.likelihood import Likelihood, log_likelihoods
from tigon.eval.parity import Parity, parity, report
from tigon.eval.perplexity import Perplexity, perplexity

__all__ = [
    "Likelihood",
    "Parity",
    "Perplexity",
    "log_likelihoods",
    "parity",
    "perplexity",
    "report",
]
