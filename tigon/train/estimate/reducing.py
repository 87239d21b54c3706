"""What sharding=gradients holds besides whole weights, in the order of tigon/parallel/zero2.py.

The tensors that it would hold are made here, on the meta device, so that the meter sees them come
and go.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from tigon.parallel import IN_FLIGHT, in_order
from tigon.train.estimate.gathering import COMMUNICATION, GRADIENTS
from tigon.train.estimate.meter import Meter


class Reducing:
    def __init__(
        self, model: Any, meter: Meter, world: int, sums: torch.dtype, param_dtype: torch.dtype
    ) -> None:
        self.meter, self.world, self.sums, self.param_dtype = meter, world, sums, param_dtype
        self.reduce = True  # the gradients of this micro-batch
        self.added: dict[nn.Parameter, Tensor] = {}  # gradients in `sums`, where that is another
        self.running: deque[tuple[list[Tensor], list[Tensor]]] = deque()
        self.shards: list[Tensor] = []
        seen: set[nn.Parameter] = set()
        self.groups: list[list[nn.Parameter]] = []
        for modules in in_order(model):
            found = dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad)
            self.groups.append([p for p in found if p not in seen])
            seen |= found.keys()
        for parameter in seen:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self, *, reduce: bool) -> None:
        """Before each micro-batch."""
        self.reduce = reduce
        self.waiting = [group for group in self.groups if group]
        self.missing = {p for group in self.waiting for p in group}

    def end(self) -> None:
        """After its backward."""
        while self.reduce and self.waiting:
            self._begin_reduction(self.waiting.pop())
        while self.running:
            self._end_reduction()

    def _accumulated(self, parameter: Any) -> None:
        gradient = parameter.grad
        self.meter.relabel(gradient, GRADIENTS)
        if gradient.dtype != self.sums:
            if parameter not in self.added:
                self.added[parameter] = self._made(gradient.to(self.sums), GRADIENTS)
            parameter.grad = None
        self.missing.discard(parameter)
        del gradient
        while self.reduce and self.waiting and not self.missing.intersection(self.waiting[-1]):
            self._begin_reduction(self.waiting.pop())

    def _begin_reduction(self, group: list[nn.Parameter]) -> None:
        gradients, parts = [], []
        for p in group:
            found = self.added.pop(p, None)
            found = p.grad if found is None else found
            p.grad = None
            each = -(-p.shape[0] // self.world)
            if found is None or each * self.world != len(p):  # with rows of zeros
                shape = (each * self.world, *p.shape[1:])
                found = self._made(p.new_empty(shape, dtype=self.sums), COMMUNICATION)
            gradients.append(found)
            if self.world > 1:
                part = p.new_empty((each, *p.shape[1:]), dtype=self.sums)
                parts.append(self._made(part, GRADIENTS))
            else:  # nothing is sent
                parts.append(found)
        self.running.append((gradients, parts))
        if len(self.running) > IN_FLIGHT:
            self._end_reduction()

    def _end_reduction(self) -> None:
        _, parts = self.running.popleft()
        self.shards += [self._made(part.to(self.param_dtype), GRADIENTS) for part in parts]

    def _made(self, tensor: Tensor, kind: str) -> Tensor:
        self.meter.relabel(tensor, kind)
        return tensor
