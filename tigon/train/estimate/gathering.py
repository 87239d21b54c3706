"""What FSDP2 allocates around each group of parameters, in the order in which it does.

Of a group, G bytes in the dtype of the computation and R in float32, both of all ranks together:

- before a group's forward its weights are gathered into a buffer (G, with several ranks), copied
  out of it (G), and freed after it; the buffer lives until the next group's is there
- before its backward they are gathered again, and those of the group before it are on their way
- after its backward the gradients are copied into a buffer (R) and reduced into a shard; the buffer
  lives until the next group's gradients are there
- without reduction, in all micro-batches but the last, whole gradients add up in float32

Source: torch.distributed.fsdp, _fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tigon.train.estimate.meter import Ledger, Meter, rounded

GATHERED, GRADIENTS, COMMUNICATION = "gathered weights", "gradients", "communication"


def padded(parameter: Tensor, world: int) -> int:
    """Numbers of all ranks' shards, which are equally long."""
    return -(-parameter.shape[0] // world) * world * (parameter.numel() // parameter.shape[0])


class Group:
    """The parameters that are gathered together."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: int, dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self.trained = [p for p in parameters if p.requires_grad]
        self.gathered = sum(padded(p, world) for p in self.parameters) * dtype.itemsize
        numbers = sum(padded(p, world) for p in self.trained)
        self.reduced, self.shard = 4 * numbers, 4 * numbers // world
        self.is_gathered = False
        self.is_prefetched = False
        self.accumulated = 0  # bytes of whole gradients
        self.missing = 0  # gradients of this backward that are to come


class Gathering:
    """Adds to the ledger what FSDP2 would hold, as the model computes on the meta device.

    The model's own parameters stand for the gathered ones. Its shards are no part of it.
    """

    def __init__(
        self, model: Any, meter: Meter, world: int, dtype: torch.dtype, param_dtype: torch.dtype
    ) -> None:
        self.ledger: Ledger = meter.ledger
        self.world, self.param_dtype, self.meter = world, param_dtype, meter
        self.reduce = True  # the gradients of this micro-batch
        self.keeps = True  # shards of gradients, until backward is over
        self.buffer = 0  # of the last group gathered in forward
        self.reducing = 0  # of the last group whose gradients are reduced
        self.blocks = [Group(list(b.parameters()), world, dtype) for b in model.model.layers]
        ends = [model.model.embed_tokens, model.model.norm, model.lm_head]
        unique = dict.fromkeys(p for module in ends for p in module.parameters())
        self.ends = Group(list(unique), world, dtype)
        self.in_backward = False
        for group, block in zip(self.blocks, model.model.layers, strict=True):
            block.register_forward_pre_hook(lambda *_, g=group: self._enter(g))
            block.register_forward_hook(lambda _m, _i, out, g=group: self._leave(g, out))
        model.model.embed_tokens.register_forward_pre_hook(lambda *_: self._enter(self.ends))
        model.lm_head.register_forward_hook(lambda _m, _i, out: self._before_backward(out))
        for group in (*self.blocks, self.ends):
            for parameter in group.trained:
                hook = self._hook(group)
                parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, *, reduce: bool) -> None:
        """Before each micro-batch."""
        self.reduce, self.in_backward = reduce, False
        for group in (*self.blocks, self.ends):
            group.missing = len(group.trained)

    def end(self) -> None:
        """After its backward."""
        for group in (*self.blocks, self.ends):
            self._release(group)
            group.is_prefetched = False
        self._replace("reducing", 0)

    def _enter(self, group: Group) -> None:
        """Before a group's forward; in backward, where a block is recomputed, it is there."""
        if group.is_gathered:
            return
        if self.world > 1:
            self._replace("buffer", group.gathered)
        self._gather(group)

    def _leave(self, group: Group, out: Any) -> None:
        if self.in_backward:
            return
        self._release(group)
        at = self.blocks.index(group)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad, at=at: self._before(at))

    def _before_backward(self, out: Any) -> None:
        """After the head's forward the model's is over, and its backward begins with the head."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: self._before(len(self.blocks)))

    def _before(self, at: int) -> None:
        """Before the backward of block `at`, or of the head behind the last one."""
        if not self.in_backward:
            self.in_backward = True
            self._replace("buffer", 0)
        if at < len(self.blocks) and not self.blocks[at].is_gathered:
            group = self.blocks[at]
            self._gather(group)
            if group.is_prefetched:
                self.ledger.remove(COMMUNICATION, group.gathered)
                group.is_prefetched = False
        if self.world > 1 and at > 0 and not self.blocks[at - 1].is_prefetched:
            before = self.blocks[at - 1]
            if not before.is_gathered:
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
        if self.world == 1:  # the buffer divided by 1, before it is copied
            self._add_briefly(group.reduced)
        if self.param_dtype != torch.float32:  # shards of the weights' dtype
            self._add_briefly(
                sum(rounded(p, self.param_dtype) for p in group.trained) // self.world
            )
            self.ledger.remove(GRADIENTS, group.shard * (4 - self.param_dtype.itemsize) // 4)
        if not self.keeps:
            self.ledger.remove(GRADIENTS, group.shard * self.param_dtype.itemsize // 4)

    def _drop_gradients(self, group: Group) -> None:
        for parameter in group.trained:
            parameter.grad = None

    def _gather(self, group: Group) -> None:
        group.is_gathered = True
        self.ledger.add(GATHERED, group.gathered)

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
