"""Updates weights in backward, block by block, and frees their gradients (optimizer_in_backward).

An update has the same learning rate, step and random bits as one after backward, so weights and
states are equal bit for bit. Sources: torchtune's optimizer_in_bwd, and torch's tutorial on
register_post_accumulate_grad_hook.
"""

import math
import weakref
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tigon.models import CausalLM
from tigon.parallel import forward_order
from tigon.settings.config import Config
from tigon.train.optim.adamw import LowPrecisionOptimizer
from tigon.train.optim.clip import BucketedNorm


@dataclass
class BackwardBucket:
    """Parameters that are updated together, by one launch where the kernel runs."""

    number: int
    parameters: list[nn.Parameter]
    groups: dict[int, list[Tensor]] = field(default_factory=dict)  # by index of the optimizer's
    missing: int = 0  # gradients that this backward has yet to compute


class InBackward:
    """Updates parameters during `backward`, and frees each gradient after its update.

    A step has one forward and one backward. Calls of `loss.backward` elsewhere keep gradients.
    """

    def __init__(self, model: CausalLM, optimizer: Optimizer) -> None:
        """Registers a hook on each trained parameter; the optimizer must have all of them."""
        assert isinstance(optimizer, LowPrecisionOptimizer)  # Config says so
        self.optimizer, self.norm = optimizer, BucketedNorm(model)
        self.names = {p: name for name, p in model.named_parameters()}
        self.tensor = model.tensor_parallel
        if self.tensor is not None:
            self.tensor.use_separate_group()
        self.under_way = False  # stays true after a failed backward
        self.finite, self.scale = torch.tensor(True, device="cpu"), torch.tensor(1.0, device="cpu")
        self._waited: bool | None = None  # `finite`, on the host
        self.parts = [BackwardBucket(i, each) for i, each in enumerate(parameter_buckets(model))]
        self._updated: list[Tensor] = []
        index = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for part in self.parts:
            for p in part.parameters:
                part.groups.setdefault(index[p], []).append(p)
                # The autograd graph keeps hooks where the garbage collector sees no cycle
                arrived = partial(_on_gradient, weakref.ref(self), part.number)
                p.register_post_accumulate_grad_hook(arrived)

    def backward(self, loss: Tensor, total: Tensor | None = None) -> Tensor:
        """Runs backward from `loss` with updates, and returns the norm of all ranks' gradients.

        `total` is the loss over all ranks, if it differs. If it is not finite, no weight or state
        changes, and the caller uses `undo_step` once the host knows. Raises RuntimeError if the
        previous backward failed. Every rank calls this.
        """
        self.check()
        self.under_way = True
        self.norm.begin()
        self._updated = []
        whole = loss if total is None else total
        self.finite = whole.detach().isfinite()
        # The kernel changes nothing where this is NaN, and nobody waits for the device
        self.scale = torch.where(self.finite, 1.0, math.nan).float()
        self._waited = None
        for part in self.parts:
            part.missing = len(part.parameters)
        loss.backward()
        for part in self.parts:  # parameters without a gradient hold back their part
            self._update(part)
        self.under_way = False
        return self.norm.total()

    def undo_step(self) -> None:
        """Uncounts the step after a loss that was not finite, whose update changed nothing."""
        self.optimizer.undo_step(self._updated)
        self._updated = []

    def check(self) -> None:
        """Raises RuntimeError if a failed backward has updated only some weights."""
        if self.under_way:
            raise RuntimeError(
                "optimizer_in_backward: a backward pass has failed, and left weights of which some "
                "have its update and some have not: begin again, from a checkpoint"
            )

    def arrived(self, number: int) -> None:
        """Counts a complete gradient of part `number`, and updates the part after its last one;
        does nothing in a backward pass that `backward` has not begun."""
        if not self.under_way:
            return
        part = self.parts[number]
        part.missing -= 1
        if part.missing < 0:
            raise RuntimeError(
                "optimizer_in_backward: a backward pass has given a parameter a second gradient, "
                "after its update: leave optimizer_in_backward out"
            )
        if not part.missing:
            self._update(part)

    @torch.no_grad()
    def _update(self, part: BackwardBucket) -> None:
        """Adds the gradients of a part to the norm, updates its parameters if the loss is finite
        and frees the gradients; does nothing if there are none."""
        named = {self.names[p]: p for p in part.parameters if p.grad is not None}
        if not named:
            return
        if self.tensor is not None:
            self.tensor.all_reduce_grads(named.items())
        by_kernel = self.optimizer.uses_kernel(named.values())
        # Where each gradient counts once, the kernel that uses it sums its squares as well
        squares: list[Tensor] | None = [] if by_kernel and self.tensor is None else None
        if squares is None:
            self.norm.add(part.number, named, by_kernel=by_kernel)
        if by_kernel or self._is_finite():
            scale = self.scale if by_kernel else None
            self.optimizer.update(part.groups.items(), part.number, scale, squares)
            self._updated += named.values()
        self.norm.squares += squares or ()
        for p in named.values():
            p.grad = None

    def _is_finite(self) -> bool:
        """Returns whether the loss is finite; waits for the device once in a backward."""
        if self._waited is None:
            self._waited = bool(self.finite)
        return self._waited


def _on_gradient(updates: weakref.ref[InBackward], number: int, _: Tensor) -> None:
    """Tells the updates, if they are still alive, that a gradient has arrived."""
    if (there := updates()) is not None:
        there.arrived(number)


def parameter_buckets(model: CausalLM) -> list[list[nn.Parameter]]:
    """Returns the trained parameters of the embedding, of each block, and of the last norm with the
    head; a shared parameter belongs to the first."""
    buckets: list[list[nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    pieces: list[list[nn.Module]] = [*forward_order(model), [model]]
    for modules in pieces:
        every = dict.fromkeys(p for module in modules for p in module.parameters())
        buckets.append([p for p in every if p.requires_grad and p not in seen])
        seen |= every.keys()
    return [bucket for bucket in buckets if bucket]


def check_ranks(config: Config, ranks: int) -> None:
    """Raises ValueError if a step has several micro-batches, whose gradients would add up. `ranks`
    counts those with different rows."""
    if not config.optimizer_in_backward or config.micro_batch_size == "auto":
        return  # auto gives it one
    count = config.batch_size // (config.micro_batch_size * ranks)
    if count > 1:
        raise ValueError(
            "optimizer_in_backward=true updates weights in the only backward pass of a step, and "
            f"batch_size={config.batch_size} with micro_batch_size={config.micro_batch_size} has "
            f"{count} on {'one rank' if ranks == 1 else f'each of {ranks} ranks'}: give "
            f"micro_batch_size={config.batch_size // ranks}, or "
            f"batch_size={config.micro_batch_size * ranks}"
        )
