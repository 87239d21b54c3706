"""Everything that a run needs, from its settings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tigon.data import Entry, Loader, find_sources, read
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.config import Config
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


def prepare(config: Config, world: World) -> Run:
    """Check every input before anything is written; every rank calls this."""
    objective = find_objective(config.task)(config, world)
    source = resume.find(config)
    world.barrier()  # every rank has looked before the first one writes
    tokenizer = load_tokenizer(config)
    data = build_loader(objective, config.data, tokenizer)
    eval_data = None
    if config.eval_data:
        eval_data = build_loader(objective, config.eval_data, tokenizer, held_out=True)
    if source is not None:
        for change in resume.check(source, config, data):
            world.say(f"changed since {source}: {change}")
    model = build_model(config, world, load=source is None)
    check_context(model, config)
    stop_at(model, tokenizer, objective.ends)
    for loader in (data, eval_data):
        check_vocabulary(model, loader)
    optimizer = adamw(model, config)
    start = 0
    if source is not None:
        start = checkpoint.step_of(source)
        checkpoint.load(source, model, optimizer)
        world.say(f"resumed from {source}")
    epochs = 1.0 if config.epochs is None else config.epochs
    steps = config.steps or math.ceil(epochs * data.steps_per_epoch)
    size = sum(p.numel() for p in model.parameters())
    where = f"{world.size} x {world.device.type}"
    world.say(
        f"model: {model.config.architecture}, {size:,} parameters, on {where}\n"
        f"steps: {start} to {steps}, {data.steps_per_epoch} an epoch"
    )
    return Run(config, world, objective, tokenizer, data, eval_data, model, optimizer, start, steps)


def load_tokenizer(config: Config) -> Tokenizer:
    tokenizer = Tokenizer.from_pretrained(
        config.tokenizer or config.model, revision=None if config.tokenizer else config.revision
    )
    if config.chat_template:
        tokenizer.use_chat_template(config.chat_template)
    return tokenizer


def build_loader(
    objective: Objective, paths: Sequence[str], tokenizer: Tokenizer, *, held_out: bool = False
) -> Loader:
    """Training rows in a shuffled order; held-out ones in their own."""
    config, world = objective.config, objective.world
    entries = [Entry(path, format=config.format, columns=config.columns or {}) for path in paths]
    sources = find_sources(entries, separator=config.separator)
    examples = read(sources, objective.encoder(tokenizer))
    rows = objective.rows(examples)
    name = "eval_data" if held_out else "data"
    world.say(
        f"{name}: {len(examples):,} examples, {len(examples.tokens):,} tokens, {len(rows):,} rows; "
        f"{rows.truncated:,} cut to seq_len {config.seq_len}, {rows.dropped:,} left out"
    )
    for line in examples.report.lines():
        world.say(f"{name}: {line}")
    return Loader(
        examples,
        rows,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=None if held_out else config.seed,
        rank=world.rank,
        world=world.size,
    )


def check_vocabulary(model: CausalLM, data: Loader | None) -> None:
    highest = data.examples.tokens.max() if data is not None else 0
    if highest >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has "
            f"{model.config.vocab_size}: they do not belong together"
        )
