"""Everything that a run needs, from its settings."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from tigon.data import Loader
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.config import Config
from tigon.train.data import build_loader
from tigon.train.feed import Feed
from tigon.train.matching import check_context, stop_at
from tigon.train.model import build_model
from tigon.train.objectives import Objective, find_objective
from tigon.train.optim import adamw
from tigon.train.parallel import World


@dataclass
class Run:
    config: Config
    world: World
    objective: Objective
    tokenizer: Tokenizer
    data: Loader
    eval_data: Loader | None
    model: CausalLM
    optimizer: torch.optim.Optimizer
    start: int  # steps that are done
    steps: int

    @cached_property
    def feed(self) -> Feed:
        """The micro-batches of the next steps, made ahead."""
        return Feed(self.data, self.world.device)


def prepare(config: Config, world: World) -> Run:
    """Check every input before anything is written; every rank calls this."""
    objective = find_objective(config.task)(config, world)
    source = resume.find(config)
    world.barrier()  # every rank has looked before the first one writes
    tokenizer = load_tokenizer(config)
    cursor = None if source is None else checkpoint.facts(source).get("cursor")
    data = build_loader(objective, config.data, tokenizer, cursor=cursor)
    eval_data = None
    if config.eval_data:
        eval_data = build_loader(objective, config.eval_data, tokenizer, held_out=True)
    if source is not None:
        for change in resume.check(source, config, data):
            world.say(f"changed since {source}: {change}")
    model = build_model(config, world, load=source is None)
    check_context(model, config)
    stop_at(model, tokenizer, objective.ends)
    for loader in filter(None, (data, eval_data)):
        loader.windows.check_vocabulary(model.config.vocab_size)
    optimizer = adamw(model, config)
    start = 0
    if source is not None:
        start = checkpoint.step_of(source)
        checkpoint.load(source, model, optimizer)
        world.say(f"resumed from {source}")
    epochs = 1.0 if config.epochs is None else config.epochs
    steps = config.steps or math.ceil(epochs * (data.steps_per_epoch or 0))
    size = sum(p.numel() for p in model.parameters())
    where = f"{world.size} x {world.device.type}"
    world.say(
        f"model: {model.config.architecture}, {size:,} parameters, on {where}\n"
        f"steps: {start} to {steps}, {data.steps_per_epoch or 'unknown'} an epoch"
    )
    return Run(config, world, objective, tokenizer, data, eval_data, model, optimizer, start, steps)


def load_tokenizer(config: Config) -> Tokenizer:
    tokenizer = Tokenizer.from_pretrained(
        config.tokenizer or config.model, revision=None if config.tokenizer else config.revision
    )
    if config.chat_template:
        tokenizer.use_chat_template(config.chat_template)
    return tokenizer
