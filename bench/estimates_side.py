"""A rank of a case of bench/estimates.py: OUT setting=value ...; rank 0 writes OUT."""

import json
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from tigon.tokenizer import Tokenizer
from tigon.train import load, start
from tigon.train.build import Run
from tigon.train.checkpoint import Saver
from tigon.train.data import build_loader
from tigon.train.estimate.memory import estimate
from tigon.train.estimate.steps import measure, random_model
from tigon.train.model import finish, outline
from tigon.train.objectives import find_objective
from tigon.train.optim import build_optimizer
from tigon.train.state import State


def main(out: str, *arguments: str) -> None:
    config = load(None, arguments)
    with start(config.device) as world:
        objective = find_objective(config.task)(config, world)
        tokenizer = Tokenizer.from_pretrained(config.tokenizer)
        data = build_loader(objective, config.data, tokenizer)
        model = random_model(config, world)
        optimizer = build_optimizer(model, config)
        saver = Saver(Path(config.run_dir), world)
        steps = config.steps or 1
        run = Run(
            config, world, objective, tokenizer, data, None, model, optimizer, 0, steps, State(),
            saver,
        )  # fmt: skip
        found = measure(run, steps)
        if world.main:
            began = time.perf_counter()
            meta = finish(outline(config, getattr(torch, config.param_dtype)), config)
            planned = estimate(meta, objective, config, world.size, torch.bfloat16)
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
