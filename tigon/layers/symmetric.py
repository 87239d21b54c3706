"""Sums of the few tokens of a step of generation, through memory that GPUs share.

NCCL takes several times as long for them as NVLink does (bench/one_shot_sum.py).
"""

import hashlib
import socket
import warnings
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from tigon.kernels._check import has_values
from tigon.kernels._triton import runs_triton
from tigon.kernels.one_shot_sum import BITS, TURNS, Buffers, P, S, empty, one_shot_sum
from tigon.layers.collectives import Ranks

BOOT = Path("/proc/sys/kernel/random/boot_id")

# Of each group, by dtype; None: its GPUs do not reach each other's memory
_of_groups: WeakKeyDictionary[ProcessGroup, dict[torch.dtype, Buffers | None]]
_of_groups = WeakKeyDictionary()


def sum_few(x: Tensor, ranks: Ranks) -> Tensor:
    """As `ranks.sum`, without a gradient: in one kernel if x is small and all ranks' GPUs are in
    one host and reach each other's memory. All ranks call it alike, each on one stream."""
    few = 0 < x.numel() * (ranks.size - 1) <= P * S
    if not (few and x.is_cuda and has_values(x) and x.dtype in BITS and runs_triton(x)):
        return ranks.sum(x)
    if torch.compiler.is_compiling():
        return ranks.sum(x)
    opened = _of_groups.setdefault(_resolve_process_group(cast(Any, ranks.group)), {})
    if x.dtype not in opened:
        opened[x.dtype] = _open(ranks, x.device, x.dtype)
    buffers = opened[x.dtype]
    return ranks.sum(x) if buffers is None else one_shot_sum(x, buffers)


def _open(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Buffers | None:
    """All ranks of the group call it, and get buffers, or None of them does."""
    if not _all(_reaches(ranks, device), ranks, device):
        return None
    own = handle = None
    try:
        shape = TURNS, ranks.size, P * S
        own = symmetric.empty(shape, dtype=BITS[dtype], device=device)
        handle = symmetric.rendezvous(own, cast(Any, ranks.group))
        own.fill_(empty(dtype))
    except RuntimeError as error:  # the driver's or the container's, which NCCL may do without
        warnings.warn(f"GPUs do not share memory, so NCCL sums: {error}", stacklevel=2)
    # Which also waits until the buffers of all are empty
    if not _all(handle is not None, ranks, device):
        return None
    assert own is not None and handle is not None
    addresses = torch.tensor([*handle.buffer_ptrs], dtype=torch.int64, device=device)
    turns = torch.zeros(P, dtype=torch.int32, device=device)
    return Buffers(own, addresses, turns, ranks.rank, dtype, handle)


def _all(said: bool, ranks: Ranks, device: torch.device) -> bool:
    return bool(ranks.gather(torch.tensor([said], device=device)).all())


def _reaches(ranks: Ranks, device: torch.device) -> bool:
    """Whether the ranks are in this host, each on its own GPU, whose memory this one can write."""
    here = {_number(_uuid(i)): i for i in range(torch.cuda.device_count())}
    boot = BOOT.read_text() if BOOT.exists() else ""
    mine = [_number(socket.gethostname() + boot), _number(_uuid(device.index))]
    hosts, gpus = ranks.gather(torch.tensor([mine], device=device)).T.tolist()
    if len({*hosts}) > 1 or len({*gpus}) < ranks.size or not {*gpus} <= {*here}:
        return False
    others = [here[gpu] for gpu in gpus if gpu != mine[1]]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _number(word: str) -> int:
    """63 bits of it."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") >> 1
