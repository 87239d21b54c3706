"""Compiles what the autotuners of a peer's kernels try, side by side, before its first step.

One after the other, as the autotuners do it, takes minutes for flash-linear-attention's kernels.
They still measure every configuration, which they then find in Triton's cache.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.runtime.autotuner import Autotuner, Config

from tigon.kernels.precompile import compile_kernels


def compile_configs(step: Callable[[], object]) -> None:
    """Compiles the kernels that `step` launches on fake tensors, in all their configurations."""
    changes = {"_bench": _launch, "check_disk_cache": _measure}
    with ExitStack() as patches:
        for name, method in changes.items():
            patches.enter_context(patch.object(Autotuner, name, method))
        # What a fake tensor cannot answer. Liger asks whether the loss's gradient is 1, and
        # flash-linear-attention lists the chunks of packed rows: as if each row had one
        patches.enter_context(patch.object(Tensor, "item", lambda x: 1))
        patches.enter_context(patch("torch.equal", lambda x, y: True))
        patches.enter_context(patch("torch.repeat_interleave", lambda x, counts: x))
        patches.enter_context(compile_kernels(step))
    for found in gc.get_objects():
        if issubclass(type(found), Autotuner):
            found.cache.clear()  # of times that were none


def _launch(tuner: Any, *args: Any, config: Config, **meta: Any) -> list[float]:
    """Launches a configuration once, instead of measuring it."""
    tuner.fn.run(*args, **meta, **config.all_kwargs())
    return [0.0] * 3


def _measure(tuner: Any, key: Any, configs: Any, run: Callable[[], object]) -> bool:
    """Neither reads nor writes times on the disk."""
    run()
    return False
