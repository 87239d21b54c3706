"""Everything that a run needs, from its settings."""

import math
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from tigon.data import Loader
from tigon.kernels.attention.api import check_training
from tigon.models import CausalLM, count_parameters
from tigon.parallel import MeshSizes
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume, sharing
from tigon.train.background_export import Exporter
from tigon.train.config import Config
from tigon.train.cuda_graphs import Graphs, check_run
from tigon.train.data import build_loader
from tigon.train.distributed import World
from tigon.train.logging import check_sinks
from tigon.train.memory import gpu_memory, memory_budget, resolve_checkpointing
from tigon.train.model import (
    base_digest,
    build_model,
    check_context,
    check_fp8,
    check_sizes,
    compute_dtype,
    describe_tokens,
    in_bfloat16,
    projections,
    stop_at,
    stored_rows,
)
from tigon.train.optim import (
    Ema,
    InBackward,
    build_ema,
    build_in_backward,
    build_optimizer,
    check_ranks,
)
from tigon.train.optim.groups import count
from tigon.train.prefetch import Feed
from tigon.train.publish import lacks_token
from tigon.train.rank_checks import (
    check_data,
    check_models,
    check_prompts,
    check_reference_and_teacher,
)
from tigon.train.resume import check_shared, claim
from tigon.train.samples import Prompt, read_prompts
from tigon.train.state import State
from tigon.train.tasks import Objective, find_objective
from tigon.train.throughput import Meter
from tigon.train.vocabulary import read_tokenizer, with_added_tokens

OF_GPUS = {"activation_offload": "memory", "optimizer_offload": "memory", "fp8": "time"}


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
    state: State
    saver: checkpoint.Saver
    ema: Ema | None
    prompts: list[Prompt] = field(default_factory=list)  # of samples
    base: str = ""  # digest of the weights that an adapter is added to
    in_backward: InBackward | None = None  # what updates the weights, if not a step after it

    @cached_property
    def feed(self) -> Feed:
        """The micro-batches of the next steps, made ahead."""
        return Feed(self.data, self.world.device)

    @cached_property
    def exporter(self) -> Exporter:
        """Every rank asks for it at the same time, first."""
        return Exporter(self.world, background=self.config.async_save)

    @cached_property
    def meter(self) -> Meter:
        """Of the speed of steps."""
        return Meter(self.model, self.world, compute_dtype(self.config, self.world.device))


@dataclass
class Inputs:
    """What a run reads before its model, checked."""

    config: Config  # with new_tokens, if the data have tokens that the model lacks
    objective: Objective
    source: Path | None  # the checkpoint that the run goes on from
    held: ExitStack  # which nobody removes until this is closed
    tokenizer: Tokenizer
    data: Loader
    eval_data: Loader | None
    start: int
    state: State

    def check_model(self, model: CausalLM) -> None:
        """That it fits the data; its configs say what ends a turn."""
        stop_at(model, self.tokenizer, self.objective.ends)
        for loader in filter(None, (self.data, self.eval_data)):
            loader.windows.check_vocabulary(model.config.vocab_size)

    def steps(self, config: Config) -> int:
        epochs = 1.0 if config.epochs is None else config.epochs
        return config.steps or math.ceil(epochs * (self.data.steps_per_epoch or 0))


def read_inputs(
    config: Config, world: World, *, here: bool = True, sizes: MeshSizes | None = None
) -> Inputs:
    """Check settings and data, on all ranks together; every rank calls this.

    Nothing is written but the lock of the run directory, while the world lasts. `here`: the run is
    to be on this machine; `sizes`: on how many ranks, if not the world's.
    """
    with world.raise_on_all_ranks():
        if here:
            check_machine(config, world)
        if config.activation_checkpointing == "auto":
            memory_budget(config, gpu_memory(world.device))  # an error before the data are read
        check_sinks(config.log_to)
        objective = find_objective(config.task)(config, world)
        if world.main:
            world.closing.enter_context(claim(config))
    check_shared(config, world)
    held, cursor = world.closing.enter_context(ExitStack()), None
    with world.raise_on_all_ranks():
        source = resume.find(config, world)
        if source is not None:
            held.enter_context(checkpoint.in_use(source))  # no other run removes it meanwhile
            cursor = checkpoint.read_metadata(source).get("cursor")
            resume.check_adapter(source, config)
            config = resume.with_new_tokens(source, config)
    time = resume.start_time(source, world)
    with world.raise_on_all_ranks():
        check_sizes(config, sizes or world.sizes, source)
        tokenizer = load_tokenizer(config, source)
        tokenizer.strftime_now = time
        check_context(config, source)
        objective.check_beside(tokenizer, source)
        reason = sharing.decide(objective, source)
        data = build_loader(objective, config.data, tokenizer, cursor=cursor)
        eval_data = None
        if config.held_out:
            eval_data = build_loader(objective, config.held_out, tokenizer, held_out=True)
        if reason is not None:
            world.log_rank0(f"prompts are computed for each answer: {reason}")
        if source is None:  # later the run knows them, and its base may be gone
            loaders = filter(None, (data, eval_data))
            config = with_added_tokens(config, tokenizer, stored_rows(config), loaders)
    check_data(config, data, eval_data, world)
    inputs = Inputs(config, objective, source, held, tokenizer, data, eval_data, 0, State())
    with world.raise_on_all_ranks():
        if source is not None:
            for change in resume.check(source, config, data):
                world.log_rank0(f"changed since {source}: {change}")
            inputs.start = checkpoint.step_of(source)
            inputs.state = resume.state_of(source, inputs.steps(config))
    return inputs


def resolve_parallel(config: Config, world: World, gpus: int) -> tuple[Config, World]:
    """Returns both with the layout that is chosen for `gpus` GPUs in place of parallel=auto."""
    if config.parallel != "auto":
        return config, world
    from tigon.train.auto_layout import resolve_layout  # the planner imports the trainer

    return resolve_layout(config, world, gpus)


def prepare(config: Config, world: World) -> Run:
    """Check every input, on all ranks together; every rank calls this.

    Until it returns nothing is written but the lock of the run directory. With parallel=auto the
    run's config and world are of the layout that is chosen.
    """
    config, world = resolve_parallel(config, world, world.size)
    with world.raise_on_all_ranks():
        check_ranks(config, world.data.size)
    inputs = read_inputs(config, world)
    config, data, source = inputs.config, inputs.data, inputs.source
    adapted, fresh = config.lora is not None, source is None and world.size > 1
    with world.raise_on_all_ranks():
        digest = base_digest(config) if adapted or fresh else ""
        if adapted and source is not None:
            resume.check_base(source, config, digest)
    if fresh:
        check_models(config, digest, world)
    if world.size > 1:
        check_reference_and_teacher(config, world)
    chosen = resolve_checkpointing(
        config, world, inputs.objective, source, world.size, world.device
    )
    with world.raise_on_all_ranks():
        seed_everything(config, world)
        model = build_model(config, world, source)
        if chosen is not None:
            chosen.apply(model)
        inputs.check_model(model)
        prompts = read_prompts(config, inputs.tokenizer, model)
        optimizer = build_optimizer(model, config)
        ema = build_ema(model, config)
    check_prompts(prompts, world)
    with world.raise_on_all_ranks():
        # A stream begins here: its files may have changed
        inputs.data.state(inputs.start + inputs.state.offset)
    if source is not None:
        checkpoint.load(source, model, optimizer, ema)
        inputs.held.close()
        world.log_rank0(f"resumed from {source}")
    steps = inputs.steps(config)
    size = count_parameters(model)
    frozen = count_parameters(model, frozen=True)
    still = f", {frozen:,} of them frozen" if frozen else ""
    each = f", {data.steps_per_epoch} an epoch" if data.steps_per_epoch else ""
    layout = f": {world.sizes.shown}" if world.size > 1 else ""
    world.log_rank0(
        f"model: {model.config.transformers_class}, {size:,} parameters{still}, "
        f"on {world.size} x {world.device.type}{layout}",
        f"steps: {inputs.start} to {steps}{each}",
    )
    if source is None:
        for line in describe_tokens(config):
            world.log_rank0(line)
    if chosen is not None:
        world.log_rank0(str(chosen))
    for notice in [*without_effect(config, steps, world.device), *without_fp8(config, model)]:
        world.log_rank0(f"note: {notice}")
    base = digest if adapted else ""
    return make_run(config, world, inputs, model, optimizer, ema, prompts, base)


def make_run(
    config: Config,
    world: World,
    inputs: Inputs,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
    prompts: Sequence[Prompt] = (),
    base: str = "",
) -> Run:
    if config.cuda_graphs:
        Graphs(model, world.log_rank0)
    saver = checkpoint.Saver(
        Path(config.run_dir),
        world,
        keep=checkpoint.Keep(config.keep_last, config.keep_best, config.keep_hours),
        background=config.async_save,
    )
    objective, tokenizer, data, eval_data = (
        inputs.objective, inputs.tokenizer, inputs.data, inputs.eval_data,
    )  # fmt: skip
    return Run(
        config, world, objective, tokenizer, data, eval_data, model, optimizer, inputs.start,
        inputs.steps(config), inputs.state, saver, ema, list(prompts), base,
        build_in_backward(model, optimizer, config),
    )  # fmt: skip


def without_effect(config: Config, steps: int, device: torch.device) -> list[str]:
    """Settings that cannot do what they are for on such a device, given the others."""
    found = []
    if config.warmup_steps > steps > 0:
        found.append(f"lr={config.lr} is not reached: warmup_steps={config.warmup_steps}")
    decay = count(config.decay_steps, steps)
    if config.schedule == "wsd" and decay < 2 and steps:
        found.append(
            f"lr does not fall: decay_steps={config.decay_steps} of {steps} steps is {decay}, and "
            "the first of them still has lr"
        )
    if not config.held_out:
        default = Config.__dataclass_fields__
        names = [n for n in default if n.startswith("eval_")]
        idle = [n for n in names if getattr(config, n) not in (default[n].default, ())]
        if idle:
            found.append(f"without eval_data, nothing comes of {', '.join(idle)}")
    both = math.lcm(config.eval_every, config.save_every)
    if config.keep_best and not 0 < both < steps:
        found.append(
            f"keep_best={config.keep_best}: no step before the last is both evaluated and saved; "
            "give eval_every and save_every a common multiple"
        )
    if device.type == "cpu":
        found += [
            f"{name}=true saves no {what} on a CPU"
            for name, what in OF_GPUS.items()
            if getattr(config, name)
        ]
    if config.accumulate_fp32 and config.param_dtype == "float32":
        found.append("accumulate_fp32=true changes nothing: float32 weights have float32 sums")
    if config.spike != Config.spike and not config.spike_sigma:
        found.append(f"spike={config.spike} needs spike_sigma, without which nothing is a spike")
    if lacks_token(config):
        found.append(
            f"push_to_hub={config.push_to_hub} needs a token: run `hf auth login`, or set HF_TOKEN"
        )
    return found


def without_fp8(config: Config, model: CausalLM) -> list[str]:
    """A line that names the projections which `fp8` cannot be of, if there are any."""
    if not config.fp8:
        return []
    meant = in_bfloat16(config, model)
    left = [name for name, layer in projections(model) if not layer.fp8 and name not in meant]
    if not left:
        return []
    listed = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
    sizes = "parts with sizes" if model.shard_specs else "sizes"
    return [f"fp8=true leaves in bfloat16 what has {sizes} that 16 does not divide: {listed}"]


def check_machine(config: Config, world: World) -> None:
    """Raises ValueError for an attention backend or products that cannot train here."""
    check_fp8(config, world.device)
    check_run(config, world)
    dtype = compute_dtype(config, world.device)
    check_training(config.attention, world.device, dtype, deterministic=config.deterministic)


def seed_everything(config: Config, world: World) -> None:
    """For what hooks may draw; with `deterministic`, the same bits in every run."""
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        world.closing.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        torch.use_deterministic_algorithms(True)


def load_tokenizer(config: Config, source: Path | None = None) -> Tokenizer:
    """The settings', or the one in the checkpoint `source` while the settings are the same."""
    if source is not None:
        was = checkpoint.read_metadata(source).get("config", {})
        named = ("model", "revision", "tokenizer", "chat_template")
        same = all(name in was and was[name] == getattr(config, name) for name in named)
        if same and [*was.get("new_tokens", ())] == [*config.new_tokens]:
            tokenizer = Tokenizer.from_pretrained(source)
            tokenizer.keep_files()  # the checkpoint may go while the run saves them again
            tokenizer.use_chat_template_kwargs(config.chat_template_kwargs or {})
            return tokenizer
    base = Path(config.model)
    if config.model and ((base / "checkpoints").is_dir() or (base / "run.json").is_file()):
        raise ValueError(
            f"model={base} is a run or a checkpoint of one: give its run_dir/hf, or what "
            f"`tigon export {base} DIRECTORY` makes of it"
        )
    tokenizer = read_tokenizer(config)
    if config.new_tokens:
        tokenizer.add_tokens(config.new_tokens, special_tokens=True)
    if config.chat_template:
        tokenizer.use_chat_template(config.chat_template)
    tokenizer.use_chat_template_kwargs(config.chat_template_kwargs or {})
    return tokenizer
