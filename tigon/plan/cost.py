"""The cost model: what one GPU computes and receives in a step, and how long that takes.

Computation takes its operations and bytes at the rates measured in whole steps; a collective takes
a latency and its bytes at the link's rate. A step waits for the collectives of context and expert
parallelism and for most of tensor parallelism's. FSDP's and the other tensor collectives overlap
with computation: over NVLink a measured share of their time is lost, over the network whatever
outlasts the computation. sharding=gradients gathers weights and reduces gradients once per step.

The model is one rank's shard (`tigon.parallel.keep_rank_zero`): matrices have a share of rows or
columns; the residual stream keeps its width, and a rank keeps a share of its tokens. Every rank of
an expert-parallel group receives equally many tokens.

# B rows of a micro-batch, T tokens of a row, C model dim, V vocab
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from tigon.distributed.context_attention import heads_sent_per_token
from tigon.kernels.delta.gated_delta_tiles import CHUNK
from tigon.layers import (
    Attention,
    Experts,
    GatedDeltaNet,
    GroupRouter,
    LatentAttention,
    RMSNorm,
    ShortConv,
    SoftmaxAttention,
    SparseMoE,
    TopKRouter,
)
from tigon.layers.linear import GatedLinear
from tigon.models import MODELS, CausalLM
from tigon.parallel import MeshSizes, keep_rank_zero, reduction_dtype
from tigon.parallel.tensor_modules import ReplicatedLinear
from tigon.plan.gpu import GPU, Constants
from tigon.plan.layout import Layout
from tigon.settings.config import Config
from tigon.train.memory_tracker import sharded_experts
from tigon.train.model import sum_dtype
from tigon.train.optim import hidden_matrices, state_bytes
from tigon.train.throughput import Cost, positions_seen

BF16, FP32 = 2, 4
WAITED = "tensor/context/expert communication"
# Elements that a memory-bound kernel moves per element of its input, forward and backward;
# bench/kernels.py measures the kernels against them
STREAMED = {
    "rms_norm": (2, 3),  # x in, y out; x and dy in, dx out
    # x and residual in, normed and total out; total and both gradients in, one dx out for both
    "rms_norm_residual": (4, 4),
    # the same, but the branch was normed too: x is needed again, and dx is not dresidual
    "sandwich_norm": (4, 6),
    "gated_act": (3, 5),  # gate and up in, y out; gate, up and dy in, dgate and dup out
    "rope": (2, 2),
    "qk_norm_rope": (2, 3),
    "causal_conv": (2, 3),  # x in, y out; x and dy in, dx out
    "gated_norm": (3, 5),  # x and gate in, y out; both and dy in, their gradients out
    "sigmoid_gate": (3, 5),  # the same
    "join": (2, 2),  # a part of a tensor that is put together from several
}
GEMM = tuple[int, int, int]  # m, n, k of x [m, k] @ w [n, k].T


@dataclass
class Work:
    """Counts a GPU's work in the forward and backward of a micro-batch."""

    products: dict[GEMM, float] = field(default_factory=lambda: defaultdict(float))  # times each
    grouped: float = 0.0  # operations of experts
    # Operations of attention, by head_dim and the keys that a query sees, in the mean
    attention: dict[tuple[int, float], float] = field(default_factory=lambda: defaultdict(float))
    recomputed: float = 0.0  # share of attention's forwards
    recurrence: float = 0.0  # operations of the delta rule
    moved: dict[str, float] = field(default_factory=dict)  # bytes of memory-bound kernels, by kind


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters in a rank's shard of a model."""

    counts: Mapping[tuple[bool, bool], int]  # by: hidden matrix, of sharded experts
    tensor: int  # ranks that shard the layers
    expert: int  # and the experts
    mixtures: tuple[SparseMoE, ...]

    @property
    def shared(self) -> int:
        """Returns the number of parameters in the shard that belong to sharded experts."""
        return sum(count for (_, sharded), count in self.counts.items() if sharded)

    @property
    def total(self) -> int:
        """Returns the number of all parameters in the shard."""
        return sum(self.counts.values())

    def per_shard(self, shards: int) -> Iterator[tuple[bool, float]]:
        """Yields whether parameters are hidden matrices, and how many an FSDP rank holds."""
        for (hidden, sharded), count in self.counts.items():
            yield hidden, count / (shards * self.tensor // self.expert if sharded else shards)


class Shapes:
    """A model and the shards of it that ranks hold, on the meta device; results are cached."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.shard = cache(self._shard)
        self.counts = cache(self._counts)
        self.work = cache(self._work)

    def build(self) -> CausalLM:
        """Returns a new whole model."""
        family = MODELS[self.config.model_type]
        return family.from_config(self.config, dtype=self.dtype, device="meta").train()

    def _shard(self, tensor: int = 1, expert: int = 1) -> CausalLM:
        """Returns the first rank's shard, to be left unchanged; ValueError if there is none."""
        model = self.build()
        keep_rank_zero(model, MeshSizes(tensor=tensor, expert=expert))
        return model

    def _counts(self, tensor: int = 1, expert: int = 1) -> ParameterCounts:
        """Returns the numbers of parameters in the first rank's shard."""
        model = self.shard(tensor, expert)
        hidden, counts = hidden_matrices(model), defaultdict[tuple[bool, bool], int](int)
        sharded = {p for experts in sharded_experts(model) for p in experts.parameters()}
        for name, parameter in model.named_parameters():
            counts[name in hidden, parameter in sharded] += parameter.numel()
        mixtures = tuple(m for m in model.modules() if isinstance(m, SparseMoE))
        return ParameterCounts(counts, tensor, expert, mixtures)

    def _work(
        self, rows: int, tokens: int, tensor: int = 1, expert: int = 1, **options: Any
    ) -> Work:
        """Returns `micro_batch_work` of a shard."""
        return micro_batch_work(self.shard(tensor, expert), rows, tokens, tensor=tensor, **options)

    @property
    def experts(self) -> int:
        """Returns the number of experts that ranks may divide in all layers; 0 without experts."""
        counts = [len(m.down_proj) for m in self.shard().modules() if isinstance(m, Experts)]
        return math.gcd(*counts)

    @cached_property
    def cost(self) -> Cost:
        """Returns the floating-point operations of the whole model, by its formulas."""
        return Cost.of(self.shard())


@dataclass(frozen=True)
class Job:
    """Describes a run to plan: the model, the settings, the GPUs and the batch."""

    shapes: Shapes
    config: Config  # settings of the run; those of a layout are ignored
    gpus: int
    gpu: GPU
    constants: Constants
    seq_len: int  # T
    batch_rows: int  # per step, on all GPUs


def micro_batch_work(
    model: CausalLM, rows: int, tokens: int, *, context: int = 1, tensor: int = 1,
    recomputed: float = 0.0, learned: float = 1.0,
) -> Work:  # fmt: skip
    """Returns what one rank computes of B rows of T tokens, which `context` ranks divide.

    `model` is the shard of one of `tensor` ranks; `recomputed` the share of blocks that backward
    recomputes; `learned` the share of tokens with a target.
    """
    work, local = Work(recomputed=recomputed), rows * -(-tokens // context)
    stream = -(-local // tensor)  # a rank's own tokens, between blocks
    for end in (*model.model.first_modules, *model.model.last_modules):
        for module in end.modules():
            if isinstance(module, nn.Linear):
                work.products[stream, *module.weight.shape] += 3
    for block in model.model.layers:
        # Nothing after the last product is saved, so it is not recomputed
        last = None if has_post_norms(block) else getattr(block.mlp, "down_proj", None)
        routed = expert_tokens(block, local, tensor)
        for module in block.modules():
            m = stream if isinstance(module, ReplicatedLinear) else routed.get(module, local)
            if isinstance(module, nn.Linear | TopKRouter | GroupRouter):
                n, k = module.weight.shape
                work.products[m, n, k] += 3 + (0.0 if module is last else recomputed)
            elif isinstance(module, SparseMoE):
                # A rank receives as many rows as it sends
                size = sum(p.numel() for p in module.experts.parameters())
                share = module.per_token / len(module.experts.down_proj)
                work.grouped += (6 + 2 * recomputed) * m * size * share
            elif isinstance(module, SoftmaxAttention):
                seen = int(positions_seen(np.array([tokens]), module.window).sum())
                operations = 12 * module.heads * module.head_dim * rows * seen / context
                work.attention[module.head_dim, seen / tokens] += operations
            elif isinstance(module, GatedDeltaNet):
                forward, backward = delta_operations(module.key_dim, module.value_dim)
                per_token = (1 + recomputed) * forward + backward
                work.recurrence += per_token * module.value_heads * local
    work.products[round(learned * local), *model.lm_head.weight.shape] += 3
    work.moved = kernel_bytes(model, local, tensor, recomputed, learned)
    return work


def delta_operations(key_dim: int, value_dim: int) -> tuple[int, int]:
    """Returns the operations of the gated delta rule for a token of a head, forward and backward,
    which computes what it needs of forward again."""
    dims, state = CHUNK * (key_dim + value_dim), key_dim * value_dim
    return 4 * dims + 6 * state, 15 * dims + 4 * CHUNK**2 + 16 * state


def expert_tokens(block: nn.Module, local: int, tensor: int) -> dict[nn.Module, int]:
    """Returns the number of tokens of each module in a mixture whose whole experts tensor ranks
    divide: a rank's share of its `local` ones. Modules that compute all of these are left out."""
    moes = [m for m in block.modules() if isinstance(m, SparseMoE) and m.divided]
    return {module: -(-local // tensor) for moe in moes for module in moe.modules()}


def kernel_bytes(
    model: CausalLM, local: int, tensor: int = 1, recomputed: float = 0.0, learned: float = 1.0
) -> dict[str, float]:
    """Returns the bytes that memory-bound kernels move for a rank's `local` tokens, by kind; each
    kernel reads its inputs once and writes its outputs once."""
    c, moved = model.config.hidden_size, defaultdict[str, float](float)
    stream = -(-local // tensor)

    def add(kind: str, operator: str, elements: float, extra: float = 0) -> None:
        forward, backward = STREAMED[operator]
        moved[kind] += BF16 * (elements * ((1 + recomputed) * forward + backward) + extra)

    for block in model.model.layers:
        for _ in range(2):
            normed = "sandwich_norm" if has_post_norms(block) else "rms_norm_residual"
            add("norms", normed, stream * c)
        routed = expert_tokens(block, local, tensor)
        for module in block.modules():
            m = routed.get(module, local)
            if isinstance(module, Attention):
                heads, kv = module.heads + module.kv_heads, local * module.kv_heads
                with_norm = module.q_norm is not None
                operator = "qk_norm_rope" if with_norm else "rope"
                extra = 2 * kv * module.head_dim if with_norm else 0
                add("RoPE", operator, local * heads * module.head_dim, extra)
                if module.gate is not None:
                    add("activation", "sigmoid_gate", local * module.heads * module.head_dim)
            elif isinstance(module, LatentAttention):
                heads, rotated = module.heads, module.sizes.qk_rope_head_dim
                add("RoPE", "rope", local * (heads + 1) * rotated)
                padded = module.head_dim if module.value_dim < module.head_dim else 0
                add("latents", "join", local * heads * (2 * module.head_dim + padded))
            elif isinstance(module, GatedDeltaNet):
                add("convolution", "causal_conv", local * module.channels)
                add("norms", "gated_norm", local * module.value_heads * module.value_dim)
            elif isinstance(module, ShortConv):
                channels = len(module.conv.weight)
                add("convolution", "causal_conv", local * channels)
                add("activation", "gated_act", 2 * local * channels)  # both gates
            elif isinstance(module, GatedLinear):
                add("activation", "gated_act", m * len(module.weight) / 2)
            elif isinstance(module, SparseMoE):
                copies = m * module.per_token
                inner = module.experts.matrix_shape("down_proj")[1]
                add("activation", "gated_act", copies * inner)
                # The experts' outputs are summed for each token, and the gradient is spread
                shard, received, moves = module.experts.shard, float(m), 0.0
                if shard is not None:  # rows of other ranks arrive and return
                    received = shard.ranks.size * shard.rows(m, module.per_token)
                    moves = (4 + 2 * recomputed) * (received + m)
                moves += (2 + recomputed) * (copies + received)
                moved["experts' rows"] += BF16 * moves * c
    for table in model.model.embeddings:
        tied = table.weight is model.lm_head.weight
        # Rows in and out, their gradients in; and a gradient of zeros to add them to
        size = 4 * stream * table.weight.shape[1] + (0 if tied else table.weight.numel())
        moved["embedding"] += BF16 * size
    # Each logit in once, its gradient out once
    moved["head"] += BF16 * 2 * learned * local * model.lm_head.weight.shape[0]
    return moved


def has_post_norms(block: nn.Module) -> bool:
    """Returns whether a block also norms its branches before it adds them."""
    return sum(isinstance(module, RMSNorm) for module in block.children()) >= 4


@dataclass(frozen=True)
class CommTime:
    """Seconds of collectives, and the bytes that a GPU receives, over either link."""

    nvlink: float = 0.0
    network: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: "CommTime") -> "CommTime":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return CommTime(*(a + b for a, b in pairs))

    def __mul__(self, count: float) -> "CommTime":
        return CommTime(*(count * value for value in vars(self).values()))


@dataclass(frozen=True)
class CommGroup:
    """A process group of `size` ranks that are `stride` apart."""

    size: int
    stride: int

    def per_host(self, gpu: GPU) -> int:
        """Returns how many of the group's ranks are on one host."""
        return max(1, min(self.size, gpu.host // self.stride))

    def gather(self, size: float, gpu: GPU, k: Constants) -> CommTime:
        """Returns the time of an all-gather or reduce-scatter, as a ring, of `size` bytes of all
        ranks together; the ranks on a host share that many network adapters."""
        local = self.per_host(gpu)
        hosts = self.size / local
        inside = size * (self.size - 1) / self.size if local > 1 else 0.0
        return self._time(inside, size * (hosts - 1) / hosts / local, gpu, k)

    def exchange(self, size: float, gpu: GPU, k: Constants) -> CommTime:
        """Returns the time of an all-to-all of `size` bytes per rank, which keeps its share."""
        local = self.per_host(gpu)
        inside, across = (size * n / self.size for n in (local - 1, self.size - local))
        return self._time(inside, across, gpu, k)

    def _time(self, inside: float, across: float, gpu: GPU, k: Constants) -> CommTime:
        """Returns the time in which a GPU receives these bytes inside its host and across hosts."""
        if self.size == 1:
            return CommTime()
        local = self.per_host(gpu)
        link = k.nvlink if local == 2 else k.nvlink_many
        network = across / (gpu.network * k.network_share) + k.hop * (self.size / local - 1)
        return CommTime(k.latency + inside / link, network if across else 0.0, inside, across)


@dataclass
class Step:
    """Holds the time of one GPU's step by kind, which adds up to `seconds`."""

    kinds: dict[str, float] = field(default_factory=dict)
    traffic: CommTime = field(default_factory=CommTime)
    tokens: float = 0.0  # per GPU
    flops: float = 0.0  # of the model's mathematics, per GPU

    @property
    def seconds(self) -> float:
        return sum(self.kinds.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Returns kinds and their seconds, the largest first, without those of 0.2 % or less."""
        kinds = [(kind, s) for kind, s in self.kinds.items() if s > 0.002 * self.seconds]
        return sorted(kinds, key=lambda entry: -entry[1])

    @property
    def rate(self) -> float:
        """Returns the tokens per second of a GPU."""
        return self.tokens / self.seconds

    def mfu(self, gpu: GPU) -> float:
        """Returns the share of the GPU's peak that the step uses."""
        return self.flops / self.seconds / gpu.flops


def estimate_step(job: Job, layout: Layout, *, sums: torch.dtype | None = None) -> Step:
    """Returns the time of a step. `sums` is the dtype in which FSDP reduces gradients, by default
    that of `reduction_dtype`."""
    k, batches, shapes = job.constants, layout.micro_batches, job.shapes
    counts = shapes.counts(layout.tensor, layout.expert)
    ranks = {n: getattr(layout, n) for n in ("context", "tensor", "expert")}
    work = shapes.work(layout.rows, job.seq_len, **ranks, recomputed=layout.recomputed)
    if layout.checkpointing == "experts":  # gate and up: 2 of 3 products, 1 of 3 passes
        work = replace(work, grouped=work.grouped * 11 / 9)
    compute = compute_seconds(work, k)
    step = Step({kind: batches * seconds for kind, seconds in compute.items()})
    item = getattr(torch, job.config.param_dtype).itemsize
    update = sum(  # weights and states in and out, gradients in
        (3 * item + 2 * state_bytes(job.config, hidden=hidden)) * count
        for hidden, count in counts.per_shard(layout.shards)
    )
    step.kinds["optimizer"] = update / k.optimizer
    step.kinds["other"] = k.rest * step.seconds
    waited, hidden = (time * batches for time in block_collectives(job, layout))
    step.kinds[WAITED] = waited.nvlink + waited.network + k.exposed * hidden.nvlink
    if layout.expert > 1:
        step.kinds[WAITED] += batches * len(counts.mixtures) * k.shared_experts
    fsdp, outlasting = fsdp_collectives(job, layout, sum(compute.values()), sums)
    exposed = k.exposed_once if layout.sharding == "gradients" else k.exposed
    step.kinds["FSDP over NVLink"] = exposed * fsdp.nvlink
    step.kinds["FSDP over the network"] = outlasting
    step.traffic = waited + hidden + fsdp
    rows = layout.rows * batches / (layout.tensor * layout.context)
    step.tokens = rows * job.seq_len
    step.flops = rows * shapes.cost([job.seq_len])
    return step


def compute_seconds(work: Work, k: Constants) -> dict[str, float]:
    """Returns the seconds of a micro-batch on a GPU, by kind."""
    products = sum(
        count * (2 * m * n * d / k.products + BF16 * (m * n + n * d + m * d) / k.product_bytes)
        for (m, n, d), count in work.products.items()
    )
    attention = sum(flops / k.attention_rate(*key) for key, flops in work.attention.items())
    return {
        "GEMMs": products + work.grouped / k.grouped,
        "attention": attention * (1 + work.recomputed * k.attention_forward),
        "delta rule": work.recurrence / k.recurrence,
        "memory-bound kernels": sum(work.moved.values()) / k.passes,
    }


def block_collectives(job: Job, layout: Layout) -> tuple[CommTime, CommTime]:
    """Returns a micro-batch's collectives inside blocks: those waited for, and those beside GEMMs.

    Each branch gathers its tokens and reduces its output over the tensor ranks, forward and
    backward; attention exchanges tokens for heads over the context ranks; expert-parallel ranks
    send each other rows, and back.
    """
    gpu, k, recomputed = job.gpu, job.constants, layout.recomputed
    model = job.shapes.shard(layout.tensor, layout.expert)
    moes = job.shapes.counts(layout.tensor, layout.expert).mixtures
    tensor, context = CommGroup(layout.tensor, 1), CommGroup(layout.context, layout.tensor)
    tokens = layout.tokens(job.seq_len)
    stream = -(-tokens // layout.tensor)  # a rank's, between layers
    hidden = BF16 * stream * layout.tensor * model.config.hidden_size
    layers = len(model.model.layers)
    # Two branches per block, except experts that ranks hold whole; embedding and head
    branches = 2 * layers - (len(moes) if layout.expert > 1 else 0)
    gather = tensor.gather(hidden, gpu, k)
    waited = gather * (branches * (3 + 2 * recomputed) + 4)
    # Backward gathers inputs unless a recomputation just did, and reduces their gradients
    overlapped = gather * (branches * (2 - recomputed))
    if layout.context > 1 and isinstance(mixer := model.model.layers[0].mixer, SoftmaxAttention):
        sent = heads_sent_per_token(mixer.heads, mixer.kv_heads, layout.context) * mixer.head_dim
        # Two messages, to attention and back; a rank's share is not sent
        size = BF16 * tokens * sent / 2 * layout.context / (layout.context - 1)
        waited += context.exchange(size, gpu, k) * (layers * 2 * (2 + recomputed))
    expert = CommGroup(layout.expert, 1)
    for layer in moes if layout.expert > 1 else ():
        shard = layer.experts.shard
        assert shard is not None
        sent = layout.expert * shard.rows(stream, layer.per_token)
        rows = expert.exchange(BF16 * sent * model.config.hidden_size, gpu, k)
        # Counts of rows and their experts are separate messages of few bytes
        sizes = expert.exchange(0, gpu, k)
        waited += rows * (4 + 2 * recomputed) + sizes * (3 + 2 * recomputed)
    return waited, overlapped


def sharded_parameters(job: Job, layout: Layout) -> Iterator[tuple[CommGroup, int, float]]:
    """Yields FSDP's parameter groups of equal size: their ranks, how many there are, and the
    parameters of each. Blocks and ends come first, then sharded experts."""
    counts = job.shapes.counts(layout.tensor, layout.expert)
    count = len(job.shapes.shard(layout.tensor, layout.expert).model.layers) + 1
    yield CommGroup(layout.shards, layout.tensor), count, (counts.total - counts.shared) / count
    if counts.shared:
        ranks, count = CommGroup(layout.expert_replicas, layout.expert), len(counts.mixtures)
        yield ranks, count, counts.shared / count


def fsdp_collectives(
    job: Job, layout: Layout, compute: float, sums: torch.dtype | None = None
) -> tuple[CommTime, float]:
    """Returns a step's collectives of weights and gradients, and by how much those over the network
    outlast `compute`, the seconds of a micro-batch; `sums` is that of `estimate_step`."""
    gpu, k, count = job.gpu, job.constants, layout.micro_batches
    once, one = layout.sharding == "gradients", count == 1
    replicas = CommGroup(layout.replicate, layout.tensor * layout.shards)
    dtypes, gather, reduced = {getattr(torch, job.config.param_dtype)}, CommTime(), CommTime()
    for ranks, groups, numel in sharded_parameters(job, layout):
        gather += ranks.gather(BF16 * numel, gpu, k) * groups
        dtype = sums or reduction_dtype(torch.bfloat16, dtypes, ranks.size, one_backward=one)
        size = (sum_dtype(job.config) if once else dtype).itemsize * numel
        reduced += ranks.gather(size, gpu, k) * groups
        # What is reduced and scattered is then all-reduced over the replicas
        reduced += replicas.gather(size / ranks.size, gpu, k) * (2 * groups)
    forward = max(0.0, gather.network - compute / 3)
    if once:  # the gather overlaps with the first forward, the reduction with the last backward
        return gather + reduced, forward + max(0.0, reduced.network - 2 / 3 * compute)
    backward = max(0.0, gather.network - 2 / 3 * compute)
    last = max(0.0, gather.network + reduced.network - 2 / 3 * compute)
    return gather * (2 * count) + reduced, forward * count + backward * (count - 1) + last
