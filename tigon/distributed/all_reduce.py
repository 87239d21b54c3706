"""All-reduce of the small tensors of a decoding step, through symmetric memory of GPUs.

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

from tigon.distributed.collectives import Ranks
from tigon.kernels.comm.one_shot_all_reduce import (
    BITS,
    TURNS,
    P,
    S,
    SymmetricBuffers,
    empty_bits,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_norm,
    supports_norm,
)
from tigon.kernels.norm.rms_norm import Cast
from tigon.kernels.runtime import has_values, runs_triton, use

BOOT = Path("/proc/sys/kernel/random/boot_id")
NO_MEMORY = "GPUs do not share memory, so NCCL sums: {}"

# The buffers of each group, by dtype. None: NCCL sums, as all ranks of the group have agreed
_group_buffers: WeakKeyDictionary[ProcessGroup, dict[torch.dtype, SymmetricBuffers | None]]
_group_buffers = WeakKeyDictionary()


def all_reduce_small(x: Tensor, ranks: Ranks) -> Tensor:
    """Returns the sum over ranks, without a gradient, from one kernel if possible, else from NCCL.

    One kernel needs a small x, and all ranks' GPUs in one host with access to each other's memory.
    Every rank calls it in the same order with the same shape, always on the same stream.
    """
    buffers = _buffers(x, x.numel(), ranks)
    if buffers is None:
        return ranks.sum(x)
    with torch.cuda.device(x.device):  # Triton launches on the current one
        return one_shot_all_reduce(x, buffers)


def all_gather_small(x: Tensor, first: int, size: int, ranks: Ranks) -> Tensor | None:
    """Gathers columns [first, first + W) of each rank, or None if that takes more than a kernel."""
    buffers = _buffers(x, x.shape[:-1].numel() * size, ranks)
    if buffers is None:
        return None
    with torch.cuda.device(x.device):
        return one_shot_all_gather(x, first, size, buffers)


def all_reduce_small_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    ranks: Ranks,
    *,
    offset: float,
    cast: Cast,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns `all_reduce_small(x)` and its `rms_norm` from one kernel, or None if it cannot."""
    buffers = _buffers(x, x.numel(), ranks)
    if buffers is None or not supports_norm(x, residual, weight):
        return None
    options: dict[str, Any] = {"offset": offset, "before": cast == "before_weight"}
    with torch.cuda.device(x.device):
        return one_shot_all_reduce_norm(x, residual, weight, eps, buffers, **options)


def _buffers(x: Tensor, n: int, ranks: Ranks) -> SymmetricBuffers | None:
    """Returns the buffers for sums of n elements like those of x, or None if NCCL sums.

    The first call for a group and dtype opens them, unless a CUDA graph is being captured.
    """
    if not (has_values(x) and x.is_cuda and x.dtype in BITS):
        return None
    if not 0 < n * (ranks.size - 1) <= P * S:
        return None
    opened = _group_buffers.setdefault(_resolve_process_group(cast(Any, ranks.group)), {})
    if x.dtype not in opened:
        if torch.cuda.is_current_stream_capturing():  # ranks cannot agree while a graph is recorded
            return None
        opened[x.dtype] = _open_buffers(ranks, x)
    return opened[x.dtype] if runs_triton(x) else None


def _open_buffers(ranks: Ranks, x: Tensor) -> SymmetricBuffers | None:
    """Opens buffers on all ranks of the group, which all call this, or on none."""
    device, dtype = x.device, x.dtype
    with use("auto"):  # whether Triton works on this GPU, whichever path is chosen for now
        works = runs_triton(x)
    reaches = _can_access_peers(ranks, device)
    if not _all_ranks_agree(works and reaches, ranks, device):
        return None
    local = handle = None
    # RuntimeError: a driver or container without peer mappings, or no memory; NCCL may still run
    try:
        local = symmetric.empty((TURNS, ranks.size, P * S), dtype=BITS[dtype], device=device)
    except RuntimeError as error:
        warnings.warn(NO_MEMORY.format(error), stacklevel=2)
    # Without this, the other ranks would wait in the rendezvous
    if not _all_ranks_agree(local is not None, ranks, device):
        return None
    assert local is not None
    try:
        handle = symmetric.rendezvous(local, cast(Any, ranks.group))
        local.fill_(empty_bits(dtype))
    except RuntimeError as error:
        handle = None
        warnings.warn(NO_MEMORY.format(error), stacklevel=2)
    # This message also says that every rank's buffers are empty, so that others may write to them
    if not _all_ranks_agree(handle is not None, ranks, device):
        return None
    assert handle is not None
    addresses = torch.tensor([*handle.buffer_ptrs], dtype=torch.int64, device=device)
    turns = torch.zeros(P, dtype=torch.int32, device=device)
    return SymmetricBuffers(local, addresses, turns, handle.rank, dtype, handle)


def _all_ranks_agree(agrees: bool, ranks: Ranks, device: torch.device) -> bool:
    """Whether `agrees` is True on every rank; the host waits for the answer."""
    return bool(ranks.gather(torch.tensor([agrees], device=device)).all())


def _can_access_peers(ranks: Ranks, device: torch.device) -> bool:
    """Whether the ranks are on different GPUs of this host whose memory this rank can write."""
    local_gpus = {_hash63(_uuid(i)): i for i in range(torch.cuda.device_count())}
    boot = BOOT.read_text() if BOOT.exists() else ""
    identity = [_hash63(socket.gethostname() + boot), _hash63(_uuid(device.index))]
    hosts, gpus = ranks.gather(torch.tensor([identity], device=device)).T.tolist()
    if len({*hosts}) > 1 or len({*gpus}) < ranks.size or not {*gpus} <= {*local_gpus}:
        return False
    peers = [local_gpus[gpu] for gpu in gpus if gpu != identity[1]]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in peers)


def _uuid(gpu: int) -> str:
    return str(torch.cuda.get_device_properties(gpu).uuid)


def _hash63(word: str) -> int:
    """Returns a 63-bit hash, which fits into an int64."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") >> 1
