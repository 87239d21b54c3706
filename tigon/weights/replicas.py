"""Parameters that several ranks have alike: one of them reads each, and sends it to the others."""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Replicas:
    """Who reads which parameter, on all ranks alike; `own` are those that this rank reads."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.own: list[str] = []
        self._readers: dict[str, tuple[DeviceMesh, dict[int, int]]] = {}
        loads: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
        for name, p in parameters.items():
            dims = _replicated(p)
            if not dims:
                self.own.append(name)
                continue
            assert isinstance(p, DTensor)
            mesh = p.device_mesh
            sizes = [mesh.size(dim) for dim in dims]
            # The one that has the least to read so far
            load = loads.setdefault((mesh, dims), [0] * math.prod(sizes))
            reader = load.index(min(load))
            load[reader] += p.numel() * p.dtype.itemsize
            at = list(itertools.product(*map(range, sizes)))[reader]
            self._readers[name] = mesh, dict(zip(dims, at, strict=True))
            if all(mesh.get_local_rank(dim) == i for dim, i in self._readers[name][1].items()):
                self.own.append(name)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise on every rank where it was raised on one: nobody waits for what is never sent."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        groups = {(mesh, dim) for mesh, reader in self._readers.values() for dim in reader}
        failed = failure is not None
        for mesh, dim in sorted(groups, key=lambda group: (str(group[0].mesh.tolist()), group[1])):
            flag = torch.tensor(float(failed), device=mesh.device_type)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=mesh.get_group(dim))
            failed = bool(flag.item())
        if failure is not None:
            raise failure
        if failed:
            raise RuntimeError("another rank could not read the checkpoint: it says why")

    def send(self, memory: Mapping[str, Tensor]) -> None:
        """Fill every parameter's memory on this rank from the rank that has read it."""
        for name, (mesh, reader) in self._readers.items():
            if not memory[name].numel():
                continue
            flat = memory[name].contiguous().view(-1).view(torch.uint8)
            dims = list(reader)
            for i, dim in enumerate(dims):
                # Along the first dimension first, then all ranks that have it along the next
                if all(mesh.get_local_rank(d) == reader[d] for d in dims[i + 1 :]):
                    dist.broadcast(flat, group=mesh.get_group(dim), group_src=reader[dim])
            if not memory[name].is_contiguous():
                memory[name].copy_(flat.view(memory[name].dtype).view(memory[name].shape))


def _replicated(p: Tensor) -> tuple[int, ...]:
    """The dimensions of its mesh along which all ranks have the same."""
    if not isinstance(p, DTensor) or p.device_mesh.get_coordinate() is None:
        return ()
    mesh = p.device_mesh
    return tuple(
        dim
        for dim, placement in enumerate(p.placements)
        if placement.is_replicate() and mesh.size(dim) > 1
    )
