"""`tigon train CONFIG --dry-run`: describes a run, estimates its memory and times a few steps."""

import gc
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch

from tigon.data.examples import format_count
from tigon.layers import QuantizedWeight, SparseMoE
from tigon.models import CausalLM, materialize
from tigon.models.pretrained.quantization import count_parameters
from tigon.parallel import MeshSizes
from tigon.report import format_duration
from tigon.settings.config import (
    Config,
    check_batch,
    mesh_sizes,
    micro_batch_rows,
    parallel_settings,
)
from tigon.train.build import (
    RunInputs,
    TrainingRun,
    build_run,
    describe_run,
    read_inputs,
    resolve_parallel,
)
from tigon.train.distributed import InputError, World, local
from tigon.train.launch_meter import PASSES, WARM_UP
from tigon.train.less_memory import StepMemoryError, first_sentence, within_memory
from tigon.train.memory import GIB, Estimate, estimate, gpu_memory
from tigon.train.model import compute_dtype, meta_model, parallelize, weights_dtype
from tigon.train.optim import build_ema, build_optimizer, check_ranks, freeze
from tigon.train.throughput import Cost, peak_flops
from tigon.train.trainer import forward_backward, update_weights
from tigon.utils.memory import is_out_of_memory

GPU = torch.device("cuda")
# Settings that save memory, the cheapest first
MEMORY_CHANGES: tuple[dict[str, object], ...] = (
    {"micro_batch_size": 1},
    {"activation_checkpointing": "experts"},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "micro_batch_size": 1},
    {"activation_checkpointing": True, "micro_batch_size": 1, "activation_offload": True},
    {"param_dtype": "bfloat16"},
)
STEPS = 4  # the first half warms up: kernels, the allocator, optimizer states
MANY_STEPS = 2 * (WARM_UP + PASSES + 2)  # whose first half decides on CUDA graphs and captures


@dataclass(frozen=True)
class StepTiming:
    """Holds the measurements of a step, equal on every rank."""

    seconds: float
    tokens: float  # of all ranks
    flops: float  # of all ranks
    peak: int  # bytes, the highest of all GPUs; 0 on CPUs


def random_run(inputs: RunInputs, world: World) -> TrainingRun:
    """Returns the run of these inputs as `prepare` builds it, but with random weights."""
    config = inputs.config
    model = meta_model(config, weights_dtype(config, world.device), inputs.source)
    parallelize(model, config, world)
    materialize(model, world.device)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.02)
        for module in model.modules():
            if isinstance(module, QuantizedWeight):
                module.fill()
    if inputs.choice is not None:
        inputs.choice.apply(model)
    return build_run(inputs, world, model, build_optimizer(model, config), build_ema(model, config))


def time_steps(run: TrainingRun, steps: int) -> StepTiming:
    """Runs `steps` steps, with less memory where `tigon train` would go on with less, and returns
    the mean measurements of the second half; raises StepMemoryError or a RuntimeError."""
    device, first = run.world.device, run.start + run.state.offset  # a stream has no rows before
    run.task.rehearse(run.model)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, tokens, flops = [], [], []
    with run.prefetcher:
        for step in range(first, first + steps):
            began = time.perf_counter()
            _, scale = within_memory(run, step + 1, partial(forward_backward, run, step))
            update_weights(run, step, scale)
            run.optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
            lengths, before, _ = run.data.lengths(step)
            tokens.append(int(lengths.sum()))
            # Tensor ranks shard the model
            flops.append(run.meter.cost(lengths, before) * run.world.sizes.tensor)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    half = slice(steps // 2, None)
    measured = torch.tensor([fmean(seconds[half]), peak], dtype=torch.double, device="cpu")
    mean_seconds, highest = run.world.all_reduce_max(measured).tolist()
    return StepTiming(mean_seconds, fmean(tokens[half]), fmean(flops[half]), int(highest))


def dry_run(config: Config, world: World, gpus: int) -> None:
    """Prints the dry run of a run on `gpus` GPUs; InputError if a step does not fit into memory."""
    config, world = resolve_parallel(config, world, gpus)
    sizes = mesh_sizes(config, gpus)
    with world.raise_on_all_ranks():
        check_batch(config, sizes.data)
        check_ranks(config, sizes.data)
    for_gpu = config.device != "cpu"  # even if this machine has none
    runs_here = world.device.type == "cuda" or not for_gpu
    device = GPU if for_gpu else world.device
    inputs = read_inputs(config, world, check_machine=runs_here, sizes=sizes, device=device)
    config = inputs.config
    try:
        with world.raise_on_all_ranks():
            model = meta_model(config, weights_dtype(config, device), inputs.source)
            inputs.check_model(model)
            freeze(model, config)
        world.log_rank0(*describe_run(config, sizes, device, inputs, model))
        if inputs.is_finished:
            world.log_rank0(
                f"{config.run_dir} is finished: it goes on with more steps, epochs or patience"
            )
            return
        world.log_rank0(*describe_step(config, inputs, model, sizes))
        advised = False
        if not for_gpu:
            world.log_rank0(
                "memory is estimated for GPUs, and this run is on a CPU: `tigon plan` is for GPUs "
                "elsewhere"
            )
        elif world.main:
            result = estimate_run(config, inputs, gpus)
            world.log_rank0(*memory_table(result, gpus, world.device))
            for what in uncounted_memory(config):
                world.log_rank0(f"not in the sum: {what}")
            capacity = gpu_memory(world.device)
            if advised := capacity is not None and result.total > capacity:
                world.log_rank0(*memory_advice(config, inputs, gpus))
        if runs_here and gpus == world.size:
            world.log_rank0(*time_run(config, inputs, world, advised))
            return
        why = (
            f"it has {torch.cuda.device_count()} of {gpus} GPUs" if runs_here else "there is no GPU"
        )
        world.log_rank0(f"time of a step: cannot be measured here: {why}")
    finally:
        inputs.data.close()


def describe_step(
    config: Config, inputs: RunInputs, model: CausalLM, sizes: MeshSizes
) -> list[str]:
    """Returns lines with the operations and tokens of a step."""
    data = inputs.data
    first = inputs.start + inputs.state.offset  # step of the data
    total = active = count_parameters(model)
    for layer in (m for m in model.modules() if isinstance(m, SparseMoE)):
        numbers = sum(p.numel() for p in layer.experts.parameters())
        active -= numbers - numbers * layer.per_token // len(layer.experts.down_proj)
    share = f", by {active:,} of the parameters" if active < total else ""
    spans = [batch.spans for batch in data.micro_batches(first)]
    lengths = torch.cat(spans).diff(dim=1).flatten().tolist()
    flops = Cost.of(model)(lengths) / max(1, sum(lengths))
    sequences, _, targets = data.lengths(first)
    if inputs.task.scores:
        pairs = len(sequences) // inputs.task.group
        learned = f" in {format_count(pairs, inputs.task.unit)}, whose scores are learned"
    else:
        learned = f", of which {targets:,} are learned"
    rows = micro_batch_rows(config)
    per_rank = config.batch_size // (sizes.data * rows)
    parts = f"{per_rank} micro-batch{'es' if per_rank > 1 else ''} of {rows}"
    group_size = sizes.ranks // sizes.data
    ranks = f" on each of {sizes.data} ranks" if sizes.ranks > 1 else ""
    if group_size > 1:
        groups = "each of " if sizes.data > 1 else ""
        ranks = f" on {groups}{format_count(sizes.data, 'group')} of {group_size} ranks"
    return [
        f"a token: {flops / 1e9:,.3g} GFLOP, forward and backward{share}",
        f"a step: {config.batch_size:,} rows of {config.seq_len:,} tokens, {parts}{ranks}; "
        f"the first has {sequences.sum():,} tokens{learned}",
    ]


def estimate_run(config: Config, inputs: RunInputs, gpus: int) -> Estimate:
    """Returns the memory of a run with these settings on GPUs, and with what is chosen for them
    unless they set activation_checkpointing."""
    compute = compute_dtype(config, GPU)
    model = meta_model(config, weights_dtype(config, GPU), inputs.source)
    if inputs.choice is not None and config.activation_checkpointing == "auto":
        inputs.choice.apply(model)
    return estimate(model, inputs.task, config, gpus, compute)


def memory_table(result: Estimate, gpus: int, device: torch.device) -> list[str]:
    """Returns the lines of a table of the estimate in GiB, with host memory below it."""
    owner = "a GPU" if gpus == 1 else f"each of {gpus} GPUs"
    lines = [f"memory of {owner} at its peak, estimated, GiB:"]
    lines += [f"  {kind:18}{size / GIB:8.2f}" for kind, size in result.kinds.items()]
    memory = gpu_memory(device)
    gpu = f" of {memory / GIB:.1f}: {torch.cuda.get_device_name(device)}" if memory else ""
    lines.append(f"  {'sum':18}{result.total / GIB:8.2f}{gpu}")
    lines.append(f"host memory of each rank, for weights and states: {result.host / GIB:.2f} GiB")
    return lines


def uncounted_memory(config: Config) -> list[str]:
    """Returns what the run takes besides the estimate, a text for each."""
    full_precision = compute_dtype(config, GPU) == torch.float32
    cases: dict[str, object] = {
        "attention in float32, which is not fused and may hold scores": full_precision,
        "the scores that attention=reference holds": config.attention == "reference"
        and not full_precision,
        "what muon's update holds, about 1 GiB, where that is more than a backward does": (
            config.optimizer == "muon"
        ),
        "keys and values of samples, where they are more than a step's activations": (
            config.sample_prompts
        ),
        "what an evaluation keeps of its logits": config.predictions or config.eval_return_logits,
        "what callbacks are given and keep": config.hooks,
        "the activations of the first micro-batch of each further kind, which has no graph yet": (
            config.cuda_graphs is True
        ),
        f"reference={config.reference}, which is there before the first step alone": (
            config.reference and not config.streaming
        ),
        "host memory for the activations of activation_offload": config.activation_offload,
    }
    return [what for what, applies in cases.items() if applies]


def memory_advice(config: Config, inputs: RunInputs, gpus: int) -> list[str]:
    """Returns lines with the memory after each change of settings, or of GPUs, that saves some."""
    lines, present = ["less memory:"], estimate_run(config, inputs, gpus).total
    for change in MEMORY_CHANGES:
        try:
            other = replace(config, **change)  # type: ignore[arg-type]
            total = present if other == config else estimate_run(other, inputs, gpus).total
        except ValueError:  # also of a model without experts
            continue
        if total < present:
            names = " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
            lines.append(f"  {total / GIB:8.2f} GiB with {names}")
    parallel = parallel_settings(config)
    shared = replace(parallel, context=2 * parallel.context)
    with suppress(ValueError):  # the ranks may be indivisible
        shared.sizes(gpus)
        total = estimate_run(replace(config, parallel=shared), inputs, gpus).total
        if total < present:
            lines.append(f"  {total / GIB:8.2f} GiB with parallel.context={shared.context}")
    fixed = parallel.fsdp is not None
    rows = 2 * mesh_sizes(config, gpus).data * micro_batch_rows(config)
    if not fixed and config.batch_size % rows == 0:
        total = estimate_run(config, inputs, 2 * gpus).total
        lines.append(f"  {total / GIB:8.2f} GiB on {2 * gpus} GPUs")
    return lines


def time_run(config: Config, inputs: RunInputs, world: World, advised: bool) -> list[str]:
    """Runs steps on random weights and returns lines with their time; raises InputError, with
    advice unless it is printed already (`advised`), if one does not fit into memory."""
    try:
        run = random_run(inputs, world)
        timing = time_steps(run, MANY_STEPS if run.model.graphs else STEPS)
    except (StepMemoryError, RuntimeError) as error:
        if not (isinstance(error, StepMemoryError) or is_out_of_memory(error)):
            raise
        lines = memory_advice(config, inputs, world.size) if world.main and not advised else []
        problem = error.problem if isinstance(error, StepMemoryError) else first_sentence(error)
        raise InputError("\n  ".join([f"a step does not fit: {problem}", *lines])) from None
    speed = timing.tokens / timing.seconds
    line = f"a step, measured: {timing.seconds:.3g} s, {speed:,.0f} tokens/s"
    peak = peak_flops(world.device, compute_dtype(config, world.device))
    if peak is not None:
        line += f", {timing.flops / timing.seconds / (peak * world.size):.1%} MFU"
    if timing.peak:
        line += f", {timing.peak / GIB:.2f} GiB at its peak"
    left = inputs.steps - inputs.start
    steps, time = f"{left:,} more steps" if inputs.start else "all steps", left * timing.seconds
    return [line, f"{steps}: about {format_duration(time)}, without evaluations and checkpoints"]
