"""Recomputes cheap outputs in backward from tensors that are saved anyway.

An operator whose output is cheap to compute from what its own backward saves notes on the output
how to do it. A product of that output then saves those tensors instead of the output, and computes
the output again for its weight's gradient: the same bits in less memory.

A note is an attribute of the tensor. Readers also find it through a view of the full tensor, as
`reshape` makes between an operator and a product, but not after the tensor has changed.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tigon.kernels.runtime import is_plain

# Smaller outputs, in bytes, are saved: a few MiB are not worth the host's microseconds
MIN_BYTES: float = 8 * 2**20


class Note:
    """Base class of notes, which are dropped with their tensor."""

    __slots__ = ("owner", "storage", "version")

    def __init__(self, x: Tensor):
        self.owner, self.version = id(x), x._version  # a copy of x has the attribute, too
        self.storage = x.untyped_storage()._cdata  # changes with x.data = y, unlike the version

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # copies and files of the tensor contain no note


def find_note(x: Tensor, name: str) -> Any:
    """Returns the note `name` of `x`, or of the full tensor that `x` is a view of.

    Returns None if there is no note or the numbers have changed since it was made.
    """
    if torch.compiler.is_compiling() or not is_plain(x):  # a subclass has its own products
        return None
    base = x if x._base is None else x._base
    note: Note | None = getattr(base, name, None)
    if not note or note.owner != id(base) or note.version != x._version:
        return None
    if note.storage != x.untyped_storage()._cdata:
        return None
    full = base is x or (x.dtype == base.dtype and x.numel() == base.numel() and x.is_contiguous())
    return note if full else None


def should_note(nbytes: int) -> bool:
    """Whether outputs of `nbytes` bytes are noted."""
    return nbytes >= MIN_BYTES


class GatedInputs(NamedTuple):
    """The arguments of a `gated_act` call and its node in the graph."""

    gate_up: Tensor  # differentiable
    act: Any
    node: Any


class RemoteParts(Protocol):
    """Communication for a tensor of which other ranks hold parts and partial gradients.

    It overlaps with what is computed between its start and its use.
    """

    def fetch(self, saved: Sequence[Tensor | None]) -> None:
        """Starts to compute the tensor again."""

    def reduce(self, gradient: Tensor) -> None:
        """Starts to sum the gradient, which is still returned to autograd."""


class RecomputeFn(NamedTuple):
    """`compute(*saved, *constants)` returns the tensor."""

    compute: Callable[..., Tensor]
    constants: tuple[Any, ...]
    remote: RemoteParts | None = None


class Recompute(Note):
    """The function and the saved tensors that give a tensor again."""

    __slots__ = ("fn", "gated", "saved", "single_reader", "versions")

    def __init__(self, x: Tensor, fn: RecomputeFn, saved: Any, gated: GatedInputs | None):
        super().__init__(x)
        self.fn, self.saved = fn, saved
        self.versions = [None if t is None else t._version for t in saved]
        self.gated = gated
        self.single_reader = False  # only one matrix product reads this tensor

    def is_intact(self) -> bool:
        """Whether the saved tensors are unchanged; FSDP empties weights that it shards."""
        for t, version in zip(self.saved, self.versions, strict=True):
            if t is not None and (t._version != version or not t.untyped_storage().nbytes()):
                return False
        return True

    def keep_gate_up(self) -> None:
        """Forbids to write a gradient over gate_up, for a reader that may recompute later."""
        if self.gated is not None:
            self.gated.node.overwrite = False


def note_recompute(
    x: Tensor,
    compute: Callable[..., Tensor],
    saved: tuple[Tensor | None, ...],
    *constants: Any,
    gated: GatedInputs | None = None,
    remote: RemoteParts | None = None,
    chained: bool = False,
) -> None:
    """Notes on `x` that `compute(*saved, *constants)` gives its bits; `x` is contiguous.

    Does nothing if `x` is smaller than MIN_BYTES, or if it or one of `saved` was made in inference
    mode: such tensors do not count their changes.
    `saved` should be what graphs save in any case; it is kept as long as a reader of `x` needs it.
    With `chained`, tensors that can be recomputed themselves need not be saved, as in
    `chain_recompute`. Call it only in eager mode.
    """
    if should_note(x.numel() * x.element_size()):
        if any(t is not None and t.is_inference() for t in (x, *saved)):
            return
        if chained:
            compute, saved = chain_recompute(compute, saved)
        # Their graph may lead to x one day, which would be a cycle
        saved = tuple(t if t is None or type(t) is Parameter else t.detach() for t in saved)
        x._recompute = Recompute(x, RecomputeFn(compute, constants, remote), saved, gated)  # type: ignore[attr-defined]


def find_recompute(x: Tensor) -> Recompute | None:
    """Returns how to recompute `x`, or None if it has to be saved.

    None also if `x` or its inputs have changed, and always under torch.compile, where Inductor
    decides what to recompute.
    """
    recompute: Recompute | None = find_note(x, "_recompute")
    return recompute if recompute is not None and recompute.is_intact() else None


def chain_recompute(
    compute: Callable[..., Any], saved: tuple[Tensor | None, ...]
) -> tuple[Callable[..., Any], tuple[Tensor | None, ...]]:
    """Returns a function with the same result, and its tensors: `saved`, but in place of each that
    can be recomputed what that is recomputed from."""
    notes = [None if t is None else find_recompute(t) for t in saved]
    # What is gated may be overwritten before, and what is remote has to be fetched
    notes = [n if n and n.gated is None and n.fn.remote is None else None for n in notes]
    if not any(notes):
        return compute, saved
    inner: list[tuple[RecomputeFn, int, torch.Size] | None] = []
    sources: list[Tensor | None] = []
    for tensor, note in zip(saved, notes, strict=True):
        if tensor is None or note is None:
            inner.append(None)
            sources.append(tensor)
        else:
            inner.append((note.fn, len(note.saved), tensor.shape))
            sources += note.saved

    def chained(*args: Any) -> Any:
        rest = iter(args)
        given = []
        for step in inner:
            if step is None:
                given.append(next(rest))
            else:
                fn, count, shape = step
                given.append(run_recompute(fn, [*islice(rest, count)]).view(shape))
        return compute(*given, *rest)

    return chained, tuple(sources)


def forget_recompute(*tensors: Tensor) -> None:
    """Removes the notes of tensors that many graphs save, so that none of them recomputes them."""
    for x in tensors:
        if hasattr(x, "_recompute"):
            del x._recompute


def save_input(
    x: Tensor, recompute: Recompute | None
) -> tuple[RecomputeFn | None, Sequence[Tensor | None]]:
    """Returns how the backward pass of a product gets its input `x`, and what the graph saves for
    that: None and x itself where it has to be saved."""
    if recompute is None:
        return None, (x,)
    recompute.keep_gate_up()
    return recompute.fn, recompute.saved


def run_recompute(fn: RecomputeFn | None, saved: Sequence[Any]) -> Tensor:
    """Returns the tensor in backward from what the graph has saved, as `save_input` says."""
    if fn is None:
        return saved[0]
    _check_saved(saved)
    return fn.compute(*saved, *fn.constants)


def start_fetch(fn: RecomputeFn | None, saved: Sequence[Tensor | None]) -> RemoteParts | None:
    """Starts the communication that `run_recompute` waits for; returns `fn.remote`, or None."""
    if fn is None or fn.remote is None:
        return None
    _check_saved(saved)
    fn.remote.fetch(saved)
    return fn.remote


def _check_saved(saved: Sequence[Tensor | None]) -> None:
    """Raises RuntimeError if FSDP has freed the memory of one of the tensors."""
    if any(t is not None and t.untyped_storage().nbytes() == 0 for t in saved):
        raise RuntimeError(
            "a norm's weight is sharded again before the product behind it is differentiated: "
            "shard both as one group"
        )


def has_function_mode() -> bool:
    """Whether a torch-function mode other than the default device may replace products."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
