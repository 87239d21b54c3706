"""Gradients of what several ranks of tensor parallelism have alike: norms, routers, kv heads.

Each of them finds a part, of its tokens or its heads.
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
    """Of a model that is cut: the ranks, and those with the same by how many they are."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        of = {n: {p.copy.of for p in parts if p.copy} - {1} for n, parts in self.layout.items()}
        self.copied = {name for name, counts in of.items() if counts}  # in part, perhaps
        counts: set[int] = set().union(*of.values())
        self.members: list[int] = mesh.mesh.tolist()  # of the process group
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
        """Of a model whose gradients are summed while backward goes on: by messages that neither
        wait for those of the pass nor hold them up. Every rank calls this."""
        self.alike[self.ranks.size] = self._neighbours(self.ranks.size)

    def sum_gradients(self, model: nn.Module) -> None:
        """Once a step, after its last backward pass, and before anything is made of gradients.

        Every rank calls this.
        """
        self.sum_some(model.named_parameters())

    @torch.no_grad()
    def sum_some(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """As `sum_gradients`, of some of the model's parameters, the same on all ranks."""
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
        """The gradients on this rank, and none that an earlier one has too; each with its
        parameter, which may have several."""
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
    """Of each parameter that has one: its name, it, and what this rank has of its gradient."""
    for name, p in named:
        if p.grad is not None:
            yield name, p, p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


def find_tensor(model: nn.Module) -> TensorParallel | None:
    return vars(model).get("_tensor")


def set_tensor(model: CausalLM, mesh: DeviceMesh) -> None:
    vars(model)["_tensor"] = TensorParallel(model, mesh)
