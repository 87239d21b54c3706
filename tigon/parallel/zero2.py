"""ZeRO-2 (Rajbhandari et al., 2020): weights are replicated during passes; gradients and optimizer
states are sharded.

For models that fit. FSDP2 gathers weights in forward and again in backward, through buffers that it
copies into and out of. Here a step has one all-gather of the weights, which overlaps with its first
forward, and one reduce-scatter of the gradients, which overlaps with its last backward, and nothing
is copied:

- Each rank has the same rows of every parameter as with FSDP2, Shard(0), contiguous in the whole
  parameter's memory, which collectives write and read in place. The NCCL calls of a block are
  coalesced into one kernel. A flat buffer would need a copy for each gather, or shards that divide
  rows, which 8-bit states, Muon and checkpoints of rows do not support.
- Between steps the model's parameters are DTensors of these rows, as with FSDP2, so optimizers,
  clipping, weight averages, checkpoints and exports need no special case. During passes they are
  the whole parameters. If both have the same dtype, the rows are a view of the whole memory.
- Autograd makes the tensor that backward computes the gradient of a parameter without one, so
  nothing is added and nothing needs to be zeroed. The whole gradient is freed once it is reduced.

# R rows of a parameter, n ranks, r = ceil(R / n) rows of each, the last ones padded
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tigon.models import CausalLM

# torch 2.13 has new names, and warns of the old ones
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
IN_FLIGHT = 2  # reductions in flight when the next one begins


class ShardedParameter:
    """A parameter that is `rows`, the local shard, between passes, and `whole` during them."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        self.owners: list[tuple[nn.Module, str]] = []  # its registrations; several if it is tied
        self.mesh, self.shape = mesh, parameter.shape
        self.each = -(-self.shape[0] // mesh.size())  # r
        first = mesh.get_local_rank() * self.each
        local = parameter.detach()[first : first + self.each].clone()
        shard = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=parameter.stride()
        )
        self.rows: Any = nn.Parameter(shard, parameter.requires_grad)
        self.sum: Tensor | None = None  # of gradients, if their dtype is too narrow

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocates the whole parameter in `dtype`; rows of this dtype move into its memory."""
        local, ranks = self.rows.detach().to_local(), self.mesh.size()
        self.memory = local.new_empty(self.each * ranks, *self.shape[1:], dtype=dtype)  # [n r, ...]
        self.shard = self.memory.tensor_split(ranks)[self.mesh.get_local_rank()]  # [r, ...]
        self.whole = nn.Parameter(self.memory[: self.shape[0]], requires_grad=False)
        self.source: Any = local if local.dtype != dtype else None
        self.target = self.shard[: len(local)]
        if self.source is None:
            self.target.copy_(local)
            # As FSDP2 does: optimizers may already hold the parameter
            self.rows._local_tensor = self.target

    def register(self, parameter: nn.Parameter) -> None:
        """Puts the parameter into the modules that own it."""
        for module, name in self.owners:
            module._parameters[name] = parameter

    def add_up(self, dtype: torch.dtype) -> None:
        """Adds a gradient of another dtype to `sum`, in `dtype`, and removes it from `whole`."""
        gradient = self.whole.grad
        if gradient is None or gradient.dtype == dtype:
            return
        self.sum = gradient.to(dtype) if self.sum is None else self.sum.add_(gradient)
        self.whole.grad = None

    def take_gradient(self, dtype: torch.dtype) -> Tensor:
        """Removes and returns the accumulated gradient [n r, ...], padded with zeros."""
        gradient = self.whole.grad if self.sum is None else self.sum
        self.whole.grad = self.sum = None
        if gradient is None:
            return torch.zeros_like(self.memory, dtype=dtype)
        missing = len(self.memory) - len(gradient)
        if not missing:
            return gradient
        return torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])

    def set_local_grad(self, shard: Tensor) -> None:
        """Set the reduced gradient `shard` [r, ...] as that of `rows`, or add it to theirs."""
        rows = shard[: len(self.target)].to(self.rows.dtype)
        # As FSDP2 does: from_local takes ten times as long
        gradient = DTensor(rows, self.rows._spec, requires_grad=False)
        self.rows.grad = gradient if self.rows.grad is None else self.rows.grad + gradient


class ShardedGroup:
    """Parameters that one call gathers, and whose gradients one call reduces."""

    def __init__(self, weights: Sequence[ShardedParameter]) -> None:
        self.weights = weights
        self.trained: list[ShardedParameter] = []
        self.missing = 0  # gradients that this backward has yet to compute
        self.gathering: Any = None  # the all-gather in flight


class Reduction(NamedTuple):
    """A reduce-scatter of gradients in flight."""

    weights: Sequence[ShardedParameter]
    gradients: Sequence[Tensor]  # kept alive until the collective is done
    shards: Sequence[Tensor]
    handle: Any


class Zero2:
    """ZeRO-2 of one model, by hooks. Every rank must run the same passes, since all gather."""

    def __init__(
        self, model: CausalLM, mesh: DeviceMesh, compute: torch.dtype, sums: torch.dtype
    ) -> None:
        self.mesh, self.compute, self.sums = mesh, compute, sums
        self.reduces = True  # in the next backward; otherwise gradients accumulate locally
        self.gathered = self.allocated = False
        self.reductions: deque[Reduction] = deque()
        self.pending: list[ShardedGroup] | None = None  # during backward: groups not yet reduced
        self.weights: dict[nn.Parameter, ShardedParameter] = {}  # by whole parameter
        self.hooked: set[ShardedParameter] = set()
        self.groups: list[ShardedGroup] = []
        seen: dict[nn.Parameter, ShardedParameter] = {}
        model.register_forward_pre_hook(lambda *_: self._begin())
        for modules in forward_order(model):
            new: list[ShardedParameter] = []
            for module in (inner for outer in modules for inner in outer.modules()):
                for name, parameter in module._parameters.items():
                    if parameter is None:
                        continue
                    if parameter not in seen:
                        seen[parameter] = ShardedParameter(parameter, mesh)
                        new.append(seen[parameter])
                    seen[parameter].owners.append((module, name))
            self.groups.append(group := ShardedGroup(new))
            for module in modules:
                module.register_forward_pre_hook(lambda *_, group=group: self._enter(group))
        if unassigned := [n for n, p in model.named_parameters() if p not in seen]:
            raise ValueError(
                f"{', '.join(unassigned[:3])}: not in a block, embedding, last norm or head"
            )
        for weight in seen.values():
            weight.register(weight.rows)
        model.register_state_dict_pre_hook(lambda *_: self.release())
        model.register_load_state_dict_pre_hook(lambda *_: self.release())
        # After a forward without a backward, weights are still gathered: without this the next
        # forward would not see an optimizer step in between
        reference = weakref.ref(self)

        def release(*_: Any) -> None:
            if (zero := reference()) is not None:
                zero.release()

        weakref.finalize(self, register_optimizer_step_pre_hook(release).remove)

    @torch.no_grad()
    def gather(self) -> None:
        """Starts all-gathers of all weights, which stay until `release` or the last backward."""
        if self.gathered:
            return
        self.allocate()
        self.gathered = True
        for group in self.groups:
            converted = [w for w in group.weights if w.source is not None]
            if converted:
                torch._foreach_copy_([w.target for w in converted], [w.source for w in converted])
            if self.mesh.size() > 1 and group.weights:
                memories = [weight.memory for weight in group.weights]
                shards = [weight.shard for weight in group.weights]
                group.gathering = self._start(ALL_GATHER, memories, shards)
            group.trained = [w for w in group.weights if w.rows.requires_grad]
            for weight in group.weights:
                weight.whole.requires_grad_(weight.rows.requires_grad)
                weight.register(weight.whole)
            for weight in set(group.trained) - self.hooked:
                self.hooked.add(weight)
                # The garbage collector sees no cycle through a hook on gradients: it has proxies
                hook = partial(Zero2._accumulated, weakref.proxy(self), weakref.proxy(group))
                weight.whole.register_post_accumulate_grad_hook(hook)

    def _begin(self) -> None:
        """Gathers weights before a forward pass of the model; RuntimeError if a backward failed."""
        if self.pending is not None:
            raise RuntimeError(
                "an earlier backward pass has failed and left partly reduced gradients: restart "
                "from a checkpoint"
            )
        self.gather()

    def release(self) -> None:
        """Makes the local rows the model's parameters again, so that optimizers update them."""
        if not self.gathered:
            return
        self.gathered = False
        for group in self.groups:
            self._wait(group)
            for weight in group.weights:
                weight.register(weight.rows)

    def allocate(self) -> None:
        """Allocates the whole weights, once: after the rows, and before an optimizer takes pointers
        to them; at the latest in the first pass."""
        if self.allocated:
            return
        with torch.inference_mode(False), torch.no_grad():
            for weight in (w for group in self.groups for w in group.weights):
                module, name = weight.owners[0]
                weight.rows = module._parameters[name]  # which a loader may have replaced
                weight.allocate(self.compute)
                self.weights[weight.whole] = weight
        self.allocated = True

    def _enter(self, group: ShardedGroup) -> None:
        """Waits, before a group's forward, until its weights are gathered."""
        self.gather()  # a module may be called without the model's forward
        self._wait(group)

    def _wait(self, group: ShardedGroup) -> None:
        """Lets the current stream wait for the all-gather of a group's weights, if one runs."""
        if group.gathering is not None:
            group.gathering.wait()  # the stream waits, the host does not
            group.gathering = None

    def _accumulated(self, group: ShardedGroup, whole: nn.Parameter) -> None:
        """Adds up a whole parameter's gradient of this backward, after autograd has accumulated it.

        In a backward that reduces, it starts the reductions of the groups that are complete.
        """
        self.weights[whole].add_up(self.sums)
        if not self.reduces:
            return
        self.prepare_reduction()
        group.missing -= 1
        # In the same order on all ranks, from the head to the embedding
        while self.pending and not self.pending[-1].missing:
            self._begin_reduction(self.pending.pop())

    def prepare_reduction(self) -> None:
        """Prepares the reduction of all groups at the first gradient of a backward that reduces."""
        if not self.reduces or self.pending is not None:
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.pending = [g for g in self.groups if g.trained]
        for group in self.pending:
            group.missing = len(group.trained)

    def gradient_holder(self, whole: nn.Parameter) -> tuple[Any, str]:
        """The object and attribute with a parameter's gradient between backward passes."""
        weight = self.weights[whole]
        return (weight.whole, "grad") if self.sums == self.compute else (weight, "sum")

    def _begin_reduction(self, group: ShardedGroup) -> None:
        """Starts to reduce a group's gradients to their shards, and ends the oldest reduction if
        more than IN_FLIGHT are in flight."""
        with torch.no_grad():
            gradients = [w.take_gradient(self.sums).contiguous() for w in group.trained]
            shards, handle = gradients, None
            if self.mesh.size() > 1:
                shards = [torch.empty_like(w.shard, dtype=self.sums) for w in group.trained]
                handle = self._start(REDUCE_SCATTER, shards, gradients)
        self.reductions.append(Reduction(group.trained, gradients, shards, handle))
        if len(self.reductions) > IN_FLIGHT:
            self._end_reduction()

    @torch.no_grad()
    def _end_reduction(self) -> None:
        """Waits for the oldest reduction and sets the gradients of its shards."""
        reduction = self.reductions.popleft()
        if reduction.handle is not None:
            reduction.handle.wait()
        for weight, shard in zip(reduction.weights, reduction.shards, strict=True):
            weight.set_local_grad(shard)

    def _finish(self) -> None:
        """End all reductions at the end of a backward, and release the whole weights."""
        pending, self.pending = self.pending or [], None
        while pending:
            self._begin_reduction(pending.pop())
        while self.reductions:
            self._end_reduction()
        self.release()

    def drop_gradients(self) -> None:
        """Forgets the gradients of passes that failed on one rank, which may then be repeated."""
        self.pending = None
        self.reductions.clear()
        for weight in self.weights.values():
            weight.whole.grad = weight.rows.grad = weight.sum = None

    def _start(self, collective: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Starts ALL_GATHER or REDUCE_SCATTER of several tensors; returns its handle."""
        group = self.mesh.get_group()
        with dist._coalescing_manager(group, async_ops=True) as handle:
            for output, x in zip(outputs, inputs, strict=True):
                collective(output, x, group=group)
        return handle


def shard_gradients(
    model: CausalLM, mesh: DeviceMesh, compute: torch.dtype, sums: torch.dtype
) -> Zero2:
    """Shards the model's parameters, which may be on the meta device, between passes, by hooks;
    returns the Zero2, which the model also keeps.

    `compute` is the dtype of the whole weights, `sums` the one in which gradients accumulate over
    micro-batches and are reduced over ranks. Gradients are summed, not averaged, and given in the
    dtype of the rows.
    """
    model.zero2 = zero = Zero2(model, mesh, compute, sums)
    model.compute_dtype = compute
    return zero


def forward_order(model: CausalLM) -> Iterator[list[nn.Module]]:
    """Yields the modules of each group, in the order of forward."""
    for module in (*model.model.embeddings, *model.model.first_modules):
        yield [module]
    for block in model.model.layers:
        yield [block]
    yield [*model.model.last_modules, model.lm_head]
