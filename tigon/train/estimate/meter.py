"""Weighs what a pass on the meta device allocates, and what of it is alive at the peak.

Nothing is computed: a meta tensor has a shape and no numbers. Autograd keeps and frees meta tensors
exactly as it does those of a GPU, so the peak is that of the real code, whatever its layers are.
Inside fused operators nothing can be seen; WORKSPACES says what they need besides their outputs.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tigon.kernels.loss.fused_linear_pass import workspace as head_workspace
from tigon.kernels.mlp.grouped_mlp import backward_workspace, forward_workspace
from tigon.kernels.mlp.lora_grouped_mlp import backward_workspace as lora_backward_workspace
from tigon.kernels.mlp.lora_grouped_mlp import forward_workspace as lora_forward_workspace

BLOCK = 512  # bytes; the CUDA allocator rounds up to multiples

# Bytes that an operator holds besides its arguments and outputs, from its arguments
WORKSPACES: dict[str, Callable[..., int]] = {
    "tigon::head_pass": head_workspace,
    "tigon::grouped_mlp": forward_workspace,
    "tigon::grouped_mlp_backward": backward_workspace,
    "tigon::lora_grouped_mlp": lora_forward_workspace,
    "tigon::lora_grouped_mlp_backward": lora_backward_workspace,
}
# Operators that write outputs over these arguments, except where a dispatch mode is at work
OVERWRITES = {
    "tigon::gated_act_backward": (1,),
    "tigon::gated_act_backward_product": (0, 1),
    "tigon::packed_rope": (0,),
}


class Ledger:
    """Bytes alive by kind, and what they were when their sum was largest."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, size: int) -> None:
        self.alive[kind] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.alive)

    def remove(self, kind: str, size: int) -> None:
        self.alive[kind] -= size
        self.total -= size


class Meter(TorchDispatchMode):
    """Inside it, every meta tensor that is made counts as of kind `phase` while it is alive.

    The model's parameters and buffers, which exist already, do not.
    """

    def __init__(self, ledger: Ledger, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.ledger, self.phase = ledger, "activations"
        self._entries: dict[int, tuple[str, int]] = {}  # kind and bytes, by storage
        self.ignore(existing)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        size = WORKSPACES[name](*args) if name in WORKSPACES else 0
        out = func(*args, **(kwargs or {}))
        for index in OVERWRITES.get(name, ()):
            self._forget(args[index])
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._track(tensor)
        self.ledger.add(self.phase, size)
        self.ledger.remove(self.phase, size)
        return out

    def ignore(self, existing: Iterable[Tensor]) -> None:
        """Tensors that are counted elsewhere."""
        for tensor in existing:
            self._entries[tensor.untyped_storage()._cdata] = ("", 0)

    def relabel(self, tensor: Tensor, kind: str) -> None:
        key = tensor.untyped_storage()._cdata
        was, size = self._entries[key]
        self._entries[key] = kind, size
        self.ledger.remove(was, size)
        self.ledger.add(kind, size)

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._entries[key] = self.phase, size
        self.ledger.add(self.phase, size)
        weakref.finalize(storage, self._free, key).atexit = False

    def _forget(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        kind, size = self._entries[key]
        self._entries[key] = kind, 0
        self.ledger.remove(kind, size)

    def _free(self, key: int) -> None:
        kind, size = self._entries.pop(key)
        self.ledger.remove(kind, size)


def watch_head(meter: Meter, head: nn.Module) -> None:
    """What the head's forward makes is of logits and loss."""

    def enter(*_: Any) -> None:
        meter.phase = "logits and loss"

    def leave(*_: Any) -> None:
        meter.phase = "activations"

    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All tensors that it has."""
    return [*model.parameters(), *model.buffers()]


def rounded(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    size = tensor.numel() * (dtype or tensor.dtype).itemsize
    return -(-size // BLOCK) * BLOCK
