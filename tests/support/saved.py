"""What autograd keeps for backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def saved_storages(*others: Tensor) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Notes the memory of all tensors that are saved inside, each once, but for that of others."""
    known = {t.untyped_storage()._cdata for t in others}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage  # kept, so that no other has its place
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        yield kept
