"""How long a step takes in a layout, and what goes over NVLink and over the network.

GEMMs, attention, memory-bound kernels and optimizer take their operations and bytes at the rates
that were measured in whole steps. A collective takes a latency and its bytes at the link's rate.
The step waits for those of context and expert parallelism, and for most of tensor parallelism's.
Where ranks share experts, each layer of them takes a measured time more. Tensor parallelism's other
collectives and those of FSDP run beside the computation: over NVLink a measured share of their time
is lost nonetheless, over the network what is longer than the computation beside them. With
sharding=gradients a step has one gather of weights and one reduction of gradients.

# B rows of a micro-batch, T tokens of a row, C model dim, n ranks of a group, g of them on a host,
# k experts of a token
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tigon.distributed.context_attention import heads_sent
from tigon.layers import Attention
from tigon.models import CausalLM
from tigon.parallel import reduction_dtype
from tigon.train.config import Config
from tigon.train.model import sum_dtype
from tigon.train.optim import state_bytes
from tigon.train.plan.gpu import GPU, Constants
from tigon.train.plan.layout import Job, Layout
from tigon.train.plan.work import Numbers, Work, tokens_of

BF16, FP32 = 2, 4
WAITED = "tensor/context/expert communication"


@dataclass(frozen=True)
class Time:
    """Of collectives: seconds and bytes that a GPU receives, over either link."""

    nvlink: float = 0.0
    network: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: "Time") -> "Time":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Time(*(a + b for a, b in pairs))

    def __mul__(self, count: float) -> "Time":
        return Time(*(count * value for value in vars(self).values()))


@dataclass(frozen=True)
class Group:
    """Ranks that talk: `size` of them, `stride` apart."""

    size: int
    stride: int

    def here(self, gpu: GPU) -> int:
        """Of them on one host."""
        return max(1, min(self.size, gpu.host // self.stride))

    def gather(self, size: float, gpu: GPU, of: Constants) -> Time:
        """All-gather or reduce-scatter of `size` bytes, those of all ranks together, as a ring. The
        group's ranks on a host share that many network adapters."""
        if self.size == 1:
            return Time()
        g = self.here(gpu)
        hosts = self.size / g
        link = of.nvlink if g == 2 else of.nvlink_many
        inside = size * (self.size - 1) / self.size if g > 1 else 0.0
        across = size * (hosts - 1) / hosts / g
        rate = gpu.network * of.network_share
        slow = across / rate + of.hop * (hosts - 1) if hosts > 1 else 0.0
        return Time(of.latency + inside / link, slow, inside, across)

    def exchange(self, size: float, gpu: GPU, of: Constants) -> Time:
        """All-to-all: each rank has `size` bytes, of which it keeps its own share."""
        if self.size == 1:
            return Time()
        g = self.here(gpu)
        inside, across = (size * n / self.size for n in (g - 1, self.size - g))
        link = of.nvlink if g == 2 else of.nvlink_many
        slow = across / (gpu.network * of.network_share) + of.hop * (self.size / g - 1)
        return Time(of.latency + inside / link, slow if across else 0.0, inside, across)


@dataclass
class Step:
    """Of one GPU; seconds by kind add up to `seconds`."""

    kinds: dict[str, float] = field(default_factory=dict)
    traffic: Time = field(default_factory=Time)
    tokens: float = 0.0  # of the step, per GPU
    flops: float = 0.0  # of the model's mathematics, likewise

    @property
    def seconds(self) -> float:
        return sum(self.kinds.values())

    @property
    def largest(self) -> list[tuple[str, float]]:
        """Kinds and their seconds, the largest first, without what hardly counts."""
        found = [(kind, s) for kind, s in self.kinds.items() if s > 0.002 * self.seconds]
        return sorted(found, key=lambda entry: -entry[1])

    @property
    def rate(self) -> float:
        """Tokens a second of a GPU."""
        return self.tokens / self.seconds

    def mfu(self, gpu: GPU) -> float:
        return self.flops / self.seconds / gpu.flops


def step_of(
    job: Job, layout: Layout, learned: float = 1.0, sums: torch.dtype | None = None
) -> Step:
    """The time of a step. `learned`: the share of tokens that have a target. `sums`: in which FSDP
    reduces gradients, if not in what `reduction_dtype` says."""
    k, count, shapes = job.constants, layout.micro_batches, job.shapes
    model = shapes.part(layout.tensor, layout.expert)
    numbers = shapes.numbers(layout.tensor, layout.expert)
    ranks = {n: getattr(layout, n) for n in ("context", "tensor", "expert")}
    work = shapes.work(layout.rows, job.seq_len, again=layout.again, learned=learned, **ranks)
    compute = computed(work, k)
    step = Step({kind: count * seconds for kind, seconds in compute.items()})
    step.kinds["optimizer"] = updated(numbers, job.config, layout.shards) / k.optimizer
    step.kinds["other"] = k.rest * step.seconds
    waited, hidden = (time * count for time in inner(job, layout, model, numbers))
    step.kinds[WAITED] = waited.nvlink + waited.network + k.exposed * hidden.nvlink
    if layout.expert > 1:
        step.kinds[WAITED] += count * len(numbers.mixtures) * k.shared_experts
    beside = outer(job, gathered(layout, model, numbers), layout, sum(compute.values()), sums)
    exposed = k.exposed_once if layout.sharding == "gradients" else k.exposed
    step.kinds["FSDP over NVLink"] = exposed * beside[0].nvlink
    step.kinds["FSDP over the network"] = beside[1]
    step.traffic = waited + hidden + beside[0]
    rows = layout.rows * count / (layout.tensor * layout.context)
    step.tokens = rows * job.seq_len
    step.flops = rows * shapes.cost([job.seq_len])
    return step


def computed(work: Work, k: Constants) -> dict[str, float]:
    """Seconds of a micro-batch on a GPU, by kind."""
    products = sum(
        count * (2 * m * n * d / k.products + BF16 * (m * n + n * d + m * d) / k.product_bytes)
        for (m, n, d), count in work.products.items()
    )
    attention = sum(ops / k.head_rate(dim) for dim, ops in work.attention.items())
    return {
        "GEMMs": products + work.grouped / k.grouped,
        "attention": attention * (1 + work.again * k.attention_forward),
        "memory-bound kernels": sum(work.moved.values()) / k.passes,
    }


def updated(numbers: Numbers, config: Config, shards: int) -> float:
    """Bytes that the optimizer of a rank reads and writes: weights and states both, gradients
    once."""
    item = getattr(torch, config.param_dtype).itemsize
    return sum(
        (3 * item + 2 * state_bytes(config, hidden=hidden)) * count
        for hidden, count in numbers.owned(shards)
    )


def inner(job: Job, layout: Layout, model: CausalLM, numbers: Numbers) -> tuple[Time, Time]:
    """Collectives of a micro-batch inside its blocks: those that are waited for, and those that run
    beside GEMMs. Each branch gathers its tokens and reduces its output over the tensor ranks,
    forward and backward; attention exchanges tokens for heads over the context ranks; experts get
    rows from the ranks that share them, and send them back."""
    gpu, k = job.gpu, job.constants
    tensor, context = Group(layout.tensor, 1), Group(layout.context, layout.tensor)
    tokens = tokens_of(layout.rows, job.seq_len, layout.context)
    stream = -(-tokens // layout.tensor)  # a rank's, between layers
    hidden = BF16 * stream * layout.tensor * model.config.hidden_size
    layers, moes = len(model.model.layers), numbers.mixtures
    # Two branches of each block, but for experts that ranks have whole; embedding and head
    branches = 2 * layers - (len(moes) if layout.expert > 1 else 0)
    each = tensor.gather(hidden, gpu, k)
    found = each * (branches * (3 + 2 * layout.again) + 4)
    # In backward inputs are gathered anew, unless they were just now, and their gradients added up
    beside = each * (branches * (2 - layout.again))
    if layout.context > 1 and isinstance(mixer := model.model.layers[0].mixer, Attention):
        sent = heads_sent(mixer.heads, mixer.kv_heads, layout.context) * mixer.head_dim
        # In two messages, to attention and back; a rank's own share is not sent
        size = BF16 * tokens * sent / 2 * layout.context / (layout.context - 1)
        found += context.exchange(size, gpu, k) * (layers * 2 * (2 + layout.again))
    expert = Group(layout.expert, 1)
    for layer in moes if layout.expert > 1 else ():
        shard = layer.experts.shard
        assert shard is not None
        sent = layout.expert * shard.rows(stream, layer.per_token)
        rows = expert.exchange(BF16 * sent * model.config.hidden_size, gpu, k)
        # Numbers of rows, and what experts they are for, besides: of few bytes
        few = expert.exchange(0, gpu, k)
        found += rows * (4 + 2 * layout.again) + few * (3 + 2 * layout.again)
    return found, beside


@dataclass(frozen=True)
class Gathered:
    """Groups of parameters that the same ranks share: how many, and numbers of one of them."""

    ranks: Group
    copies: Group  # of ranks that have the same
    groups: int
    numbers: float

    def weights(self, gpu: GPU, k: Constants) -> Time:
        return self.ranks.gather(BF16 * self.numbers, gpu, k) * self.groups

    def gradients(self, sums: torch.dtype, gpu: GPU, k: Constants) -> Time:
        """A reduction over the ranks, and an all-reduce over the copies of its result."""
        item = sums.itemsize
        found = self.ranks.gather(item * self.numbers, gpu, k) * self.groups
        own = item * self.numbers / self.ranks.size
        return found + self.copies.gather(own, gpu, k) * (2 * self.groups)


def gathered(layout: Layout, model: CausalLM, numbers: Numbers) -> list[Gathered]:
    """Of one rank's part: blocks, and the ends; and experts that ranks share, which are apart."""
    copies = Group(layout.replicate, layout.tensor * layout.shards)
    apart, groups = numbers.shared, len(model.model.layers) + 1
    rest = numbers.total - apart
    found = [Gathered(Group(layout.shards, layout.tensor), copies, groups, rest / groups)]
    if apart:
        same = Group(layout.same, layout.expert)
        groups = len(numbers.mixtures)
        found.append(Gathered(same, copies, groups, apart / groups))
    return found


def outer(
    job: Job,
    parts: Sequence[Gathered],
    layout: Layout,
    compute: float,
    sums: torch.dtype | None = None,
) -> tuple[Time, float]:
    """Collectives of a step for weights and gradients, and by how much those over the network
    outlast `compute`, the seconds of a micro-batch. `sums` is as in `step_of`."""
    gpu, k, count = job.gpu, job.constants, layout.micro_batches
    whole = layout.sharding == "gradients"
    held = getattr(torch, job.config.param_dtype)

    def dtype_of(part: Gathered) -> torch.dtype:
        if whole:
            return sum_dtype(job.config)
        size, once = part.ranks.size, count == 1
        return sums or reduction_dtype(torch.bfloat16, {held}, size, one_backward=once)

    gather = sum((part.weights(gpu, k) for part in parts), Time())
    reduced = sum((part.gradients(dtype_of(part), gpu, k) for part in parts), Time())
    forward = max(0.0, gather.network - compute / 3)
    if whole:  # one gather, beside the first forward, and one reduction, beside the last backward
        return gather + reduced, forward + max(0.0, reduced.network - 2 / 3 * compute)
    backward = max(0.0, gather.network - 2 / 3 * compute)
    last = max(0.0, gather.network + reduced.network - 2 / 3 * compute)
    return gather * (2 * count) + reduced, forward * count + backward * (count - 1) + last
