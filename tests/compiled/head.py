"""Forms of what is computed of logits. N rows, V vocab."""

from functools import partial
from typing import Any

import torch

from tests.compiled.compiling import BF16, FP16, FP32, INT64, Forms, zeros
from tigon.kernels.loss.argmax import argmax
from tigon.kernels.loss.cross_entropy_rows import loss_rows
from tigon.kernels.loss.divergence_rows import divergence_rows, logit_masses
from tigon.kernels.loss.logits import (
    DEFAULT_OPTIONS,
    LogitGradient,
    Options,
    rescale,
    rescale_and_join,
)
from tigon.kernels.loss.vocab_parallel import VocabularyShard, embedding_rows


def forms() -> Forms:
    for name, options in LOSSES.items():
        yield f"loss_rows {name}", partial(_loss_rows, **options)
    for name, options in DIVERGENCES.items():
        yield f"divergence_rows {name}", partial(_divergence_rows, **options)
    factor = zeros(dtype=FP32)
    for name, dtype in DTYPES.items():
        x = zeros(64, 64, dtype=dtype)
        yield f"rescale {name}", partial(rescale, x, factor, BF16)
        yield f"rescale {name} in place", partial(rescale, x, factor, dtype, overwrite=True)
    x, y = zeros(64, 64, dtype=FP32), zeros(60, 64, dtype=FP32)
    yield "rescale and join", partial(rescale_and_join, x, y, factor, BF16)
    for name, dtype in DTYPES.items():
        yield f"likeliest {name}", partial(argmax, zeros(8, 8192, dtype=dtype))
        yield f"embedding_rows {name}", partial(_embedding_rows, dtype)


def _embedding_rows(dtype: torch.dtype) -> None:
    shard = VocabularyShard.build("none", 2, 64, 64, 128)
    with torch.no_grad():
        embedding_rows(zeros(1, 1, dtype=INT64), zeros(64, 2048, dtype=dtype), shard)


DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
CAPPED = Options(softcap=30.0, logit_scale=0.5)
ALL = Options(softcap=30.0, logit_scale=0.5, label_smoothing=0.1, z_loss=1e-4)
METRICS = ("entropy", "nll", "predicted_tokens")
LOSSES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, metrics": {"dtype": FP32, "metrics": METRICS},
    "gradient": {"grad": True},
    "fp16, gradient added": {"dtype": FP16, "grad": True, "add": True},
    "gradient, known mass": {"grad": True, "known": True},
    "all options": {"options": ALL, "metrics": METRICS},
    "fp32, all options, gradient added": {
        "dtype": FP32, "options": ALL, "metrics": METRICS, "grad": True, "add": True,
    },
    "all options, gradient, known mass": {"options": ALL, "grad": True, "known": True},
    "scale, smoothing, gradient": {
        "options": Options(logit_scale=0.5, label_smoothing=0.1), "grad": True,
    },
    "softcap, z-loss, gradient": {"options": Options(softcap=30.0, z_loss=1e-4), "grad": True},
    "holes": {"holes": True},
    "holes, capped, gradient added, known mass": {
        "holes": True, "options": CAPPED, "grad": True, "add": True, "known": True,
    },
    "many tokens": {"V": 32000, "grad": True},
    "one token": {"V": 1, "grad": True},
    "some of the tokens": {"options": ALL, "metrics": ("target", "total", "entropy"), "size": 1000},
    "some of the tokens, gradient added, known mass": {
        "options": ALL, "grad": True, "add": True, "known": True, "size": 1000,
    },
}  # fmt: skip
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward": {},
    "forward, capped, gradient": {"grad": True, "options": CAPPED},
    "forward, gradient added": {"grad": True, "add": True},
    "reverse, gradient": {"beta": 1.0, "grad": True},
    "reverse": {"beta": 1.0},
    "reverse, capped, gradient": {"beta": 1.0, "grad": True, "options": CAPPED},
    "mixture": {"beta": 0.5},
    "fp32, mixture, capped, gradient added": {
        "dtype": FP32, "beta": 0.5, "grad": True, "add": True, "options": CAPPED,
    },
    "mixture, gradient": {"beta": 0.5, "grad": True},
    "many tokens": {"V": 32000, "grad": True, "beta": 0.5},
    "one token": {"V": 1, "grad": True},
    "some of the tokens, forward, gradient": {"known": "masses", "grad": True},
    "some of the tokens, reverse, capped": {"known": "masses", "beta": 1.0, "options": CAPPED},
    "some of the tokens, mixture": {"known": "masses", "beta": 0.5},
    "some of many tokens, fp32, mixture, capped": {
        "V": 32000, "dtype": FP32, "known": "masses", "beta": 0.5, "options": CAPPED,
    },
    "some of the tokens, mixture, gradient": {"known": "mean", "beta": 0.5, "grad": True},
}  # fmt: skip


def _loss_rows(
    V: int = 256,
    dtype: torch.dtype = BF16,
    options: Options = DEFAULT_OPTIONS,
    metrics: tuple[str, ...] = (),
    grad: bool = False,
    add: bool = False,
    known: bool = False,
    holes: bool = False,
    size: int | None = None,
) -> None:
    logits, targets = zeros(8, V, dtype=dtype), zeros(8, dtype=torch.int64)
    one = zeros(8, dtype=FP32)
    out = torch.zeros_like(logits)
    gradient = LogitGradient(one, out, torch.zeros_like(out) if add else None) if grad else None
    mass = (one, one) if known else None
    loss_rows(logits, targets, options, metrics, gradient, mass, holes=holes, size=size)


def _divergence_rows(
    V: int = 256,
    dtype: torch.dtype = BF16,
    options: Options = DEFAULT_OPTIONS,
    beta: float = 0.0,
    grad: bool = False,
    add: bool = False,
    known: str = "",
) -> None:
    student, teacher = zeros(8, V, dtype=dtype), zeros(8, V, dtype=dtype)
    one, out = zeros(8, dtype=FP32), torch.zeros_like(student)
    gradient = LogitGradient(one, out, torch.zeros_like(out) if add else None) if grad else None
    more: dict[str, Any] = {}
    if known:
        more["masses"] = logit_masses(student, teacher, options, options)
    if known == "mean":
        more["mean"] = zeros(8, dtype=FP32)
    divergence_rows(student, teacher, options, options, beta, gradient, **more)
