"""Whether what a checkpoint had can be a run's: files may be as they were written, and wrong."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from tigon.train.checkpoint.tensors import OPTIMIZER, State

# States that are sums of squares, scales of them, and counts
NEVER_NEGATIVE = ("exp_avg_sq", "exp_avg_sq_scale", "exp_avg_scale", "step")


def check_values(checkpoint: Path, state: State, stored: Metadata) -> None:
    """Raises ValueError, naming file, tensor and value, where what was read is NaN, infinite, or
    negative where nothing can be.

    In a process group every rank calls this and all raise alike. One reduction of each tensor on
    its device, and one wait for it.
    """
    faults = _faults(checkpoint, state, stored)
    everywhere: list[list[str] | None] = [faults]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, faults)
    found = sorted({fault for some in everywhere for fault in some or ()})
    if found:
        more = f", and so {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"{found[0]}, which no run has{more}: resume from another checkpoint, or begin another "
            "run_dir, with model= an export of this run"
        )


@torch.no_grad()
def _faults(checkpoint: Path, state: State, stored: Metadata) -> list[str]:
    groups: dict[tuple[torch.device, torch.dtype], dict[str, list[Tensor]]] = {}
    for name, tensor in state.items():
        if tensor.dtype.is_floating_point or _kind(name) in NEVER_NEGATIVE:
            for rows in (chunk.rows for chunk in tensor.chunks if chunk.rows.numel()):
                own = groups.setdefault((rows.device, rows.dtype), {})
                own.setdefault(name, []).append(rows)
    wrong: dict[str, float] = {}
    for group in groups.values():
        names = [name for name, rows in group.items() for _ in rows]
        ranges = [torch.stack(torch.aminmax(x)) for rows in group.values() for x in rows]
        for name, pair in zip(names, torch.stack(ranges).double().tolist(), strict=True):
            least = 0.0 if _kind(name) in NEVER_NEGATIVE else -torch.inf
            bad = [x for x in pair if not (least <= x < torch.inf and x > -torch.inf)]
            if bad:
                wrong.setdefault(name, bad[0])
    files = _files(stored, wrong) if wrong else {}
    return [f"{checkpoint} has {x} in {name} ({files[name]})" for name, x in wrong.items()]


def _kind(name: str) -> str:
    """Of an optimizer's state, which it is."""
    return name.split(".")[1] if name.startswith(OPTIMIZER) else ""


def _files(stored: Metadata, names: Mapping[str, float]) -> dict[str, str]:
    """Which have some of each: the first of them, and how many more."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for index, info in stored.storage_data.items():
        if index.fqn in names:
            found[index.fqn].add(Path(info.relative_path).name)
    more = {name: f" or {len(some) - 1} more" * (len(some) > 1) for name, some in found.items()}
    return {name: min(some) + more[name] for name, some in found.items()}
