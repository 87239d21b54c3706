"""Everything that a run needs, from its settings."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tigon.data import Loader, find_files
from tigon.models import MODELS, CausalLM, MoEConfig, build, load_weights, materialize
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.config import Config
from tigon.train.objectives import TASKS
from tigon.train.optim import adamw
from tigon.train.parallel import World, shard
from tigon.weights import Repository


@dataclass
class Run:
    config: Config
    world: World
    tokenizer: Tokenizer
    data: Loader
    eval_data: Loader | None
    model: CausalLM
    optimizer: torch.optim.Optimizer
    start: int  # steps that are done
    steps: int


def prepare(config: Config, world: World) -> Run:
    """Check every input before anything is written; every rank calls this."""
    source = resume.find(config)
    world.barrier()  # every rank has looked before the first one writes
    tokenizer = load_tokenizer(config)
    data = build_loader(config, config.data, tokenizer, world)
    eval_data = None
    if config.eval_data:
        eval_data = build_loader(config, config.eval_data, tokenizer, world, held_out=True)
    if source is not None:
        for change in resume.check(source, config, data):
            world.say(f"changed since {source}: {change}")
    model = build_model(config, world, load=source is None)
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
    return Run(config, world, tokenizer, data, eval_data, model, optimizer, start, steps)


def load_tokenizer(config: Config) -> Tokenizer:
    tokenizer = Tokenizer.from_pretrained(
        config.tokenizer or config.model, revision=None if config.tokenizer else config.revision
    )
    if config.chat_template:
        tokenizer.use_chat_template(config.chat_template)
    return tokenizer


def build_model(config: Config, world: World, *, load: bool = True) -> CausalLM:
    """In param_dtype; sharded when there are ranks to share it, or dtype is another.

    Each rank reads only the rows that it keeps. `load=False` allocates a checkpoint's weights
    without reading them.
    """
    dtype = getattr(torch, config.param_dtype)
    compute = compute_dtype(config, world.device)
    sharded = world.size > 1 or compute != dtype
    if config.init:
        torch.manual_seed(config.seed)  # whole on every rank, so that all draw the same
        model = _from_config(Path(config.init), dtype)
        if sharded:
            shard(model, world, compute)
        model.to(world.device)
    else:
        repository = Repository(config.model, revision=config.revision)
        model, weights = build(repository, MODELS, dtype=dtype)
        if sharded:
            shard(model, world, compute)
        materialize(model, world.device)
        if load:
            load_weights(model, weights)
    if config.router_aux_loss_coef is not None:
        set_balance(model, config.router_aux_loss_coef)
    model.activation_checkpointing = config.activation_checkpointing
    model.use_attention(config.attention)
    return model.train()


def build_loader(
    config: Config,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    world: World,
    *,
    held_out: bool = False,
) -> Loader:
    """Training rows in a shuffled order; held-out ones in their own."""
    examples, rows = TASKS[config.task](config, find_files(paths), tokenizer)
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
        packing=config.packing,
        seed=None if held_out else config.seed,
        rank=world.rank,
        world=world.size,
    )


def set_balance(model: CausalLM, coef: float) -> None:
    """The weight of aux_loss in the loss; the exported config.json will say it too."""
    if not isinstance(model.config, MoEConfig):
        raise ValueError(
            f"router_aux_loss_coef={coef}, but {model.config.architecture} has no experts"
        )
    model.config = replace(model.config, output_router_logits=coef > 0, router_aux_loss_coef=coef)


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, config.param_dtype)


def check_vocabulary(model: CausalLM, data: Loader | None) -> None:
    highest = data.examples.tokens.max() if data is not None else 0
    if highest >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has "
            f"{model.config.vocab_size}: they do not belong together"
        )


def _from_config(path: Path, dtype: torch.dtype) -> CausalLM:
    if not path.is_file():
        raise FileNotFoundError(f"init={path} is not a config.json file")
    values = json.loads(path.read_text())
    kind = values.get("model_type")
    if kind not in MODELS:
        raise ValueError(f"{path}: model_type {kind!r} is not one of {', '.join(MODELS)}")
    return MODELS[kind].from_config(values, dtype=dtype)
