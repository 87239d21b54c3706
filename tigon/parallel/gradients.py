"""Gradients of what several ranks of tensor parallelism have alike: norms, routers, kv heads.

Each of them finds a part, of its tokens or its heads.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.layers.collectives import Ranks
from tigon.models import CausalLM
from tigon.weights import Part, own_rows, own_slices


class TensorParallel:
    """Of a model that is cut: the ranks, and those with the same by how many they are."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        counts = {part.copy.of for parts in self.layout.values() for part in parts if part.copy}
        self.alike = {self.ranks.size: self.ranks}
        for count in sorted(counts - {1, self.ranks.size}):
            first = self.ranks.rank // count * count
            neighbours = mesh.mesh.tolist()[first : first + count]
            group = dist.new_group(neighbours, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self.alike[count] = Ranks.of(group)

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Once a step, after its last backward pass, and before anything is made of gradients.

        Every rank calls this.
        """
        blocks: dict[int, list[Tensor]] = {count: [] for count in self.alike}
        for part, block in self._blocks(model):
            if part.copy is not None and part.copy.of > 1:
                blocks[part.copy.of].append(block)
        for count, ranks in self.alike.items():
            if found := blocks[count]:
                total = ranks.sum(torch.cat([block.flatten() for block in found]))
                each = total.split([block.numel() for block in found])
                for block, own in zip(found, each, strict=True):
                    block.copy_(own.view_as(block))

    def counted(self, model: nn.Module) -> list[Tensor]:
        """The gradients on this rank, and none that an earlier one has too."""
        return [b for part, b in self._blocks(model) if part.copy is None or not part.copy.number]

    def _blocks(self, model: nn.Module) -> Iterator[tuple[Part, Tensor]]:
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            _, first = own_rows(name, p)
            for part in self.layout[name]:
                for _, block in own_slices(part, p.shape, gradient, first):
                    yield part, block


def find_tensor(model: nn.Module) -> TensorParallel | None:
    return vars(model).get("_tensor")


def set_tensor(model: CausalLM, mesh: DeviceMesh) -> None:
    vars(model)["_tensor"] = TensorParallel(model, mesh)
