"""Collectives of NCCL alone, by bytes: what `tigon plan` takes for NVLink's bandwidth and latency.

    torchrun --nproc-per-node 2 bench/collectives.py > bench/results/collectives-nvidia-h200.json

Bytes of a row are those of all ranks together; seconds are the median over 20 calls, each of the
slowest rank.
"""

import json
import os
from statistics import median

import torch
import torch.distributed as dist

SIZES = [2**n for n in (12, 16, 20, 22, 24, 26, 28, 30)]

dist.init_process_group("nccl")
n, rank = dist.get_world_size(), dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
whole, other, part = (
    torch.zeros(SIZES[-1] // 2 // k, dtype=torch.bfloat16, device="cuda") for k in (1, 1, n)
)
CALLS = {
    "all-gather": lambda m: dist.all_gather_into_tensor(whole[:m], part[: m // n]),
    "reduce-scatter": lambda m: dist.reduce_scatter_tensor(part[: m // n], whole[:m]),
    "all-to-all": lambda m: dist.all_to_all_single(other[:m], whole[:m]),
    "all-reduce": lambda m: dist.all_reduce(whole[:m]),
}


def seconds(name: str, size: int) -> float:
    times = []
    for _ in range(25):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        CALLS[name](size // 2)
        end.record()
        torch.cuda.synchronize()
        took = torch.tensor(begin.elapsed_time(end) / 1e3, device="cuda")
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return median(times[5:])


found = {name: {size: seconds(name, size) for size in SIZES} for name in CALLS}
if rank == 0:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    machine = f"{n} x {torch.cuda.get_device_name()}"
    print(json.dumps({"machine": machine, "torch": torch.__version__, "nccl": nccl} | found))
dist.destroy_process_group()
