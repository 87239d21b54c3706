"""A rank of a case of bench/estimates.py: OUT setting=value ...; rank 0 writes OUT."""

import json
import sys
import time
from pathlib import Path

import torch

from tigon.train import load, start
from tigon.train.build import read_inputs
from tigon.train.dry_run import random_run, time_steps
from tigon.train.memory import estimate
from tigon.train.model import meta_model


def main(out: str, *arguments: str) -> None:
    config = load(None, arguments)
    with start(config.device) as world:
        inputs = read_inputs(config, world)
        config = inputs.config
        run = random_run(inputs, world)
        found = time_steps(run, run.steps)
        if world.main:
            began = time.perf_counter()
            meta = meta_model(config, getattr(torch, config.param_dtype))
            planned = estimate(meta, inputs.task, config, world.size, torch.bfloat16)
            record = {
                "parameters": sum(p.numel() for p in meta.parameters()),
                "estimate": planned.kinds,
                "estimate_seconds": time.perf_counter() - began,
                "measured": found.peak,
                "reserved": torch.cuda.max_memory_reserved() if found.peak else 0,
                "step_seconds": found.seconds,
                "tokens": found.tokens,
            }
            Path(out).write_text(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
