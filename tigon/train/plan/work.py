"""What one GPU computes of a micro-batch: GEMMs, attention, and bytes of memory-bound kernels.

The model is one rank's part (`tigon.parallel.take_part`): its matrices have a share of the rows or
columns, and the residual stream its whole width, of which a rank keeps a share of the tokens. Of
experts that ranks share, each gets as many tokens as the others.

# B rows, T tokens of a row, C model dim, V vocab
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from tigon.layers import Attention, Experts, RMSNorm, SparseMoE
from tigon.layers.linear import GatedLinear
from tigon.models import MODELS, CausalLM
from tigon.parallel import MeshSizes, take_part
from tigon.train.estimate.gathering import shared_experts
from tigon.train.optim import hidden_matrices
from tigon.train.throughput import Cost, positions_seen

BF16 = 2
# Elements that each memory-bound kernel moves, forward and backward, of every element that it is
# given; bench/kernels.py measures the kernels against them
STREAMED = {
    "rms_norm": (2, 3),  # x in, y out; x and dy in, dx out
    # x and residual in, normed and total out; total and both gradients in, one dx out for both
    "rms_norm_residual": (4, 4),
    # as above, but the branch was normed too: x is needed again, and dx is not dresidual
    "sandwich_norm": (4, 6),
    "gated_act": (3, 5),  # gate and up in, y out; gate, up and dy in, dgate and dup out
    "rope": (2, 2),
    "qk_norm_rope": (2, 3),
}
Product = tuple[int, int, int]  # x [m, k] @ w [n, k].T


@dataclass
class Work:
    """Of a micro-batch on one GPU, forward and backward."""

    products: dict[Product, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # how often; three are one layer's
    grouped: float = 0.0  # operations of experts
    attention: dict[int, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # operations, by dimension of a head
    again: float = 0.0  # the share of attention's forwards that are recomputed
    moved: dict[str, float] = field(default_factory=dict)  # bytes of memory-bound kernels, by kind


@dataclass(frozen=True)
class Numbers:
    """Parameters of a rank's part of a model, counted."""

    # By whether they are a hidden matrix, and whether they are of experts that ranks share
    counts: Mapping[tuple[bool, bool], int]
    tensor: int  # ranks that share layers
    expert: int  # and experts
    mixtures: tuple[SparseMoE, ...]

    @classmethod
    def of(cls, model: CausalLM, tensor: int, expert: int) -> Self:
        hidden, counts = hidden_matrices(model), defaultdict[tuple[bool, bool], int](int)
        shared = {p for experts in shared_experts(model) for p in experts.parameters()}
        for name, parameter in model.named_parameters():
            counts[name in hidden, parameter in shared] += parameter.numel()
        mixtures = tuple(m for m in model.modules() if isinstance(m, SparseMoE))
        return cls(counts, tensor, expert, mixtures)

    @property
    def shared(self) -> int:
        """Of experts that ranks share."""
        return sum(count for (_, shared), count in self.counts.items() if shared)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def owned(self, shards: int) -> Iterator[tuple[bool, float]]:
        """Those of one of so many ranks: whether they are hidden matrices, and how many."""
        for (hidden, shared), count in self.counts.items():
            yield hidden, count / (shards * self.tensor // self.expert if shared else shards)


class Shapes:
    """A model and the parts of it that ranks have; what was found once is kept."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self._parts: dict[tuple[int, int], CausalLM] = {}
        self._numbers: dict[tuple[int, int], Numbers] = {}
        self._work: dict[tuple[float, ...], Work] = {}

    def build(self) -> CausalLM:
        """The whole model, on the meta device."""
        family = MODELS[self.config.model_type]
        return family.from_config(self.config, dtype=self.dtype, device="meta").train()

    def part(self, tensor: int = 1, expert: int = 1) -> CausalLM:
        """That of the first of ranks which so divide it, on the meta device; not to be changed.

        ValueError for a model that cannot be divided so."""
        if (tensor, expert) not in self._parts:
            model = self.build()
            take_part(model, MeshSizes(tensor=tensor, expert=expert))
            self._parts[tensor, expert] = model
        return self._parts[tensor, expert]

    def numbers(self, tensor: int = 1, expert: int = 1) -> Numbers:
        """Of that part."""
        if (tensor, expert) not in self._numbers:
            self._numbers[tensor, expert] = Numbers.of(self.part(tensor, expert), tensor, expert)
        return self._numbers[tensor, expert]

    def work(
        self,
        rows: int,
        tokens: int,
        context: int = 1,
        tensor: int = 1,
        expert: int = 1,
        again: float = 0.0,
        learned: float = 1.0,
    ) -> Work:
        """See work_of."""
        key = rows, tokens, context, tensor, expert, again, learned
        if key not in self._work:
            how: dict[str, Any] = {"context": context, "again": again, "learned": learned}
            part = self.part(tensor, expert)
            self._work[key] = work_of(part, rows, tokens, tensor=tensor, **how)
        return self._work[key]

    @property
    def experts(self) -> int:
        """That a layer has and ranks may share, in all layers as many; 0 of a model without."""
        found = [len(m.down_proj) for m in self.part().modules() if isinstance(m, Experts)]
        return math.gcd(*found)

    @cached_property
    def cost(self) -> Cost:
        """Operations that the mathematics of the whole model needs."""
        return Cost.from_model(self.part(1))


def tokens_of(rows: int, tokens: int, context: int) -> int:
    """Of a micro-batch on each of so many ranks, the last of which has padding."""
    return rows * -(-tokens // context)


def work_of(
    model: CausalLM, rows: int, tokens: int, *, context: int = 1, tensor: int = 1,
    again: float = 0.0, learned: float = 1.0,
) -> Work:  # fmt: skip
    """Of B = `rows` rows of T = `tokens` tokens, which `context` ranks divide, and of the part of a
    model that one of `tensor` ranks has.

    `again`: the share of blocks that are recomputed; `learned`: that of tokens with a target.
    """
    found, own = Work(again=again), tokens_of(rows, tokens, context)
    for block in model.model.layers:
        # What nothing saved comes after is not recomputed
        last = None if has_post_norms(block) else getattr(block.mlp, "down_proj", None)
        alone = own_tokens(block, own, tensor)
        for module in block.modules():
            m = alone.get(module, own)
            if isinstance(module, nn.Linear):
                n, k = module.weight.shape
                found.products[m, n, k] += 3 + (0.0 if module is last else again)
            elif isinstance(module, SparseMoE):
                # As many rows come from others as go to them
                size = sum(p.numel() for p in module.experts.parameters())
                share = module.per_token / len(module.experts.down_proj)
                found.grouped += (6 + 2 * again) * m * size * share
            elif isinstance(module, Attention):
                seen = int(positions_seen(np.array([tokens]), module.window).sum())
                each = 12 * module.heads * module.head_dim * rows * seen / context
                found.attention[module.head_dim] += each
    found.products[round(learned * own), *model.lm_head.weight.shape] += 3
    found.moved = streamed(model, own, tensor, again, learned)
    return found


def own_tokens(block: nn.Module, own: int, tensor: int) -> dict[nn.Module, int]:
    """How many of `own` tokens the modules of a mixture compute where ranks of tensor parallelism
    have whole experts: their share of the stream."""
    moes = [m for m in block.modules() if isinstance(m, SparseMoE) and m.divided]
    return {module: -(-own // tensor) for moe in moes for module in moe.modules()}


def streamed(
    model: CausalLM, own: int, tensor: int = 1, again: float = 0.0, learned: float = 1.0
) -> dict[str, float]:
    """Bytes that each kind of memory-bound kernel moves: each operator reads its inputs once
    and writes its outputs once. `own`: tokens of a rank."""
    c, found = model.config.hidden_size, defaultdict[str, float](float)
    vocab, stream = model.lm_head.weight.shape[0], -(-own // tensor)

    def add(kind: str, operator: str, elements: float, extra: float = 0) -> None:
        forward, backward = STREAMED[operator]
        found[kind] += BF16 * (elements * ((1 + again) * forward + backward) + extra)

    for block in model.model.layers:
        for _ in range(2):
            normed = "sandwich_norm" if has_post_norms(block) else "rms_norm_residual"
            add("norms", normed, stream * c)
        alone = own_tokens(block, own, tensor)
        for module in block.modules():
            m = alone.get(module, own)
            if isinstance(module, Attention):
                heads, kv = module.heads + module.kv_heads, own * module.kv_heads
                with_norm = module.q_norm is not None
                operator = "qk_norm_rope" if with_norm else "rope"
                extra = 2 * kv * module.head_dim if with_norm else 0
                add("RoPE", operator, own * heads * module.head_dim, extra)
            elif isinstance(module, GatedLinear):
                add("activation", "gated_act", m * len(module.weight) / 2)
            elif isinstance(module, SparseMoE):
                routed = m * module.per_token
                add("activation", "gated_act", routed * module.experts.down_proj.shape[-1])
                # Outputs of the experts are added up for each token, and the gradient is spread
                shard, arrived = module.experts.shard, float(m)
                moves = 0.0
                if shard is not None:  # of which some come from other ranks, and go back
                    arrived = shard.ranks.size * shard.rows(m, module.per_token)
                    moves = (4 + 2 * again) * (arrived + m)
                moves += (2 + again) * (routed + arrived)
                found["experts' rows"] += BF16 * moves * c
    tied = model.config.tie_word_embeddings
    # Rows in and out, their gradients in; and a gradient of zeros to add them to
    found["embedding"] += BF16 * (4 * stream * c + (0 if tied else vocab * c))
    # Each logit in once, its gradient out once
    found["head"] += BF16 * 2 * learned * own * vocab
    return found


def has_post_norms(block: nn.Module) -> bool:
    """Whether branches are normed before they are added to the residual stream, too."""
    return sum(isinstance(module, RMSNorm) for module in block.children()) == 4
