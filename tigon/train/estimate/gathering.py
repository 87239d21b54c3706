"""What FSDP2 allocates around each group of parameters, in the order in which it does.

Of a group, G bytes in the dtype of the computation and R in that of sums over ranks
(parallel.reduction_dtype), both of all ranks together:

- before a group's forward its weights are gathered into a buffer (G, with several ranks), copied
  out of it (G), and freed after it; the buffer lives until the next group's is there
- before its backward they are gathered again, and those of the group before it are on their way
- after its backward the gradients are copied into a buffer (R) and reduced into a shard; the buffer
  lives until the next group's gradients are there
- without reduction, in all micro-batches but the last, whole gradients add up in float32

Source: torch.distributed.fsdp, _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tigon.layers import Experts
from tigon.models import CausalLM
from tigon.parallel import reduction_dtype
from tigon.train.estimate.meter import Ledger, Meter, rounded

GATHERED, GRADIENTS, COMMUNICATION = "gathered weights", "gradients", "communication"


def padded(parameter: Tensor, world: int) -> int:
    """Numbers of all ranks' shards, which are equally long."""
    rows = parameter.shape[0]  # 0 where a tensor rank has no part of a narrow one
    return -(-rows // world) * world * (parameter.numel() // rows) if rows else 0


def held(parameter: Tensor, world: int, dtype: torch.dtype) -> int:
    """Bytes of a rank's shard; with one rank, of the parameter."""
    if world == 1:
        return rounded(parameter, dtype)
    return padded(parameter, world) * dtype.itemsize // world


def whole(model: CausalLM, world: int, dtype: torch.dtype) -> int:
    """Bytes of all weights, of which `world` ranks update a shard each."""
    return sum(padded(p, world) for p in model.parameters()) * dtype.itemsize


def shared_experts(module: nn.Module) -> Iterator[Experts]:
    """Those inside it that ranks divide; `parallel.shard` makes a group of each."""
    for inner in module.modules():
        if isinstance(inner, Experts) and inner.shard is not None:
            yield inner


def ranks_of(model: CausalLM, world: int) -> dict[nn.Parameter, int]:
    """Over how many ranks FSDP2 divides each parameter: `world`, or those with the same experts."""
    found = dict.fromkeys(model.parameters(), world)
    every = world if model.tensor_ranks is None else world * model.tensor_ranks.size
    for experts in shared_experts(model):
        assert experts.shard is not None
        found |= dict.fromkeys(experts.parameters(), every // experts.shard.ranks.size)
    return found


class Group:
    """The parameters that `world` ranks gather together."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: int, dtype: torch.dtype, sums: torch.dtype
    ) -> None:
        self.parameters, self.world, self.sums = list(parameters), world, sums
        self.trained = [p for p in parameters if p.requires_grad]
        self.gathered = sum(padded(p, world) for p in self.parameters) * dtype.itemsize
        numbers = sum(padded(p, world) for p in self.trained)
        self.reduced = numbers * sums.itemsize
        self.shard = self.reduced // world
        self.is_gathered = False
        self.is_prefetched = False
        self.in_backward = False  # its own has begun
        self.accumulated = 0  # bytes of whole gradients
        self.missing = 0  # gradients of this backward that are to come


class Gathering:
    """Adds to the ledger what FSDP2 would hold, as the model computes on the meta device.

    The model's own parameters stand for the gathered ones. Its shards are no part of it.
    """

    def __init__(
        self,
        model: CausalLM,
        meter: Meter,
        ranks: Mapping[nn.Parameter, int],
        dtype: torch.dtype,
        param_dtype: torch.dtype,
        *,
        one_backward: bool = False,
    ) -> None:
        def group_of(parameters: Sequence[nn.Parameter]) -> Group:
            shared = ranks[parameters[0]]
            sums = reduction_dtype(dtype, {param_dtype}, shared, one_backward=one_backward)
            return Group(parameters, shared, dtype, sums)

        self.ledger: Ledger = meter.ledger
        self.param_dtype, self.meter = param_dtype, meter
        self.reduce = True  # the gradients of this micro-batch
        self.keeps = True  # shards of gradients, until backward is over
        self.buffer = 0  # of the last group gathered in forward
        self.reducing = 0  # of the last group whose gradients are reduced
        self.groups: list[Group] = []  # in the order in which forward ends with them
        self.in_backward = False
        for block in model.model.layers:
            apart = list(shared_experts(block))
            inner = {p for experts in apart for p in experts.parameters()}
            parts = [(experts, list(experts.parameters())) for experts in apart]
            for module, own in (*parts, (block, [p for p in block.parameters() if p not in inner])):
                group = group_of(own)
                self.groups.append(group)
                module.register_forward_pre_hook(lambda *_, g=group: self._enter(g))
                module.register_forward_hook(lambda _m, _i, out, g=group: self._leave(g, out))
        ends = [model.model.embed_tokens, model.model.norm, model.lm_head]
        unique = list(dict.fromkeys(p for module in ends for p in module.parameters()))
        self.groups.append(last := group_of(unique))
        model.model.embed_tokens.register_forward_pre_hook(lambda *_: self._enter(last))
        model.lm_head.register_forward_hook(lambda _m, _i, out: self._watch(last, out))
        for group in self.groups:
            for parameter in group.trained:
                hook = self._hook(group)
                parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, *, reduce: bool) -> None:
        """Before each micro-batch."""
        self.reduce, self.in_backward = reduce, False
        for group in self.groups:
            group.missing, group.in_backward = len(group.trained), False

    def end(self) -> None:
        """After its backward."""
        for group in self.groups:
            self._release(group)
        self._replace("reducing", 0)

    def _enter(self, group: Group) -> None:
        """Before a group's forward; in backward, where a block is recomputed, it is there."""
        if group.is_gathered:
            return
        if group.world > 1 and not group.is_prefetched:
            self._replace("buffer", group.gathered)
        self._gather(group)

    def _leave(self, group: Group, out: Any) -> None:
        """After a group's forward, unless that is part of its own backward."""
        if group.in_backward:
            return
        self._release(group)
        if not self.in_backward:
            self._watch(group, out)

    def _watch(self, group: Group, out: Any) -> None:
        """A gradient of what its forward has made begins its backward, after that of the head."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: self._before(group))

    def _before(self, group: Group) -> None:
        """Before a group's backward: the group before it is gathered meanwhile."""
        if not self.in_backward:
            self.in_backward = True
            self._replace("buffer", 0)
        group.in_backward = True
        if not group.is_gathered:
            self._gather(group)
        at = self.groups.index(group)
        before = self.groups[at - 1] if at else None
        if before is None or before.world == 1:
            return
        if not (before.is_prefetched or before.is_gathered or before.in_backward):
            before.is_prefetched = True
            self.ledger.add(COMMUNICATION, before.gathered)

    def _hook(self, group: Group) -> Any:
        def accumulated(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.meter.relabel(parameter.grad, GRADIENTS)
            group.missing -= 1
            if not group.missing:
                self._after(group)

        return accumulated

    def _after(self, group: Group) -> None:
        """After the backward of a group."""
        self._release(group)
        if not self.reduce:
            if not group.accumulated:
                group.accumulated = group.reduced
                self.ledger.add(GRADIENTS, group.reduced)
            self._drop_gradients(group)
            return
        self._replace("reducing", group.reduced)
        self._drop_gradients(group)
        self.ledger.remove(GRADIENTS, group.accumulated)
        group.accumulated = 0
        self.ledger.add(GRADIENTS, group.shard)
        if group.world == 1:  # the buffer divided by 1, before it is copied
            self._add_briefly(group.reduced)
        shard = group.shard * self.param_dtype.itemsize // group.sums.itemsize
        if self.param_dtype != group.sums:  # shards of the weights' dtype
            self._add_briefly(
                sum(rounded(p, self.param_dtype) for p in group.trained) // group.world
            )
            self.ledger.remove(GRADIENTS, group.shard - shard)
        if not self.keeps:
            self.ledger.remove(GRADIENTS, shard)

    def _drop_gradients(self, group: Group) -> None:
        for parameter in group.trained:
            parameter.grad = None

    def _gather(self, group: Group) -> None:
        group.is_gathered = True
        self.ledger.add(GATHERED, group.gathered)
        if group.is_prefetched:
            self.ledger.remove(COMMUNICATION, group.gathered)
            group.is_prefetched = False

    def _release(self, group: Group) -> None:
        if group.is_gathered:
            group.is_gathered = False
            self.ledger.remove(GATHERED, group.gathered)

    def _replace(self, name: str, size: int) -> None:
        """A buffer by the next one; with gathers, both are there for a moment."""
        old = getattr(self, name)
        if name == "reducing":
            self.ledger.remove(COMMUNICATION, old)
            self.ledger.add(COMMUNICATION, size)
        else:
            self.ledger.add(COMMUNICATION, size)
            self.ledger.remove(COMMUNICATION, old)
        setattr(self, name, size)

    def _add_briefly(self, size: int) -> None:
        self.ledger.add(COMMUNICATION, size)
        self.ledger.remove(COMMUNICATION, size)
