"""A CUDA graph on a CPU: records what a pass launches, and repeats exactly that."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators by which the host waits for the GPU, the last ones to learn a size
HOST_READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2")


class Tape(TorchDispatchMode):
    """Records torch's operators with the tensors that they read and write.

    `replay` runs no Python of the pass: numbers that Python has computed stay those of the
    recording, and results are written to the memory that the recorded ones have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if name in HOST_READS or by_mask:
            raise RuntimeError(f"a graph cannot wait for {func}")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            results = func(*args, **kwargs)
            read = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for old, new in zip(tree_leaves(out), tree_leaves(results), strict=True):
                if isinstance(old, Tensor) and memory(old) not in read:  # no view of an argument
                    old.detach().copy_(new)


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def record(run: Callable[[], None]) -> Callable[[], None]:
    """Runs a pass, which a capture would not, and returns what repeats it."""
    tape = Tape()
    with tape, patch.object(Tensor, "tolist", _list):
        run()
    return tape.replay


def _list(x: Tensor) -> Any:
    """Tensor.tolist, of which no mode is told; a custom operator may call it."""
    if torch._C._len_torch_dispatch_stack():
        raise RuntimeError("a graph cannot wait for tolist")
    return x.numpy().tolist()
