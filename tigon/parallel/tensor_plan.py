"""Which rows of each parameter a rank of tensor parallelism has, as data.

Projections into a block are column-wise parallel: sharded by their outputs, which are heads, or
units of the MLP and of each expert. Those out of it are row-wise parallel: sharded by their inputs,
so that the block's output is a partial sum on each rank. Embedding and head are sharded by
vocabulary. All other parameters are replicated, also the MoE layer itself if ranks have whole
experts: it computes the rank's own tokens. Packed projections are sharded part by part, [q; k; v]
to [q_r; k_r; v_r]. No DTensor placement expresses that, so parameters are plain local tensors,
which the model's layout describes and fully_shard may shard further.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from tigon.distributed.collectives import Ranks
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.layers import (
    Attention,
    Embedding,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LatentAttention,
    LMHead,
    LoRAPart,
    LowRank,
    LowRankEmbedding,
    LowRankExperts,
    ShortConv,
)
from tigon.layers.lora import LORA_A, LORA_B, MAGNITUDE
from tigon.models import CausalLM
from tigon.utils.random import GOLDEN, WORD, as_int64
from tigon.weights import ReplicaIndex, RowSpan, ShardSpec

Pieces = tuple[tuple[RowSpan, ReplicaIndex], ...]
# A rank's share of so many rows: the first of them, their number, and which ranks have the same
Share = tuple[int, int, ReplicaIndex]
Divide = Callable[[int, Ranks], Share]
Sections = list[tuple[int, Divide]]  # runs of rows, each divided by itself
# Outputs are sharded at multiples of 16 if every rank then gets some: loads are aligned, as fp8
# GEMMs need
UNIT = 16


def share_heads(size: int, ranks: Ranks) -> Share:
    """Gives each rank equally many rows, of a size that the ranks divide."""
    share = size // ranks.size
    return ranks.rank * share, share, ReplicaIndex()


def share_kv_heads(dim: int) -> Divide:
    """Gives a rank the kv heads that its queries read; a head of several ranks is replicated."""

    def divide(size: int, ranks: Ranks) -> Share:
        if size // dim >= ranks.size:
            return share_heads(size, ranks)
        copies = ranks.size * dim // size
        head, number = divmod(ranks.rank, copies)
        return head * dim, dim, ReplicaIndex(number, copies)

    return divide


def share_units(size: int, ranks: Ranks) -> Share:
    """Divides units, at multiples of 16 if there are at least 16 for each rank."""
    unit = UNIT if size >= UNIT * ranks.size else 1
    bounds = *(size // unit * r // ranks.size * unit for r in range(ranks.size)), size
    first, end = bounds[ranks.rank : ranks.rank + 2]
    return first, end - first, ReplicaIndex()


def share_unit_pairs(size: int, ranks: Ranks) -> Share:
    """Divides as `share_units` does, where gates and ups alternate."""
    first, length, replica = share_units(size // 2, ranks)
    return 2 * first, 2 * length, replica


def share_vocabulary(size: int, ranks: Ranks) -> Share:
    """Gives each rank equally many rows of the vocabulary, but the last one fewer."""
    share = -(-size // ranks.size)
    first = ranks.rank * share
    return first, min(share, size - first), ReplicaIndex()


class ShardRule(NamedTuple):
    """The dimension in which a parameter is sharded, and the sections of its rows."""

    dim: int
    sections: Callable[[Any, int], Sections]  # of a module, and of the size of the dimension

    def pieces(self, module: nn.Module, size: int, ranks: Ranks) -> Pieces:
        """This rank's share of each section, one after the other."""
        pieces, begin, target = [], 0, 0
        for section, divide in self.sections(module, size):
            first, length, replica = divide(section, ranks)
            pieces.append((RowSpan(begin + first, target, length), replica))
            begin, target = begin + section, target + length
        return tuple(pieces)


def equal(divide: Divide, count: int = 1) -> Callable[[Any, int], Sections]:
    """Rows in `count` sections of one size, such as gates and ups."""
    return lambda module, size: [(size // count, divide)] * count


def key_rows(module: Attention, size: int) -> Sections:
    """Rows [K, D] of kv heads."""
    return [(size, share_kv_heads(module.head_dim))]


def qkv_rows(module: Attention, size: int) -> Sections:
    """Rows [(H + K + K), D] of packed q, k and v, behind those of gates of q."""
    q, *others = module.qkv_proj.parts  # none, keys, or keys and values
    queries = [(q // 2, share_heads)] * 2 if module.gate == "q_proj" else [(q, share_heads)]
    return [*queries, *((rows, share_kv_heads(module.head_dim)) for rows in others)]


def delta_channel_rows(module: GatedDeltaNet, size: int) -> Sections:
    """Rows of q, k and v: the channels of the convolution."""
    keys, values = module.key_heads * module.key_dim, module.value_heads * module.value_dim
    return [(keys, share_heads), (keys, share_heads), (values, share_heads)]


def delta_input_rows(module: GatedDeltaNet, size: int) -> Sections:
    """Rows of packed q, k, v, z, b and a."""
    h = module.value_heads
    others = h * module.value_dim, h, h
    return [*delta_channel_rows(module, size), *((rows, share_heads) for rows in others)]


def expert_gate_up_rows(module: Experts, size: int) -> Sections:
    """Rows of packed gate and up of experts, where gates and ups may alternate."""
    if isinstance(module.act, ClampedSwiGLU):
        return [(size, share_unit_pairs)]
    return gate_up_rows(module, size)


head_rows, vocabulary_rows = equal(share_heads), equal(share_vocabulary)
unit_rows, gate_up_rows = equal(share_units), equal(share_units, 2)

# For each kind of module, the parameters that are sharded, by name
PLAN: Mapping[type[nn.Module], Mapping[str, ShardRule]] = {
    LatentAttention: {
        "q_proj.weight": ShardRule(0, head_rows),
        "q_b_proj.weight": ShardRule(0, head_rows),
        "kv_b_proj.weight": ShardRule(0, head_rows),  # keys and values of a head in a row
        "o_proj.weight": ShardRule(1, head_rows),
    },
    Attention: {
        "qkv_proj.weight": ShardRule(0, qkv_rows),
        "qkv_proj.bias": ShardRule(0, qkv_rows),
        "o_proj.weight": ShardRule(1, head_rows),
        "gate_proj.weight": ShardRule(0, head_rows),
        "sinks": ShardRule(0, head_rows),
    },
    GatedDeltaNet: {
        "in_proj.weight": ShardRule(0, delta_input_rows),
        "conv1d.weight": ShardRule(0, delta_channel_rows),
        "decay.A_log": ShardRule(0, head_rows),
        "decay.dt_bias": ShardRule(0, head_rows),
        "out_proj.weight": ShardRule(1, head_rows),
    },
    GatedMLP: {
        "gate_up_proj.weight": ShardRule(0, gate_up_rows),
        "gate_up_proj.bias": ShardRule(0, gate_up_rows),
        "down_proj.weight": ShardRule(1, unit_rows),
    },
    ShortConv: {
        "in_proj.weight": ShardRule(0, equal(share_units, 3)),
        "in_proj.bias": ShardRule(0, equal(share_units, 3)),
        "conv.weight": ShardRule(0, unit_rows),
        "conv.bias": ShardRule(0, unit_rows),
        "out_proj.weight": ShardRule(1, unit_rows),
    },
    Experts: {
        "gate_up_proj": ShardRule(1, expert_gate_up_rows),
        "gate_up_proj_bias": ShardRule(1, expert_gate_up_rows),
        "down_proj": ShardRule(2, unit_rows),
    },
    Embedding: {"weight": ShardRule(0, vocabulary_rows)},
    LMHead: {"weight": ShardRule(0, vocabulary_rows), "bias": ShardRule(0, vocabulary_rows)},
}
# Of experts with transposed matrices
TRANSPOSED_EXPERTS = {
    "gate_up_proj": ShardRule(2, expert_gate_up_rows),
    "down_proj": ShardRule(1, unit_rows),
}
# Norms over all heads
FLAT_QK_NORM = {"q_norm.weight": ShardRule(0, head_rows), "k_norm.weight": ShardRule(0, key_rows)}


def shard_specs(
    model: CausalLM, ranks: Ranks, excluded: Container[nn.Module]
) -> Iterator[tuple[str, ShardSpec]]:
    """Yields each parameter's spec, by `PLAN` or replicated, as in all `excluded` modules."""
    rules_of: dict[str, tuple[nn.Module, ShardRule]] = {}
    for path, module in model.named_modules():
        if module in excluded:
            continue
        rules = dict(next((PLAN[kind] for kind in PLAN if isinstance(module, kind)), {}))
        if isinstance(module, LMHead) and model.config.labels:  # a row for each score
            rules = {}
        if isinstance(module, Embedding | LMHead) and rules and module.copies is not None:
            rules |= {f"copies.{name}": rules["weight"] for name in module.copies._parameters}
        if isinstance(module, Attention) and module.flat_qk_norm:
            rules |= FLAT_QK_NORM
        if isinstance(module, Experts) and module.transposed:
            rules |= TRANSPOSED_EXPERTS
        for name, rule in rules.items():
            rules_of[f"{path}.{name}"] = module, rule
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in model.shard_specs:
            yield name, model.shard_specs[name]
            continue
        if name not in rules_of:
            every = (RowSpan(0, 0, shape[0]), ReplicaIndex(ranks.rank, ranks.size))
            yield name, ShardSpec(shape, 0, (every,))
            continue
        module, rule = rules_of[name]
        yield name, ShardSpec(shape, rule.dim, rule.pieces(module, shape[rule.dim], ranks))


# Adapters, which are added before, are sharded like their weights: B and DoRA's magnitudes by rows
# if the weight is column-wise parallel, A by columns if it is row-wise parallel, and an embedding's
# A by vocabulary. The rest is replicated, with partial gradients. Norms of rows that are sharded
# over ranks take a sum over the ranks.

COLUMNS_PER_DRAW = 4  # columns of a dropout mask that share 64 random bits


def check_adapter_dropout(
    model: CausalLM, specs_of_ranks: Iterable[Mapping[str, ShardSpec]]
) -> None:
    """Raises ValueError for adapters whose dropout masks would differ from those of one process;
    `specs_of_ranks`: each rank's shards of the weights."""
    for specs in specs_of_ranks:
        for at, low, (weight, *_) in _adapters(model, specs):
            if not isinstance(low, LowRank) or not (low.dropout and _is_row_wise(weight)):
                continue
            if (first := weight.pieces[0][0].source) % COLUMNS_PER_DRAW:
                raise ValueError(
                    f"dropout={low.dropout} does not work where a rank's columns begin at {first} "
                    f"({at}), which is not a multiple of {COLUMNS_PER_DRAW}: give 0, or another "
                    "number of ranks"
                )


def adapter_specs(
    model: CausalLM, specs: Mapping[str, ShardSpec]
) -> Iterator[tuple[str, ShardSpec]]:
    """Yields name and spec of sharded adapter parameters; `specs`: those of the weights."""
    for at, low, weights in _adapters(model, specs):
        for part, weight in zip(low.parts, weights, strict=True):
            if isinstance(low, LowRankEmbedding):
                names, dim, pieces = ["lora_embedding_A"], 1, weight.pieces
            elif _is_row_wise(weight):
                one = isinstance(low, LowRank)  # A, which all parts share
                names, dim, pieces = ["lora_A" if one else LORA_A + part.name], 1, weight.pieces
            else:
                names, dim, pieces = [LORA_B + part.name], 0, _pieces_of_part(weight, part)
                names += [MAGNITUDE + part.name] * low.dora
            for name in names:
                yield f"{at}.{name}", ShardSpec(tuple(low.get_parameter(name).shape), dim, pieces)


def set_local_adapters(model: CausalLM, specs: Mapping[str, ShardSpec], ranks: Ranks) -> None:
    """Sets the local rows of adapters, the ranks that sum norms, and where dropout masks begin."""
    for _, low, weights in _adapters(model, specs):
        if isinstance(low, LowRankEmbedding):
            low.token_ranks = ranks
            continue
        low.parts = tuple(map(_local_lora_part, low.parts, weights))
        weight = weights[0]
        if not isinstance(low, LowRank) or not _is_row_wise(weight):
            continue
        low.column_ranks = ranks
        if low.dropout:
            # Local column c uses the random bits of column first + c
            seed = low.seed + weight.pieces[0][0].source // COLUMNS_PER_DRAW * GOLDEN
            low.seed = as_int64(seed & WORD)


def _adapters(
    model: CausalLM, specs: Mapping[str, ShardSpec]
) -> Iterator[tuple[str, LowRank | LowRankEmbedding | LowRankExperts, Sequence[ShardSpec]]]:
    """Yields each adapter with its path, and the shard of the weight for each of its parts."""
    for path, low in model.named_modules():
        if isinstance(low, LowRank | LowRankEmbedding | LowRankExperts):
            layer = path.rpartition(".lora.")[0]
            experts = isinstance(low, LowRankExperts)
            if experts and model.get_submodule(layer).shard is not None:  # its experts are whole
                continue
            names = [part.name if experts else "weight" for part in low.parts]
            if model.ties_head and layer == "lm_head":
                layer = "model.embed_tokens"
            weights = [specs[f"{layer}.{name}"] for name in names]
            if experts and model.get_submodule(layer).transposed:
                weights = [_transposed(weight) for weight in weights]
            yield path, low, weights


def _transposed(weight: ShardSpec) -> ShardSpec:
    """The shard of a stack of matrices as if these were stored the other way round."""
    count, rows, columns = weight.shape
    return replace(weight, shape=(count, columns, rows), dim=3 - weight.dim)


def _is_row_wise(weight: ShardSpec) -> bool:
    """Whether a weight is sharded in its last dimension, its input."""
    return weight.dim == len(weight.shape) - 1


def _pieces_of_part(weight: ShardSpec, part: LoRAPart) -> Pieces:
    """The pieces of the weight's rows that belong to the part, counted from its first row."""
    pieces = []
    for rows, replica in weight.pieces:
        begin = max(rows.source, part.first)
        end = min(rows.source + rows.length, part.first + part.size)
        if begin < end:
            span = RowSpan(begin, rows.target + begin - rows.source, end - begin)
            pieces.append((span, replica))
    start = min(rows.target for rows, _ in pieces)
    return tuple((RowSpan(s - part.first, t - start, n), replica) for (s, t, n), replica in pieces)


def _local_lora_part(part: LoRAPart, weight: ShardSpec) -> LoRAPart:
    """Returns an adapter's part with `first` and `size` of this rank's output."""
    if _is_row_wise(weight):
        return part
    pieces = _pieces_of_part(weight, part)
    # The position of the first of them in the local weight
    source = part.first + pieces[0][0].source
    (first,) = (
        rows.target + source - rows.source
        for rows, _ in weight.pieces
        if rows.source <= source < rows.source + rows.length
    )
    return part._replace(first=first, size=sum(rows.length for rows, _ in pieces))
