"""What an operator knows of a tensor that it returned, as an attribute of the tensor.

Readers find it (`note_of`) also on a view of the whole, as `reshape` makes between an operator and
a product, and not once the tensor has changed.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor


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
