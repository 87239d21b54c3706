"""Gradients of parameters that tensor parallelism replicates: norms, routers, kv heads.

Each rank has a partial gradient, that of its tokens or heads; they are summed once a step.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.layers.collectives import Ranks
from tigon.models import CausalLM
from tigon.weights import Copy, own_rows, own_slices


class TensorParallel:
    """The tensor ranks of a split model, and its groups of replicas, by their size."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        of = {n: {p.copy.of for p in parts if p.copy} - {1} for n, parts in self.layout.items()}
        self.copied = {
            name for name, counts in of.items() if counts
        }  # wholly, or some of their rows
        counts: set[int] = set().union(*of.values())
        self.members: list[int] = mesh.mesh.tolist()  # global ranks
        self.alike = {self.ranks.size: self.ranks}
        for count in sorted(counts - {self.ranks.size}):
            self.alike[count] = self._neighbours(count)

    def _neighbours(self, count: int) -> Ranks:
        first = self.ranks.rank // count * count
        of = self.members[first : first + count]
        group = dist.new_group(of, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks.of(group)

    def sum_apart(self) -> None:
        """Sum gradients in a process group of their own, for a model that sums in backward: its
        collectives then do not queue behind those of the pass, nor delay them. Every rank calls
        this."""
        self.alike[self.ranks.size] = self._neighbours(self.ranks.size)

    def sum_gradients(self, model: nn.Module) -> None:
        """Once a step, after its last backward pass, before clipping and the optimizer.

        Every rank calls this.
        """
        self.sum_some(model.named_parameters())

    @torch.no_grad()
    def sum_some(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """`sum_gradients` of some parameters, the same ones on all ranks."""
        blocks: dict[int, list[Tensor]] = {count: [] for count in self.alike}
        for name, p, gradient in _gradients(named):
            if name in self.copied:
                for copy, block in self._blocks(name, p, gradient):
                    if copy.of > 1:
                        blocks[copy.of].append(block)
        for count, ranks in self.alike.items():
            if found := blocks[count]:
                # In float32, so that a sum of bfloat16 is rounded once
                total = ranks.sum(torch.cat([block.flatten() for block in found]).float())
                each = total.split([block.numel() for block in found])
                torch._foreach_copy_(
                    found, [x.view_as(b) for b, x in zip(found, each, strict=True)]
                )

    def counted(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's gradients, without those that an earlier rank has too, so that a norm over
        all ranks counts each once; paired with their parameter, which may have several."""
        for name, p, gradient in _gradients(named):
            if name in self.copied:
                for copy, block in self._blocks(name, p, gradient):
                    if not copy.number:
                        yield p, block
            elif gradient.numel():
                yield p, gradient

    def _blocks(self, name: str, p: Tensor, gradient: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        _, first = own_rows(name, p)
        for part in self.layout[name]:
            for _, block in own_slices(part, p.shape, gradient, first):
                yield part.copy or Copy(), block


def _gradients(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, parameter and local gradient of each parameter that has one."""
    for name, p in named:
        if p.grad is not None:
            yield name, p, p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


def find_tensor(model: nn.Module) -> TensorParallel | None:
    return vars(model).get("_tensor")


def set_tensor(model: CausalLM, mesh: DeviceMesh) -> None:
    vars(model)["_tensor"] = TensorParallel(model, mesh)
