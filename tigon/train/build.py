"""Everything that a run needs, from its settings."""

import atexit
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tigon.data import Loader, find_files
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.config import Config
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
    source = resume.find(config, world)
    world.barrier()  # every rank has looked before the first one writes
    tokenizer = load_tokenizer(config, source)
    data = build_loader(objective, config.data, tokenizer)
    eval_data = None
    if config.eval_data:
        eval_data = build_loader(objective, config.eval_data, tokenizer, held_out=True)
    if source is not None:
        for change in resume.check(source, config, data):
            world.say(f"changed since {source}: {change}")
    model = build_model(config, world, source)
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


def load_tokenizer(config: Config, source: Path | None = None) -> Tokenizer:
    """The settings', or the one in the checkpoint `source` while the settings are the same."""
    if source is not None and not checkpoint.is_legacy(source):
        was = checkpoint.facts(source)["config"]
        named = ("model", "revision", "tokenizer", "chat_template")
        if all(was[name] == getattr(config, name) for name in named):
            # A copy: the checkpoint may go while the run saves the tokenizer's files again
            copy = tempfile.mkdtemp(prefix="tigon-tokenizer-")
            atexit.register(shutil.rmtree, copy, ignore_errors=True)
            Tokenizer.from_pretrained(source).save_pretrained(copy)
            return Tokenizer.from_pretrained(copy)
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
    examples = objective.examples(find_files(paths), tokenizer)
    rows = objective.rows(examples)
    name = "eval_data" if held_out else "data"
    world.say(
        f"{name}: {len(examples):,} examples, {len(examples.tokens):,} tokens, {len(rows):,} rows; "
        f"{rows.truncated:,} cut to seq_len {config.seq_len}, {rows.dropped:,} left out"
    )
    if examples.ignored_keys:
        world.say(
            f"{name}: keys of its rows that nothing reads: {', '.join(examples.ignored_keys)}"
        )
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
