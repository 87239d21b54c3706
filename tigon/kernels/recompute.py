"""What an operator knows of a tensor that it returned, as an attribute of the tensor.

Readers find it (`note_of`) also on a view of the whole, as `reshape` makes between an operator and
a product, and not once the tensor has changed.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class Note:
    """Ends with its tensor."""

    __slots__ = ("owner", "storage", "version")

    def __init__(self, x: Tensor):
        self.owner, self.version = id(x), x._version  # a copy of x has the attribute, too
        self.storage = x.untyped_storage()._cdata  # that x.data = y replaces, and no version tells

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # of a tensor that is copied or written to a file, nothing


def note_of(x: Tensor, name: str) -> Any:
    """The note that `x`, or that of which it is a view of the whole, has under this name; None
    where there is none or it is not of the numbers that are there now."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:  # a subclass has its own products
        return None
    base = x if x._base is None else x._base
    note: Note | None = getattr(base, name, None)
    if not note or note.owner != id(base) or note.version != x._version:
        return None
    if note.storage != x.untyped_storage()._cdata:
        return None
    whole = base is x or (x.dtype == base.dtype and x.numel() == base.numel() and x.is_contiguous())
    return note if whole else None


# Tensors that backward computes again from what it keeps anyway, instead of keeping them.
#
# An operator whose output is cheap to compute from what its own backward keeps notes on the
# output how. A product with that output then keeps what the operator keeps, and computes the
# output again when it needs it for its weight's gradient: the same bits, from less memory.

# Bytes; what is smaller is kept: a few MiB are not worth the host's microseconds
LEAST = 8 * 2**20

_least: float = LEAST


@contextlib.contextmanager
def rebuilding(least: float) -> Iterator[None]:
    """Outputs of `least` bytes and more are noted inside; infinity: none. For tests and timing."""
    global _least
    before, _least = _least, least
    try:
        yield
    finally:
        _least = before


def notes(size: int) -> bool:
    """Whether outputs of so many bytes are noted."""
    return size >= _least


class Gated(NamedTuple):
    """What `gated_act` was given, and its node in the graph."""

    gate_up: Tensor  # differentiable
    act: Any
    node: Any


class Remote(Protocol):
    """Other ranks that have parts of a tensor, and of whose gradients its gradient is the sum.

    Exchanges with them run beside what is computed between beginning one and its use.
    """

    def fetch(self, kept: Sequence[Tensor | None]) -> None:
        """Begin to compute the tensor again."""

    def reduce(self, gradient: Tensor) -> None:
        """Begin to add up the gradient, which is returned to autograd all the same."""


class How(NamedTuple):
    """`compute(*kept, *constants)` gives the tensor."""

    compute: Callable[..., Tensor]
    constants: tuple[Any, ...]
    remote: Remote | None = None


class Recipe(Note):
    """How to compute a tensor again."""

    __slots__ = ("alone", "gated", "how", "kept", "versions")

    def __init__(self, x: Tensor, how: How, kept: Any, gated: "Gated | None"):
        super().__init__(x)
        self.how, self.kept = how, kept
        self.versions = [None if t is None else t._version for t in kept]
        self.gated = gated
        self.alone = False  # nobody but one product reads the tensor, or can see it

    def holds(self) -> bool:
        """Whether everything that is kept is as it was; FSDP empties weights that it shards."""
        for t, version in zip(self.kept, self.versions, strict=True):
            if t is not None and (t._version != version or not t.untyped_storage().nbytes()):
                return False
        return True

    def keep_gate_up(self) -> None:
        """For a reader that computes the tensor again, perhaps after its gradient has come: that
        must not take the memory of gate_up."""
        if self.gated is not None:
            self.gated.node.overwrite = False


def note(
    x: Tensor,
    compute: Callable[..., Tensor],
    kept: tuple[Tensor | None, ...],
    *constants: Any,
    gated: Gated | None = None,
    remote: Remote | None = None,
) -> None:
    """Notes that `compute(*kept, *constants)` gives the bits of `x`, which is contiguous.

    `kept` is what the backward pass of `x` keeps in any case, and not under torch.compile.
    """
    if notes(x.numel() * x.element_size()):
        # Their graph may lead to x one day, which would be a cycle
        kept = tuple(t if t is None or type(t) is Parameter else t.detach() for t in kept)
        x._rebuilt = Recipe(x, How(compute, constants, remote), kept, gated)  # type: ignore[attr-defined]


def recipe_of(x: Tensor) -> Recipe | None:
    """How to compute `x` again, or that of which it is a view of the whole; None: keep it.

    Not where `x` or what it is made of was changed since. Under torch.compile never: Inductor
    decides itself what it computes again.
    """
    recipe: Recipe | None = note_of(x, "_rebuilt")
    return recipe if recipe is not None and recipe.holds() else None


def compute_again(how: How, kept: Sequence[Tensor | None]) -> Tensor:
    """The tensor, in backward, from what the graph has saved of `recipe.kept`."""
    _check_kept(kept)
    return how.compute(*kept, *how.constants)


def fetch_again(how: How, kept: Sequence[Tensor | None]) -> Remote | None:
    """Begin what `compute_again` ends, if other ranks have parts of the tensor; they."""
    if how.remote is not None:
        _check_kept(kept)
        how.remote.fetch(kept)
    return how.remote


def _check_kept(kept: Sequence[Tensor | None]) -> None:
    if any(t is not None and t.untyped_storage().nbytes() == 0 for t in kept):
        raise RuntimeError(
            "a norm's weight is sharded again before the product behind it is differentiated: "
            "shard both as one group"
        )


def sees_products() -> bool:
    """Whether a torch-function mode other than the default device may replace products."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
