"""Builds everything that a run needs from its settings."""

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tigon.data import Loader
from tigon.data.examples import format_count
from tigon.kernels.attention.backends import check_training
from tigon.models import MODELS, CausalLM
from tigon.models.pretrained.load import read_config
from tigon.models.pretrained.quantization import count_parameters
from tigon.parallel import MeshSizes
from tigon.settings.config import Config, check_batch
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint, resume
from tigon.train.benchmarks import build_benchmarks, load_tasks
from tigon.train.choices import StepChoice, open_settings, resolve_choices
from tigon.train.compile_step import compile_step
from tigon.train.cuda_graphs import Graphs
from tigon.train.data import build_loader, find_entry_sources, set_share_prompts
from tigon.train.distributed import World
from tigon.train.graph_checks import check_run, uses_graphs
from tigon.train.logging import check_sinks
from tigon.train.model import (
    base_digest,
    build_model,
    check_context,
    check_fp8,
    check_resumed_model,
    check_sizes,
    compute_dtype,
    read_model_config,
    sampled_digest,
)
from tigon.train.notes import find_slow_attention, find_unquantized_layers, find_unused_settings
from tigon.train.optim import Ema, InBackward, build_ema, build_optimizer, check_ranks
from tigon.train.overlap import EarlyModel
from tigon.train.prefetch import Prefetcher
from tigon.train.resume import claim
from tigon.train.samples import SamplePrompt, read_prompts
from tigon.train.state import TrainState
from tigon.train.tasks import TASKS, Task
from tigon.train.throughput import Meter
from tigon.train.vocabulary import (
    add_stop_tokens,
    read_tokenizer,
    read_vocabulary,
    with_added_tokens,
)
from tigon.weights import Repository, WriterGroup
from tigon.weights.entries import check_shared
from tigon.weights.files import read_lock

SLOW_STEP = 5e11  # parameters x tokens, for each thread: about a minute
OTHER_FILES = "has other {} than rank 0: give all hosts the same files"


@dataclass
class RunInputs:
    """Holds what a run reads and checks before its model."""

    config: Config  # with new_tokens if the data has tokens that the model lacks
    task: Task
    source: Path | None  # the checkpoint to resume from
    source_lock: ExitStack  # keeps other runs from removing the checkpoint, until it is closed
    start: int  # steps that are done already
    tokenizer: Tokenizer
    data: Loader
    eval_data: Loader | None
    state: TrainState
    choice: StepChoice | None  # of settings that are auto
    auto: frozenset[str]  # the names of these settings
    benchmark_tasks: Any  # of lm-eval; None without

    @property
    def steps(self) -> int:
        """Returns the number of optimizer steps of the whole run."""
        return count_steps(self.config, self.data)

    @property
    def is_finished(self) -> bool:
        """Returns whether no step is left: all are done, or the run is out of patience."""
        return self.start >= self.steps or self.state.is_out_of_patience(self.config.patience)

    def check_model(self, model: CausalLM) -> None:
        """Raises ValueError if the data has tokens beyond the model's vocabulary; adds the tokens
        that end a turn to the model's eos_token_id."""
        add_stop_tokens(model, self.tokenizer, self.task.ends)
        for loader in filter(None, (self.data, self.eval_data)):
            loader.windows.check_vocabulary(model.config.vocab_size)


@dataclass
class TrainingRun(RunInputs):
    """Holds everything that the training loop uses."""

    world: World
    model: CausalLM
    optimizer: torch.optim.Optimizer
    saver: checkpoint.Saver
    exporter: checkpoint.Exporter
    prefetcher: Prefetcher  # of the micro-batches of the next steps
    meter: Meter  # of the speed of steps
    ema: Ema | None
    in_backward: InBackward | None  # updates the weights during backward
    prompts: list[SamplePrompt] = field(default_factory=list)  # of samples
    benchmarks: Callable[[], dict[str, float]] | None = None  # measures lm-eval's tasks
    base: str = ""  # digest of an adapter's base


def read_inputs(
    config: Config,
    world: World,
    *,
    check_machine: bool = True,
    sizes: MeshSizes | None = None,
    device: torch.device | None = None,
    early: EarlyModel | None = None,
) -> RunInputs:
    """Reads and checks settings and data, and makes the choices of `resolve_choices`; every rank
    calls this.

    It writes only the lock of the run directory. `check_machine`: raise for what this machine
    cannot run. `sizes` and `device` are those of the run, by default the world's. `early` builds
    the model while data are tokenized, if that takes long.
    """
    sizes, device = sizes or world.sizes, device or world.device
    with world.raise_on_all_ranks():
        if check_machine:
            check_fp8(config, world.device)
            check_run(config, world)
            dtype, exact = compute_dtype(config, world.device), config.deterministic
            check_training(config.attention, world.device, dtype, deterministic=exact)
        check_sinks(config.log_to)
        task = TASKS[config.task](config, world)
        if world.main:
            world.closing.enter_context(claim(config))
        benchmark_tasks = load_tasks(config)
    if world.size > 1:  # ranks that do not share run_dir would lose the first checkpoint
        ranks = WriterGroup(world.group)
        check_shared(Path(config.run_dir), ranks, world.raise_on_all_ranks)
    config, source, source_lock = _open_source(config, world)
    time = resume.start_time(source, world)
    with world.raise_on_all_ranks():
        check_sizes(config, sizes, source)
        tokenizer = load_tokenizer(config, source)
        tokenizer.strftime_now = time
        check_context(config, source)
        if source is not None:
            check_resumed_model(config, source)
        task.digests.update(checkpoint.read_metadata(source).get("digests", {}))
        task.check_frozen_models(tokenizer, source)
        if (reason := set_share_prompts(task, source)) is not None:
            world.log_rank0(f"prompts are computed for each answer: {reason}")
        # Their faults are told before data is tokenized, whose new tokens the prompts may have
        read_prompts(config, tokenizer, read_model_config(config, source).max_position_embeddings)
        if config.eval_data:
            find_entry_sources(config, config.eval_data)
    auto = open_settings(config)

    def choose() -> StepChoice | None:
        task.config, choice = resolve_choices(config, world, task, source, sizes.ranks, device)
        return choice

    choice = choose() if early is None else early.build(choose, task, tokenizer, source)
    config, data, eval_data = _open_data(task, tokenizer, source)
    state = TrainState()
    with world.raise_on_all_ranks():
        if source is not None:
            for change in resume.check_settings(source, config, data):
                world.log_rank0(f"changed since {source}: {change}")
            state = resume.read_state(source, count_steps(config, data))
    start = 0 if source is None else checkpoint.step_of(source)
    return RunInputs(
        config, task, source, source_lock, start, tokenizer, data, eval_data, state, choice, auto,
        benchmark_tasks,
    )  # fmt: skip


def _open_source(config: Config, world: World) -> tuple[Config, Path | None, ExitStack]:
    """Returns the checkpoint to resume from, None to begin, with the lock that keeps it; and the
    settings with the new tokens that its run has taken from the data. Every rank calls this."""
    lock = world.closing.enter_context(ExitStack())
    with world.raise_on_all_ranks():
        source = resume.find_source(config, world)
        if source is not None:
            lock.enter_context(read_lock(source))
            resume.check_adapter(source, config)
            if not config.new_tokens:
                saved = checkpoint.read_metadata(source)["config"].get("new_tokens")
                config = replace(config, new_tokens=tuple(saved or ()))
    return config, source, lock


def _open_data(
    task: Task, tokenizer: Tokenizer, source: Path | None
) -> tuple[Config, Loader, Loader | None]:
    """Returns the loaders of training and held-out rows, which are the same on all ranks, and the
    settings with the data's new tokens."""
    config, world = task.config, task.world
    with world.raise_on_all_ranks():
        cursor = checkpoint.read_metadata(source).get("cursor")
        data = build_loader(task, config.data, tokenizer, cursor=cursor)
        held_out = config.held_out
        eval_data = build_loader(task, held_out, tokenizer, held_out=True) if held_out else None
        if source is None:  # else the checkpoint has the tokens
            loaders = filter(None, (data, eval_data))
            stored = read_model_config(config).vocab_size
            config = with_added_tokens(config, tokenizer, stored, loaders)
        sample = data.windows.sample() if world.size > 1 else ""
        identity = {"data": [resume.run_metadata(config, data), sample]}
        if eval_data is not None:
            identity["eval_data"] = [eval_data.windows.identity()]
    world.check_same(identity, OTHER_FILES)
    return config, data, eval_data


def count_steps(config: Config, data: Loader) -> int:
    """Returns the number of optimizer steps of the whole run."""
    epochs = 1.0 if config.epochs is None else config.epochs
    return config.steps or math.ceil(epochs * (data.steps_per_epoch or 0))


def resolve_parallel(config: Config, world: World, gpus: int) -> tuple[Config, World]:
    """Returns both with the layout for `gpus` GPUs in place of parallel=auto."""
    if config.parallel != "auto":
        return config, world
    from tigon.train.auto_layout import resolve_layout  # the planner imports the trainer

    return resolve_layout(config, world, gpus)


def prepare(config: Config, world: World) -> TrainingRun:
    """Checks every input and builds the run; every rank calls this.

    It writes only the lock of the run directory. With parallel=auto the run's config and world have
    the layout that is chosen.
    """
    config, world = resolve_parallel(config, world, world.size)
    with world.raise_on_all_ranks():
        check_batch(config, world.data.size)
        check_ranks(config, world.data.size)
    early = EarlyModel(partial(build_seeded, world))
    inputs = read_inputs(config, world, early=early)
    config, source = inputs.config, inputs.source
    base = check_models(config, source, world)
    with world.raise_on_all_ranks():
        model = early.take(config)
        if model is None:
            with compile_step(inputs.task, source, inputs.choice):
                model = build_seeded(world, config, source, inputs.choice)
        inputs.check_model(model)
        prompts = read_prompts(config, inputs.tokenizer, model.config.max_position_embeddings)
        tasks = inputs.benchmark_tasks
        benchmarks = build_benchmarks(tasks, config, model, inputs.tokenizer, world)
        optimizer = build_optimizer(model, config)
        ema = build_ema(model, config)
    world.check_same({"sample_prompts": [prompt.ids for prompt in prompts]}, OTHER_FILES)
    with world.raise_on_all_ranks():
        # Raises for a stream whose files have changed since the checkpoint
        inputs.data.state(inputs.start + inputs.state.offset)
    if source is not None:
        checkpoint.load(source, model, optimizer, ema)
        inputs.source_lock.close()
        world.log_rank0(f"resumed from {source}")
    world.log_rank0(*describe_run(config, world.sizes, world.device, inputs, model))
    run = build_run(inputs, world, model, optimizer, ema)
    run.prompts, run.benchmarks, run.base = prompts, benchmarks, base
    return run


def build_seeded(
    world: World, config: Config, source: Path | None, choice: StepChoice | None
) -> CausalLM:
    """Seeds everything, and builds the run's model, which then computes as was chosen."""
    seed_everything(config, world)
    model = build_model(config, world, source)
    if choice is not None:
        choice.apply(model)
    return model


def describe_run(
    config: Config, sizes: MeshSizes, device: torch.device, inputs: RunInputs, model: CausalLM
) -> Iterator[str]:
    """Yields lines about the model, the mesh, the steps, choices, and settings without effect."""
    steps, per_epoch = inputs.steps, inputs.data.steps_per_epoch
    size, num_frozen = count_parameters(model), count_parameters(model, frozen=True)
    frozen = f", {num_frozen:,} of them frozen" if num_frozen else ""
    epoch = f", {per_epoch} an epoch" if per_epoch else ""
    layout = f": {sizes.description}" if sizes.ranks > 1 else ""
    yield (
        f"model: {model.config.transformers_class}, {size:,} parameters{frozen}, "
        f"on {sizes.ranks} x {device.type}{layout}"
    )
    yield f"steps: {inputs.start} to {steps}{epoch}"
    if per_epoch == 1 and (rows := inputs.data.report().rows) < config.batch_size:
        yield (
            f"note: batch_size={config.batch_size} is more than the {format_count(rows, 'row')} of "
            "the data, so an epoch is one step: a smaller batch_size or seq_len gives more"
        )
    tokens = config.batch_size * config.seq_len
    if device.type == "cpu" and size * tokens > SLOW_STEP * torch.get_num_threads():
        yield (
            f"note: a step of up to {tokens:,} tokens takes minutes on a CPU: a smaller batch_size "
            "or seq_len gives shorter ones"
        )
    if config.lora and config.task in ("sft", "pretrain") and config.lr == Config.lr:
        yield f"note: lr={config.lr:g} is for all weights: adapters learn faster with about lr=2e-4"
    if inputs.source is None and (vocabulary := read_vocabulary(config)) is not None:
        yield from vocabulary.describe(read_model_config(config).vocab_size)
    if inputs.choice is not None:
        yield str(inputs.choice)
    yield from (f"note: {text}" for text in find_slow_attention(config, model))
    yield from (f"note: {text}" for text in find_unused_settings(config, steps, device))
    yield from (f"note: {text}" for text in find_unquantized_layers(config, model))


def build_run(
    inputs: RunInputs,
    world: World,
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None,
) -> TrainingRun:
    """Builds the run from its checked inputs, model and optimizer."""
    config = inputs.config
    if uses_graphs(config, world, model):
        Graphs(model, world.log_rank0, auto=config.cuda_graphs == "auto")
    keep = checkpoint.KeepPolicy(config.keep_last, config.keep_best, config.keep_hours)
    path, background = Path(config.run_dir), config.async_save
    return TrainingRun(
        **vars(inputs),
        world=world,
        model=model,
        optimizer=optimizer,
        saver=checkpoint.Saver(path, world, keep=keep, background=background),
        exporter=checkpoint.Exporter(world, background=background),
        prefetcher=Prefetcher(inputs.data, world.device),
        meter=Meter(model, world, compute_dtype(config, world.device)),
        ema=ema,
        in_backward=InBackward(model, optimizer) if config.optimizer_in_backward else None,
    )


def check_models(config: Config, source: Path | None, world: World) -> str:
    """Returns the digest of an adapter's base; "" without lora.

    Raises ValueError if the run that goes on had another base, and InputError if ranks have other
    models than rank 0, as hosts may have under one name.
    """
    has_adapter, is_new = config.lora is not None, source is None and world.size > 1
    models: dict[str, str] = {}
    with world.raise_on_all_ranks():
        digest = base_digest(config) if has_adapter or is_new else ""
        if has_adapter and source is not None:
            resume.check_base(source, config, digest)
        if is_new:  # of `init` it is that of the config.json
            described = _describe_model(config.model, config.revision) if config.model else ""
            models[config.init or config.model] = digest + described
        for path in filter(None, (config.reference, config.teacher) if world.size > 1 else ()):
            with suppress(FileNotFoundError):  # its log-probabilities may be in the cache
                described = sampled_digest(path) + _describe_model(path)
                models[path] = models.get(path, "") + described
    fault = "reads another model than rank 0 from {}: give all hosts the same files"
    world.check_same(models, fault)
    return digest if has_adapter else ""


def _describe_model(path: str, revision: str | None = None) -> str:
    """Returns a text of a model's config and generation settings, to compare between ranks."""
    repository = Repository(path, revision=revision)
    file = repository.optional_file("generation_config.json")  # which samples go by
    generation = b"" if file is None else file.read_bytes()
    return repr((read_config(repository, MODELS), generation))


def seed_everything(config: Config, world: World) -> None:
    """Seeds Python and torch; `deterministic` algorithms are on until the world closes."""
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        world.closing.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        torch.use_deterministic_algorithms(True)


def load_tokenizer(config: Config, source: Path | None = None) -> Tokenizer:
    """Loads the checkpoint's tokenizer if its settings are unchanged, else the settings' one."""
    if source is not None:
        saved = checkpoint.read_metadata(source).get("config", {})
        names = ("model", "revision", "tokenizer", "chat_template")
        same = all(name in saved and saved[name] == getattr(config, name) for name in names)
        if same and [*saved.get("new_tokens", ())] == [*config.new_tokens]:
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
