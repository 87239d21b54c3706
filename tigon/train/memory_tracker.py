"""Tracks the memory of a pass on the meta device, by kind and at its peak.

Meta tensors have no values, but autograd saves and frees them exactly as on a GPU, so the peak is
that of the real code. The temporaries inside fused operators are invisible: WORKSPACES adds them.
`FSDPTracker` allocates the buffers of FSDP2, `ZeRO2Tracker` those of sharding=gradients.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tigon.kernels.loss.fused_linear_pass import workspace as head_workspace
from tigon.kernels.mlp.grouped_mlp_passes import backward_workspace, forward_workspace
from tigon.layers import Experts
from tigon.models import CausalLM
from tigon.parallel import IN_FLIGHT, forward_order, reduction_dtype

BLOCK = 512  # bytes to which the CUDA allocator rounds up
GATHERED, GRADIENTS, COMMUNICATION = "gathered weights", "gradients", "communication"

# Bytes of an operator's temporaries, computed from its arguments
WORKSPACES: dict[str, Callable[..., int]] = {
    "tigon::head_pass": head_workspace,
    "tigon::grouped_mlp": forward_workspace,
    "tigon::grouped_mlp_backward": backward_workspace,
}


class Ledger:
    """Counts live bytes by kind, and remembers them at the peak of their sum."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, size: int) -> None:
        """Counts bytes of a kind, and notes the kinds when the total peaks."""
        self.alive[kind] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.alive)

    def remove(self, kind: str, size: int) -> None:
        """Takes bytes of a kind away."""
        self.alive[kind] -= size
        self.total -= size


class MemoryTracker(TorchDispatchMode):
    """Counts every meta tensor that is created under it as kind `phase` while it is alive.

    `existing` tensors, such as the model's parameters and buffers, are not counted.
    """

    def __init__(self, ledger: Ledger, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.ledger, self.phase = ledger, "activations"
        self._storages: dict[int, tuple[str, int]] = {}  # kind and bytes, by storage
        self.ignore(existing)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator, counts the storages that it makes, and its workspace for a moment."""
        name = func._schema.name
        size = WORKSPACES[name](*args) if name in WORKSPACES else 0
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._track(tensor)
        self.ledger.add(self.phase, size)
        self.ledger.remove(self.phase, size)
        return out

    def ignore(self, existing: Iterable[Tensor]) -> None:
        """Excludes tensors that are counted elsewhere."""
        for tensor in existing:
            self._storages[tensor.untyped_storage()._cdata] = ("", 0)

    def label_forward(self, module: nn.Module, kind: str) -> None:
        """Counts what the module's forward creates as `kind`."""
        module.register_forward_pre_hook(lambda *_: setattr(self, "phase", kind))
        module.register_forward_hook(lambda *_: setattr(self, "phase", "activations"))

    def allocate(self, size: int, kind: str) -> Tensor:
        """Returns a tensor of so many bytes, which counts as `kind` while it is alive."""
        before, self.phase = self.phase, kind
        tensor = torch.empty(size, dtype=torch.uint8, device="meta")
        self.phase = before
        return tensor

    def relabel(self, tensor: Tensor, kind: str) -> Tensor:
        """Counts a tensor as another kind, and returns it."""
        key = tensor.untyped_storage()._cdata
        was, size = self._storages[key]
        self._storages[key] = kind, size
        self.ledger.remove(was, size)
        self.ledger.add(kind, size)
        return tensor

    def _track(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._storages[key] = self.phase, size
        self.ledger.add(self.phase, size)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        """Takes away the bytes of a storage that no longer exists."""
        kind, size = self._storages.pop(key)
        self.ledger.remove(kind, size)


def model_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def padded_numel(parameter: Tensor, ranks: int) -> int:
    """Returns the number of elements with the padding that makes all ranks' shards equally long."""
    rows = parameter.shape[0]  # 0 where a tensor rank has no row of a narrow one
    return -(-rows // ranks) * ranks * (parameter.numel() // rows) if rows else 0


def shard_bytes(parameter: Tensor, ranks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one rank's shard of a parameter in `dtype`, over so many ranks."""
    if ranks == 1:
        return -(-parameter.numel() * dtype.itemsize // BLOCK) * BLOCK
    return padded_numel(parameter, ranks) * dtype.itemsize // ranks


def unsharded_bytes(model: CausalLM, ranks: int, dtype: torch.dtype) -> int:
    """Returns the bytes of all weights, padded for so many ranks."""
    return sum(padded_numel(p, ranks) for p in model.parameters()) * dtype.itemsize


def sharded_experts(module: nn.Module) -> Iterator[Experts]:
    """Yields the experts that ranks shard; FSDP2 makes each a group of its own."""
    for inner in module.modules():
        if isinstance(inner, Experts) and inner.shard is not None:
            yield inner


def shard_counts(model: CausalLM, ranks: int) -> dict[nn.Parameter, int]:
    """Returns over how many ranks FSDP2 shards each parameter: fewer for experts."""
    counts = dict.fromkeys(model.parameters(), ranks)
    every = ranks if model.tensor_ranks is None else ranks * model.tensor_ranks.size
    for experts in sharded_experts(model):
        assert experts.shard is not None
        counts |= dict.fromkeys(experts.parameters(), every // experts.shard.ranks.size)
    return counts


class FSDPGroup:
    """Holds the sizes of an FSDP2 group over so many ranks, and its buffers in a step."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: int, dtype: torch.dtype, sums: torch.dtype
    ) -> None:
        self.ranks, self.sums = ranks, sums
        self.trained = [p for p in parameters if p.requires_grad]
        self.numel = sum(padded_numel(p, ranks) for p in self.trained)
        self.gathered_bytes = sum(padded_numel(p, ranks) for p in parameters) * dtype.itemsize
        self.gathered: Tensor | None = None  # the unsharded weights
        self.prefetched: Tensor | None = None  # the buffer of the next gather
        self.accumulated: Tensor | None = None  # unsharded gradients
        self.shard: Tensor | None = None  # of the reduced gradients
        self.in_backward = False  # of this group
        self.pending = 0  # gradients that this backward has yet to compute


class FSDPTracker:
    """Allocates FSDP2's buffers on the meta device, in its order, for the tracker to count.

    A group has G bytes of weights in the dtype of the computation, and R bytes of gradients in the
    dtype of the reduction (parallel.reduction_dtype), over all ranks:

    - before forward, weights are gathered into a buffer (G, with several ranks), copied out (G) and
      freed afterwards; the buffer lives until the next group's is there
    - before backward they are gathered again, while those of the previous group are prefetched
    - after backward, gradients are copied into a buffer (R) and reduced into a shard; the buffer
      lives until the next group's gradients are there
    - in all micro-batches but the last, unsharded gradients accumulate in float32

    The model's parameters stand for the gathered weights; the shards are counted elsewhere. `kind`:
    what all buffers count as, such as those of a frozen model. Source: torch.distributed.fsdp,
    _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
    """

    def __init__(
        self,
        model: CausalLM,
        tracker: MemoryTracker,
        shares: Mapping[nn.Parameter, int],
        dtype: torch.dtype,
        param_dtype: torch.dtype,
        *,
        one_backward: bool = False,
        keep_shards: bool = True,
        kind: str | None = None,
    ) -> None:
        def group_of(parameters: Sequence[nn.Parameter]) -> FSDPGroup:
            count = shares[parameters[0]]
            sums = reduction_dtype(dtype, {param_dtype}, count, one_backward=one_backward)
            return FSDPGroup(parameters, count, dtype, sums)

        self.param_dtype, self.tracker, self.kind = param_dtype, tracker, kind
        self.keep_shards = keep_shards  # of gradients, until backward ends
        self.reduce = True  # gradients of this micro-batch
        self.buffer: Tensor | None = None  # of the last group gathered in forward
        self.reducing: Tensor | None = None  # of the last group whose gradients are reduced
        self.groups: list[FSDPGroup] = []  # in the order in which their forwards end
        self.in_backward = False
        decoder = model.model
        embedding, *others = decoder.embeddings
        for block in (*others, *decoder.first_modules, *decoder.layers):
            parts = [(experts, list(experts.parameters())) for experts in sharded_experts(block)]
            inner = {p for _, parameters in parts for p in parameters}
            rest = [p for p in block.parameters() if p not in inner]
            for module, parameters in (*parts, (block, rest)):
                group = group_of(parameters)
                self.groups.append(group)
                module.register_forward_pre_hook(lambda *_, g=group: self._before_forward(g))
                module.register_forward_hook(
                    lambda _m, _i, out, g=group: self._after_forward(g, out)
                )
        ends = [embedding, *decoder.last_modules, model.lm_head]
        unique = list(dict.fromkeys(p for module in ends for p in module.parameters()))
        self.groups.append(last := group_of(unique))
        embedding.register_forward_pre_hook(lambda *_: self._before_forward(last))
        model.lm_head.register_forward_hook(lambda _m, _i, out: self._hook_outputs(last, out))
        for group in self.groups:
            for parameter in group.trained:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, g=group: self._on_gradient(p, g)
                )

    def begin(self, *, reduce: bool) -> None:
        """Call before each micro-batch; `reduce` its gradients if it is the last."""
        self.reduce, self.in_backward = reduce, False
        for group in self.groups:
            group.pending, group.in_backward = len(group.trained), False

    def end(self) -> None:
        """Call after its backward."""
        self.reducing = None
        for group in self.groups:
            group.gathered = None

    def _allocate(self, size: int, kind: str) -> Tensor:
        return self.tracker.allocate(size, self.kind or kind)

    def _before_forward(self, group: FSDPGroup) -> None:
        """Gathers a group before its forward, unless backward recomputes it and has it already."""
        if group.gathered is not None:
            return
        if group.ranks > 1 and group.prefetched is None:
            self.buffer = self._allocate(group.gathered_bytes, COMMUNICATION)
        self._gather(group)

    def _after_forward(self, group: FSDPGroup, out: Any) -> None:
        """Frees a group after its forward, unless backward recomputed that."""
        if group.in_backward:
            return
        group.gathered = None
        if not self.in_backward:
            self._hook_outputs(group, out)

    def _hook_outputs(self, group: FSDPGroup, out: Any) -> None:
        """Starts a group's backward with the first gradient of an output of its forward."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: self._before_backward(group))

    def _before_backward(self, group: FSDPGroup) -> None:
        """Gathers a group before its backward, and prefetches the previous one."""
        if not self.in_backward:
            self.in_backward = True
            self.buffer = None
        group.in_backward = True
        if group.gathered is None:
            self._gather(group)
        at = self.groups.index(group)
        before = self.groups[at - 1] if at else None
        if before is None or before.ranks == 1 or before.in_backward:
            return
        if before.prefetched is None and before.gathered is None:
            before.prefetched = self._allocate(before.gathered_bytes, COMMUNICATION)

    def _on_gradient(self, parameter: Any, group: FSDPGroup) -> None:
        """Counts a gradient; after a group's last one, reduces or accumulates all of the group."""
        self.tracker.relabel(parameter.grad, GRADIENTS)
        group.pending -= 1
        if group.pending:
            return
        group.gathered = None
        size = group.numel * group.sums.itemsize
        if self.reduce:
            self.reducing = None  # before the next
            self.reducing = self._allocate(size, COMMUNICATION)
        elif group.accumulated is None:
            group.accumulated = self._allocate(size, GRADIENTS)
        for p in group.trained:
            p.grad = None
        if self.reduce:
            self._reduce(group)

    def _reduce(self, group: FSDPGroup) -> None:
        """Makes a group's shard of its gradients, in the dtype of the weights."""
        group.accumulated = None
        size = group.numel // group.ranks
        group.shard = self._allocate(size * group.sums.itemsize, GRADIENTS)
        if group.ranks == 1:  # the buffer is divided by 1 before it is copied
            self._allocate(group.numel * group.sums.itemsize, COMMUNICATION)
        if self.param_dtype != group.sums:
            group.shard = self._allocate(size * self.param_dtype.itemsize, GRADIENTS)
        if not self.keep_shards:
            group.shard = None

    def _gather(self, group: FSDPGroup) -> None:
        """Allocates the unsharded weights of a group, and frees the buffer of a prefetch."""
        group.gathered = self._allocate(group.gathered_bytes, GATHERED)
        group.prefetched = None


class ZeRO2Tracker:
    """Creates on the meta device what sharding=gradients holds besides whole weights, in the order
    of tigon/parallel/zero2.py, for the tracker to count."""

    def __init__(
        self,
        model: Any,
        tracker: MemoryTracker,
        ranks: int,
        sums: torch.dtype,
        param_dtype: torch.dtype,
    ) -> None:
        self.tracker, self.ranks, self.sums, self.param_dtype = tracker, ranks, sums, param_dtype
        self.reduce = True  # the gradients of this micro-batch
        self.added: dict[nn.Parameter, Tensor] = {}  # gradients in `sums`, if that is another dtype
        self.in_flight: deque[tuple[list[Tensor], list[Tensor]]] = deque()
        self.shards: list[Tensor] = []
        seen: set[nn.Parameter] = set()
        self.groups: list[list[nn.Parameter]] = []
        for modules in forward_order(model):
            found = dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad)
            self.groups.append([p for p in found if p not in seen])
            seen |= found.keys()
        for parameter in seen:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, *, reduce: bool) -> None:
        """Call before each micro-batch; `reduce` its gradients if it is the last."""
        self.reduce = reduce
        self.waiting = [group for group in self.groups if group]
        self.pending = {p for group in self.waiting for p in group}

    def end(self) -> None:
        """Call after its backward."""
        while self.reduce and self.waiting:
            self._begin_reduction(self.waiting.pop())
        while self.in_flight:
            self._end_reduction()

    def _on_gradient(self, parameter: Any) -> None:
        """Counts a gradient as added up, and begins reductions whose gradients are all there."""
        gradient = parameter.grad
        self.tracker.relabel(gradient, GRADIENTS)
        if gradient.dtype != self.sums:
            if parameter not in self.added:
                self.added[parameter] = self.tracker.relabel(gradient.to(self.sums), GRADIENTS)
            parameter.grad = None
        self.pending.discard(parameter)
        del gradient
        while self.reduce and self.waiting and not self.pending.intersection(self.waiting[-1]):
            self._begin_reduction(self.waiting.pop())

    def _begin_reduction(self, group: list[nn.Parameter]) -> None:
        """Makes the padded gradients and reduced parts of a group, and ends the oldest reduction if
        more than IN_FLIGHT are under way."""
        gradients, parts = [], []
        for p in group:
            grad = self.added.pop(p, None)
            grad = p.grad if grad is None else grad
            p.grad = None
            each = -(-p.shape[0] // self.ranks)
            if grad is None or each * self.ranks != len(p):  # padded with zeros
                shape = (each * self.ranks, *p.shape[1:])
                grad = self.tracker.relabel(p.new_empty(shape, dtype=self.sums), COMMUNICATION)
            gradients.append(grad)
            if self.ranks > 1:
                part = p.new_empty((each, *p.shape[1:]), dtype=self.sums)
                parts.append(self.tracker.relabel(part, GRADIENTS))
            else:  # nothing is sent
                parts.append(grad)
        self.in_flight.append((gradients, parts))
        if len(self.in_flight) > IN_FLIGHT:
            self._end_reduction()

    def _end_reduction(self) -> None:
        """Frees the gradients of the oldest reduction, whose parts stay in the weights' dtype."""
        _, parts = self.in_flight.popleft()
        self.shards += [
            self.tracker.relabel(part.to(self.param_dtype), GRADIENTS) for part in parts
        ]
