"""Saves what tensors are recomputed from in place of the tensors, inside operators of others.

Products and norms of Tigon look at the notes of `recompute` themselves. Attention kernels, some of
which are another library's, and the delta rule do not: torch's hooks on saved tensors replace what
these save.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tigon.kernels.recompute import Recompute, find_recompute, note_recompute, run_recompute


@dataclass(frozen=True)
class Part:
    """One result of a function that has several: they are recomputed together."""

    compute: Callable[..., tuple[Tensor, ...]]
    number: int

    def __call__(self, *args: Any) -> Tensor:
        return self.compute(*args)[self.number]


def note_parts(
    results: tuple[Tensor, ...],
    compute: Callable[..., tuple[Tensor, ...]],
    saved: tuple[Tensor | None, ...],
    *constants: Any,
) -> None:
    """Notes on each of the results of one call of `compute` how to recompute them."""

    def together(*args: Any) -> tuple[Tensor, ...]:  # by which parts of one call know each other
        return compute(*args)

    for index, x in enumerate(results):
        note_recompute(x, Part(together, index), saved, *constants)


class _Sources:
    """What tensors are recomputed from; parts of one call wait here until they are asked for."""

    def __init__(self, note: Recompute) -> None:
        self.note = note
        self.parts: set[int] = set()
        self.waiting: dict[int, Tensor] = {}

    def compute(self, index: int) -> Tensor:
        """Returns a part; another one, if it was saved too, is kept for the next call."""
        if index not in self.waiting:
            if not self.note.is_intact():
                raise RuntimeError(
                    "what an operator recomputes its inputs from has been modified by an inplace "
                    "operation, or its memory has been freed"
                )
            fn = self.note.fn
            if isinstance(fn.compute, Part):
                found = fn.compute.compute(*self.note.saved, *fn.constants)
                self.waiting = {i: found[i] for i in self.parts}
            else:
                self.waiting = {index: run_recompute(fn, self.note.saved)}
        return self.waiting.pop(index)


class _View(NamedTuple):
    """A saved tensor, as a view of what is recomputed."""

    sources: _Sources
    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A saved tensor itself, whose changes torch does not notice behind hooks."""

    tensor: Tensor
    version: int


def _unpack(saved: _Kept | _View) -> Tensor:
    """Returns the tensor that was saved, or raises RuntimeError if it has changed since."""
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(saved.tensor.shape)} is at version "
                f"{saved.tensor._version}; expected version {saved.version}"
            )
        return saved.tensor
    whole = saved.sources.compute(saved.number)
    return whole.as_strided(saved.shape, saved.stride, saved.offset)


def save_sources(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which graphs save, of those `tensors` that can be recomputed, what they
    are recomputed from.

    It does nothing under torch.compile, and inside of other hooks on saved tensors, as checkpoints
    and offloads have, which save the tensors themselves.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    notes = [(t, note) for t in tensors if (note := find_recompute(t)) and note.fn.remote is None]
    if not notes or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return nullcontext()
    calls: dict[Any, _Sources] = {}
    places: dict[int, tuple[_Sources, int]] = {}  # by storage
    for t, note in notes:
        compute = note.fn.compute
        call, index = (compute.compute, compute.number) if isinstance(compute, Part) else (note, 0)
        sources = calls.setdefault(call, _Sources(note))
        sources.parts.add(index)
        places[t.untyped_storage()._cdata] = sources, index

    def pack(x: Tensor) -> _Kept | _View:
        place = places.get(x.untyped_storage()._cdata)
        if place is None:
            return _Kept(x.detach(), x._version)  # which share a count of changes
        return _View(*place, x.shape, x.stride(), int(x.storage_offset()))

    return saved_tensors_hooks(pack, _unpack)
