"""A rank of bench/generate_multi.py: OUT BATCH CONTEXT SHORT LONG ROUNDS KIND.

KIND is "whole", or "tiny" for a small model on CPUs. Rank 0 writes what it finds to OUT.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tigon
from bench.generate_cases import LLAMA_8B
from bench.harness import Record
from bench.layouts_side import fill
from tests.support.small import LLAMA
from tigon.models import CausalLM, materialize
from tigon.parallel import shard_model


def build(device: torch.device, ranks: int, tiny: bool) -> CausalLM:
    """The same weights on any number of ranks, drawn by name."""
    model = tigon.Llama.from_config(
        LLAMA if tiny else LLAMA_8B, dtype=torch.bfloat16, device="meta"
    )
    if ranks > 1:
        shard_model(model, init_device_mesh(device.type, (ranks,)))
    materialize(model, device)
    fill(model)
    return model.eval()


def measured(model: CausalLM, ids: torch.Tensor, lengths: tuple[int, int], rounds: int) -> Record:
    """Milliseconds of a step, between the first and the second of two lengths of one generation,
    so that neither the prompt nor the capture of the CUDA graph counts."""
    short, long = lengths
    each, tokens = [], []
    times: list[float] = []

    def received(_: torch.Tensor) -> None:
        times.append(time.perf_counter())

    for _ in range(rounds + 1):  # the first one compiles
        times.clear()
        out = model.generate(
            ids, max_new_tokens=long, do_sample=False, eos_token_id=[], streamer=received
        )
        tokens = out[0, ids.shape[1] :].tolist()
        each.append(1e3 * (times[long - 1] - times[short - 1]) / (long - short))
    return {"ms": median(each[1:]), "rounds": each[1:], "tokens": tokens}


def main(arguments: list[str]) -> None:
    out, kind = Path(arguments[0]), arguments[-1]
    batch, context, short, long, rounds = map(int, arguments[1:-1])
    ranks, rank = (int(os.environ.get(name, n)) for name, n in (("WORLD_SIZE", 1), ("RANK", 0)))
    tiny = kind == "tiny"
    device = torch.device("cpu") if tiny else torch.device("cuda", rank)
    if not tiny:
        torch.cuda.set_device(device)
    model = build(device, ranks, tiny)
    torch.manual_seed(0)  # the same prompt on each
    ids = torch.randint(1, model.config.vocab_size, (batch, context)).to(device)
    found = measured(model, ids, (short, long), rounds)
    if not tiny:
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if rank == 0:
        out.write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
