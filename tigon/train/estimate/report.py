"""`tigon train CONFIG --dry-run`: what a run is, what it takes, and how long a step is."""

from contextlib import suppress
from dataclasses import replace

import torch

from tigon.data.examples import format_count
from tigon.distributed.collectives import Ranks
from tigon.distributed.context_attention import heads_sent
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.kernels.recompute import notes
from tigon.layers import Attention, GatedMLP, SparseMoE
from tigon.models import CausalLM, count_parameters
from tigon.parallel import MeshSizes
from tigon.report.figures import duration
from tigon.train.build import Inputs, make_run, read_inputs, without_effect, without_fp8
from tigon.train.config import Config, parallel_of, sizes_of
from tigon.train.estimate.budget import GIB, Choice, decide, memory_of
from tigon.train.estimate.memory import Estimate, estimate
from tigon.train.estimate.steps import Measured, measure, random_model
from tigon.train.flops import model_flops, peak_flops
from tigon.train.model import compute_dtype, held_dtype, outline
from tigon.train.optim import build_ema, build_optimizer, check_ranks, freeze
from tigon.train.parallel import InputError, World
from tigon.train.plan.auto import settle

GPU = torch.device("cuda")
# Settings that save memory, in the order of what they cost
SAVING: tuple[dict[str, object], ...] = (
    {"micro_batch_size": 1},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "micro_batch_size": 1},
    {"activation_checkpointing": True, "micro_batch_size": 1, "activation_offload": True},
    {"param_dtype": "bfloat16"},
)


def dry_run(config: Config, world: World, gpus: int) -> None:
    """Print it; `gpus` is the number that the run is planned for, at least the world's.

    Raises InputError where a step does not fit into memory.
    """
    config, world = settle(config, world, gpus)
    sizes = sizes_of(config, gpus)
    ranks = sizes.data
    if config.batch_size % (config.micro_batch_size * ranks):
        raise InputError(
            f"batch_size {config.batch_size} must be a multiple of micro_batch_size "
            f"{config.micro_batch_size} x {ranks} ranks with different rows"
        )
    with world.together():
        check_ranks(config, ranks)
    here = world.device.type == "cuda" or not on_gpu(config)
    inputs = read_inputs(config, world, here=here, sizes=sizes)
    config = inputs.config
    try:
        with world.together():
            device = GPU if on_gpu(config) else world.device
            model = outline(config, held_dtype(config, device), inputs.source)
            inputs.check_model(model)
            freeze(model, config)
        world.say(*described(config, inputs, model, gpus))
        idle = without_effect(config, inputs.steps(config), device)
        for notice in [*idle, *without_fp8(config, model)]:
            world.say(f"note: {notice}")
        chosen = decide(config, world, inputs.objective, inputs.source, gpus, device)
        if chosen is not None:
            world.say(str(chosen))
        advised = False
        if not on_gpu(config):
            world.say(
                "memory is estimated for GPUs, and this run is on a CPU: `tigon plan` is for GPUs "
                "elsewhere"
            )
        elif world.main:
            found = plan(config, inputs, gpus, chosen)
            world.say(*table(found, gpus, world.device))
            for what in not_counted(config):
                world.say(f"not in the sum: {what}")
            room = memory_of(world.device)
            if advised := room is not None and found.total > room:
                world.say(*advice(config, inputs, gpus))
        if why := unmeasurable(config, world, gpus):
            world.say(f"time of a step: cannot be measured here: {why}")
            return
        world.say(*timed(config, inputs, world, advised, chosen))
    finally:
        inputs.data.close()


def described(config: Config, inputs: Inputs, model: CausalLM, gpus: int) -> list[str]:
    """Parameters, operations, tokens and steps."""
    data, steps = inputs.data, inputs.steps(config)
    first = inputs.start + inputs.state.offset  # step of the data
    every = count_parameters(model)
    trained = every - count_parameters(model, frozen=True)
    active = every - sum(idle_parameters(m) for m in model.modules() if isinstance(m, SparseMoE))
    size = f"{every:,} parameters, {'all' if trained == every else f'{trained:,}'} of them trained"
    if active < every:
        size += f", {active:,} active for a token"
    lengths = [
        int(length)
        for batch in data.micro_batches(first)
        for length in batch.spans.diff(dim=1).flatten()
    ]
    flops = model_flops(model, lengths) / max(1, sum(lengths))
    sequences, _, targets = data.lengths(first)
    if inputs.objective.scores:
        pairs = len(sequences) // inputs.objective.group
        learned = f" in {format_count(pairs, inputs.objective.unit)}, whose scores are learned"
    else:
        learned = f", of which {targets:,} are learned"
    each = f", {data.steps_per_epoch:,} an epoch" if data.steps_per_epoch else ""
    sizes = sizes_of(config, gpus)
    per_rank = config.batch_size // (sizes.data * config.micro_batch_size)
    parts = f"{per_rank} micro-batch{'es' if per_rank > 1 else ''} of {config.micro_batch_size}"
    together = sizes.ranks // sizes.data
    ranks = f" on each of {sizes.data} ranks" if gpus > 1 else ""
    if together > 1:
        each_of = "each of " if sizes.data > 1 else ""
        ranks = f" on {each_of}{format_count(sizes.data, 'group')} of {together} ranks"
    lines = [
        f"model: {model.config.transformers_class}, {size}",
        f"a token: {flops / 1e9:,.3g} GFLOP, forward and backward",
        f"a step: {config.batch_size:,} rows of {config.seq_len:,} tokens, {parts}{ranks}; "
        f"the first has {sequences.sum():,} tokens{learned}",
        f"steps: {inputs.start:,} to {steps:,}{each}",
    ]
    return [*lines, *exchanged(config, model, sizes)]


def exchanged(config: Config, model: CausalLM, sizes: MeshSizes) -> list[str]:
    """What ranks that share rows, layers or experts send each other."""
    lines, context, tensor, expert = [], sizes.context, sizes.tensor, sizes.expert
    tokens, own = -(-config.seq_len // context), "each of {} ranks has "
    numbers = config.micro_batch_size * tokens * compute_dtype(config, GPU).itemsize

    def sends(size: float, what: str, backward: float = 1.0) -> str:
        """`backward`: how often it sends as much in the backward pass."""
        forward = numbers * size / 2**20
        recomputed = f", or up to {2 * forward:,.1f} where the block is computed again"
        return (
            f"in the forward pass of a layer it sends {forward:,.1f} MiB of {what} to the others, "
            f"and {backward * forward:,.1f} in the backward pass"
            f"{recomputed if config.activation_checkpointing else ''}"
        )

    if context > 1:
        layers = [m for m in model.modules() if isinstance(m, Attention)]
        heads = [(m.heads // tensor, max(1, m.kv_heads // tensor), m.head_dim) for m in layers]
        size = max(heads_sent(h, kv, context) * d for h, kv, d in heads)
        has = f"{own.format(context)}{tokens:,} tokens of a row"
        lines.append(f"context: {has}; {sends(size, 'heads')}")
    if tensor > 1:
        has = f"{own.format(tensor)}a part of each matrix"
        dim = model.config.hidden_size
        # All tokens of the stream to attention and to an MLP, and what they add to it; to whole
        # experts none
        dense = expert == 1 or any(isinstance(b.mlp, GatedMLP) for b in model.model.layers)
        # Their gradients, and the tokens once more, unless they are so few that they stay
        backward = 1.5 if notes(numbers * dim) else 1.0
        size = 2 * (1 + dense) * dim * (tensor - 1) / tensor
        lines.append(f"tensor: {has}; {sends(size, 'the stream', backward)}")
    if expert > 1:
        layer = next(m for m in model.modules() if isinstance(m, SparseMoE))
        experts = len(layer.experts.down_proj)
        has = f"{own.format(expert)}{experts // expert} experts of a layer"
        shard = ExpertShard(Ranks("", 0, expert), experts)
        rows = shard.rows(-(-tokens // tensor), layer.per_token)
        # A token once to each rank that has any of its experts, and back
        size = 2 * (expert - 1) * rows * model.config.hidden_size / tokens
        evenly = "if all experts are chosen as often, which the memory below counts on, too"
        lines.append(f"experts: {has}; {sends(size, 'tokens')}, {evenly}")
    return lines


def idle_parameters(layer: SparseMoE) -> int:
    """Of the experts that a token does not take."""
    experts = len(layer.experts.down_proj)
    size = sum(p.numel() for p in layer.experts.parameters())
    return size - size * layer.per_token // experts


def plan(config: Config, inputs: Inputs, gpus: int, chosen: Choice | None = None) -> Estimate:
    """The estimate for a run of these settings on GPUs."""
    compute = compute_dtype(config, GPU)
    model = outline(config, held_dtype(config, GPU), inputs.source)
    if chosen is not None:
        chosen.apply(model)
    return estimate(model, inputs.objective, config, gpus, compute)


def table(found: Estimate, gpus: int, device: torch.device) -> list[str]:
    """In GiB."""
    owner = "a GPU" if gpus == 1 else f"each of {gpus} GPUs"
    lines = [f"memory of {owner} at its peak, estimated, GiB:"]
    lines += [f"  {kind:18}{size / GIB:8.2f}" for kind, size in found.kinds.items()]
    room = memory_of(device)
    beside = f" of {room / GIB:.1f}: {torch.cuda.get_device_name(device)}" if room else ""
    lines.append(f"  {'sum':18}{found.total / GIB:8.2f}{beside}")
    lines.append(f"host memory of each rank, for weights and states: {found.host / GIB:.2f} GiB")
    return lines


def not_counted(config: Config) -> list[str]:
    """What the run will also take."""
    found = []
    if compute_dtype(config, GPU) == torch.float32:
        found.append("attention in float32, which is not fused and may hold scores")
    elif config.attention == "reference":
        found.append("the scores that attention=reference holds")
    if config.optimizer == "muon":
        found.append(
            "what muon's update holds, about 1 GiB, where that is more than a backward does"
        )
    if config.sample_prompts:
        found.append("keys and values of samples, where they are more than a step's activations")
    if config.predictions or config.eval_return_logits:
        found.append("what an evaluation keeps of its logits")
    if config.hooks:
        found.append("what hooks are given and keep")
    if config.cuda_graphs:
        found.append(
            "the activations of the first micro-batch of each further kind, which has no graph yet"
        )
    if config.reference and not config.streaming:
        found.append(f"reference={config.reference}, which is there before the first step alone")
    if config.activation_offload:
        found.append("host memory for the activations of activation_offload")
    return found


def advice(config: Config, inputs: Inputs, gpus: int) -> list[str]:
    """Which settings save how much."""
    lines, present = ["less memory:"], plan(config, inputs, gpus).total
    for change in SAVING:
        try:
            own = {"memory_budget": None} if "activation_checkpointing" in change else {}
            other = replace(config, **own, **change)  # type: ignore[arg-type]
        except ValueError:
            continue
        if other != config:
            total = plan(other, inputs, gpus).total
            if total >= present:
                continue
            names = " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
            lines.append(f"  {total / GIB:8.2f} GiB with {names}")
    parallel = parallel_of(config)
    shared = replace(parallel, context=2 * parallel.context)
    with suppress(ValueError):  # of ranks that cannot be divided so
        shared.sizes(gpus)
        total = plan(replace(config, parallel=shared), inputs, gpus).total
        if total < present:
            lines.append(f"  {total / GIB:8.2f} GiB with parallel.context={shared.context}")
    fixed = parallel.fsdp is not None
    rows = 2 * sizes_of(config, gpus).data * config.micro_batch_size
    if not fixed and config.batch_size % rows == 0:
        total = plan(config, inputs, 2 * gpus).total
        lines.append(f"  {total / GIB:8.2f} GiB on {2 * gpus} GPUs")
    return lines


def on_gpu(config: Config) -> bool:
    """Whether the run is for GPUs, wherever it is planned."""
    return config.device != "cpu"


def unmeasurable(config: Config, world: World, gpus: int) -> str | None:
    """Why no step can be made on this machine."""
    if on_gpu(config) and world.device.type == "cpu":
        return "there is no GPU"
    if gpus != world.size:
        return f"it has {torch.cuda.device_count()} of {gpus} GPUs"
    return None


def timed(
    config: Config, inputs: Inputs, world: World, advised: bool, chosen: Choice | None
) -> list[str]:
    """A few steps on random weights. `advised`: what saves memory has been said."""
    try:
        model = random_model(config, world, inputs.source)
        if chosen is not None:
            chosen.apply(model)
        optimizer = build_optimizer(model, config)
        run = make_run(config, world, inputs, model, optimizer, build_ema(model, config))
        found = measure(run)
    except torch.OutOfMemoryError as error:
        lines = advice(config, inputs, world.size) if world.main and not advised else []
        first = str(error).split(". ")[0]
        raise InputError("\n  ".join([f"a step does not fit: {first}", *lines])) from None
    return answer(config, inputs, world, found)


def answer(config: Config, inputs: Inputs, world: World, found: Measured) -> list[str]:
    speed = found.tokens / found.seconds
    line = f"a step, measured: {found.seconds:.3g} s, {speed:,.0f} tokens/s"
    peak = peak_flops(world.device, compute_dtype(config, world.device))
    if peak is not None:
        line += f", {found.flops / found.seconds / (peak * world.size):.1%} MFU"
    if found.peak:
        line += f", {found.peak / GIB:.2f} GiB at its peak"
    left = max(0, inputs.steps(config) - inputs.start) * found.seconds
    return [line, f"all steps: about {duration(left)}, without evaluations and checkpoints"]
