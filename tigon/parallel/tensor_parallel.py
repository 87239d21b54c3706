"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism between blocks (Korthikanti
et al., 2022): which rows of each parameter a rank has, as data.

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
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.distributed.collectives import Ranks
from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.kernels.mlp.clamped_swiglu import ClampedSwiGLU
from tigon.layers import (
    Attention,
    Embedding,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LatentAttention,
    Linear,
    LMHead,
    LoRAPart,
    LowRank,
    LowRankEmbedding,
    LowRankExperts,
    ShortConv,
    SoftmaxAttention,
    SparseMoE,
)
from tigon.layers.lora import LORA_B, MAGNITUDE
from tigon.layers.mlp import TopKMLP
from tigon.models import CausalLM
from tigon.models.decoder import PreNormBlock
from tigon.parallel.context_parallel import share_context
from tigon.parallel.expert_parallel import shard_experts
from tigon.parallel.mesh import MeshSizes, as_ranks
from tigon.parallel.tensor_modules import (
    ColumnParallelGatedLinear,
    ColumnParallelLinear,
    DispatchedExperts,
    DispatchedMoE,
    FlatParallelNorm,
    ReplicatedLinear,
    RowParallelLinear,
    TensorParallelDecoder,
    TensorParallelExperts,
    TensorParallelLatentAttention,
    TensorParallelMoE,
    TensorParallelNorm,
    TensorPass,
)
from tigon.utils.random import GOLDEN, WORD, as_int64
from tigon.weights import ReplicaIndex, RowSpan, ShardSpec, local_blocks, local_rows


def keep_rank_zero(model: CausalLM, sizes: MeshSizes) -> None:
    """Keeps rank 0's shard of a model on the meta device, without process groups, before FSDP.

    Collectives return meta tensors of the right size, and experts get equally many tokens. Raises
    ValueError for a model that the sizes do not divide.
    """
    if sizes.expert > 1:
        shard_experts(model, Ranks("", 0, sizes.expert))
    if sizes.tensor > 1:
        shard_model(model, Ranks("", 0, sizes.tensor))
    if sizes.context > 1:
        share_context(model, Ranks("", 0, sizes.context))


# Gradients of replicated parameters (norms, routers, kv heads) are partial on each rank, and are
# summed once a step


class TensorParallel:
    """The tensor ranks of a sharded model, and the groups of ranks with equal rows, by size."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        counts_of = {
            name: {part.replica.total for part in parts if part.replica} - {1}
            for name, parts in self.layout.items()
        }
        # Parameters with rows that several ranks have
        self.replicated = {name for name, counts in counts_of.items() if counts}
        counts: set[int] = set().union(*counts_of.values())
        self.members: list[int] = mesh.mesh.tolist()  # global ranks
        self.replica_groups = {self.ranks.size: self.ranks}
        for count in sorted(counts - {self.ranks.size}):
            self.replica_groups[count] = self._neighbor_group(count)

    def _neighbor_group(self, count: int) -> Ranks:
        """Returns a new group: the block of `count` consecutive ranks that this rank is in."""
        first = self.ranks.rank // count * count
        members = self.members[first : first + count]
        group = dist.new_group(members, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks.of(group)

    def use_separate_group(self) -> None:
        """All-reduces gradients in a separate process group, so that they do not queue with the
        collectives of backward. Every rank calls this."""
        self.replica_groups[self.ranks.size] = self._neighbor_group(self.ranks.size)

    def sum_gradients(self, model: nn.Module) -> None:
        """All-reduces partial gradients, once a step after its last backward pass and before
        clipping. Every rank calls this."""
        self.all_reduce_grads(model.named_parameters())

    @torch.no_grad()
    def all_reduce_grads(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Sums partial gradients over the ranks with the same rows, in float32 and in place.

        `named` are name and parameter of the same parameters on all ranks; others stay as they are.
        """
        blocks: dict[int, list[Tensor]] = {count: [] for count in self.replica_groups}
        for name, p, gradient in _gradients(named):
            if name in self.replicated:
                for replica, block in self._blocks(name, p, gradient):
                    if replica.total > 1:
                        blocks[replica.total].append(block)
        for count, ranks in self.replica_groups.items():
            if group := blocks[count]:
                # In float32, so that a sum of bfloat16 is rounded once
                total = ranks.sum(torch.cat([block.flatten() for block in group]).float())
                sums = total.split([block.numel() for block in group])
                sums = [x.view_as(block) for block, x in zip(group, sums, strict=True)]
                torch._foreach_copy_(group, sums)

    def unique_gradients(
        self, named: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (parameter, gradient) so that over all ranks each gradient occurs once: rows that
        an earlier rank has too are left out. A parameter may occur several times."""
        for name, p, gradient in _gradients(named):
            if name in self.replicated:
                for replica, block in self._blocks(name, p, gradient):
                    if not replica.number:
                        yield p, block
            elif gradient.numel():
                yield p, gradient

    def _blocks(
        self, name: str, p: Tensor, gradient: Tensor
    ) -> Iterator[tuple[ReplicaIndex, Tensor]]:
        """Yields a gradient's blocks, each with its place among the ranks that hold it too."""
        _, first = local_rows(name, p)
        for part in self.layout[name]:
            for _, block in local_blocks(part, p.shape, gradient, first):
                yield part.replica or ReplicaIndex(), block


def _gradients(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields name, parameter and local gradient of each parameter that has a gradient."""
    for name, p in named:
        if p.grad is not None:
            yield name, p, p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


# Adapters, which are added before, are sharded like their weights: B and DoRA's magnitudes by rows
# if the weight is column-wise parallel, A by columns if it is row-wise parallel, and an embedding's
# A by vocabulary. The rest is replicated, with partial gradients. Norms of rows that are sharded
# over ranks take a sum over the ranks.

Pieces = tuple[tuple[RowSpan, ReplicaIndex], ...]
COLUMNS_PER_DRAW = 4  # columns of a dropout mask that share 64 random bits


def check_adapter_dropout(
    model: CausalLM, specs_of_ranks: Iterable[Mapping[str, ShardSpec]]
) -> None:
    """Raises ValueError for adapters whose dropout masks would differ from those of one process;
    `specs_of_ranks`: each rank's shards of the weights."""
    for specs in specs_of_ranks:
        for at, low, (weight, *_) in _adapters(model, specs):
            first = weight.pieces[0][0].source
            if (
                isinstance(low, LowRank)
                and low.dropout
                and _is_row_wise(weight)
                and first % COLUMNS_PER_DRAW
            ):
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
                names, dim, pieces = [low.name_of_a(part)], 1, weight.pieces
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
    """Returns an adapter's part with `first` and `size` of this rank's output.

    A row-wise parallel layer has the whole output on each rank.
    """
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


# Rules: for each parameter, its dimension and the rows of a rank

# Outputs are sharded at multiples of 16 if every rank then gets some: loads are aligned, as fp8
# GEMMs need
UNIT = 16


class ShardRule(NamedTuple):
    """The dimension in which a parameter is sharded, and the rows of each rank."""

    dim: int
    pieces: Callable[[nn.Module, int, Ranks], Pieces]  # (module, size, ranks) -> this rank's rows


def query_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows [H, D] of query heads."""
    return (_head_rows(0, size, 0, ranks),)


def key_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows [K, D] of kv heads; a head that several ranks need is replicated."""
    assert isinstance(module, Attention)
    kv_heads = size // module.head_dim
    return (_kv_head_rows(0, kv_heads, module.head_dim, 0, ranks),)


def qkv_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows [(H + K + K), D] of packed q, k and v, behind those of gates of q."""
    assert isinstance(module, Attention)
    d = module.head_dim
    q, *others = module.qkv_proj.parts  # none, keys, or keys and values
    sections = (q // 2, q // 2) if module.gate == "q_proj" else (q,)
    pieces, begin, target = [*_section_rows(sections, ranks)], q, q // ranks.size
    for size in others:
        pieces.append(_kv_head_rows(begin, size // d, d, target, ranks))
        begin, target = begin + size, target + pieces[-1][0].length
    return tuple(pieces)


def gate_up_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows of packed gate and up: the same units of both."""
    return _packed_rows(2, size, ranks)


def conv_input_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows of both gates and the input of a short convolution: the same channels."""
    return _packed_rows(3, size, ranks)


def _packed_rows(parts: int, size: int, ranks: Ranks) -> Pieces:
    """This rank's share, by `rank_bounds`, of each of several parts of one size."""
    pieces, each, target = [], size // parts, 0
    for begin in range(0, size, each):
        pieces.append(_local_rows(begin, each, target, ranks))
        target += pieces[-1][0].length
    return tuple(pieces)


def delta_input_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows of packed q, k, v, z, b and a: the same heads of each."""
    assert isinstance(module, GatedDeltaNet)
    h = module.value_heads
    return _section_rows((*_delta_channels(module), h * module.value_dim, h, h), ranks)


def delta_channel_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's channels of the convolution of q, k and v."""
    assert isinstance(module, GatedDeltaNet)
    return _section_rows(_delta_channels(module), ranks)


def _delta_channels(module: GatedDeltaNet) -> tuple[int, int, int]:
    """The rows of q, k and v."""
    keys = module.key_heads * module.key_dim
    return keys, keys, module.value_heads * module.value_dim


def _section_rows(sizes: Iterable[int], ranks: Ranks) -> Pieces:
    """This rank's share of each of several runs of rows, whose sizes the ranks divide."""
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(_head_rows(begin, size, begin // ranks.size, ranks))
        begin += size
    return tuple(pieces)


def expert_gate_up_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """As `gate_up_rows`, of experts, where gates and ups may alternate."""
    assert isinstance(module, Experts)
    if not isinstance(module.act, ClampedSwiGLU):
        return gate_up_rows(module, size, ranks)
    ((first, _, length), replica) = _local_rows(0, size // 2, 0, ranks)
    return ((RowSpan(2 * first, 0, 2 * length), replica),)


def unit_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's share of units, one run of rows by `rank_bounds`."""
    return (_local_rows(0, size, 0, ranks),)


def vocabulary_rows(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """This rank's rows of the vocabulary: equally many on each rank, but fewer on the last."""
    share = -(-size // ranks.size)
    first = ranks.rank * share
    return ((RowSpan(first, 0, min(share, size - first)), ReplicaIndex()),)


# For each kind of module, the parameters that are sharded, by name
PLAN: Mapping[type[nn.Module], Mapping[str, ShardRule]] = {
    LatentAttention: {
        "q_proj.weight": ShardRule(0, query_rows),
        "q_b_proj.weight": ShardRule(0, query_rows),
        "kv_b_proj.weight": ShardRule(0, query_rows),  # keys and values of a head in a row
        "o_proj.weight": ShardRule(1, query_rows),
    },
    Attention: {
        "qkv_proj.weight": ShardRule(0, qkv_rows),
        "qkv_proj.bias": ShardRule(0, qkv_rows),
        "o_proj.weight": ShardRule(1, query_rows),
        "gate_proj.weight": ShardRule(0, query_rows),
        "sinks": ShardRule(0, query_rows),
    },
    GatedDeltaNet: {
        "in_proj.weight": ShardRule(0, delta_input_rows),
        "conv1d.weight": ShardRule(0, delta_channel_rows),
        "decay.A_log": ShardRule(0, query_rows),
        "decay.dt_bias": ShardRule(0, query_rows),
        "out_proj.weight": ShardRule(1, query_rows),
    },
    GatedMLP: {
        "gate_up_proj.weight": ShardRule(0, gate_up_rows),
        "gate_up_proj.bias": ShardRule(0, gate_up_rows),
        "down_proj.weight": ShardRule(1, unit_rows),
    },
    ShortConv: {
        "in_proj.weight": ShardRule(0, conv_input_rows),
        "in_proj.bias": ShardRule(0, conv_input_rows),
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
FLAT_QK_NORM = {"q_norm.weight": ShardRule(0, query_rows), "k_norm.weight": ShardRule(0, key_rows)}


def rank_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """The R + 1 bounds of the ranks' shares of `size`, multiples of 16 if it is at least 16 R.

    The last one is `size` itself.
    """
    unit = UNIT if size >= UNIT * ranks else 1
    return *(size // unit * r // ranks * unit for r in range(ranks)), size


def _local_rows(begin: int, size: int, target: int, ranks: Ranks) -> tuple[RowSpan, ReplicaIndex]:
    """This rank's share of `size` rows from `begin` on."""
    at = rank_bounds(size, ranks.size)
    first, end = at[ranks.rank], at[ranks.rank + 1]
    return RowSpan(begin + first, target, end - first), ReplicaIndex()


def _head_rows(begin: int, size: int, target: int, ranks: Ranks) -> tuple[RowSpan, ReplicaIndex]:
    """As `_local_rows`, for a size that the ranks divide."""
    share = size // ranks.size
    return RowSpan(begin + ranks.rank * share, target, share), ReplicaIndex()


def _kv_head_rows(
    begin: int, count: int, dim: int, target: int, ranks: Ranks
) -> tuple[RowSpan, ReplicaIndex]:
    """The kv heads that the rank's queries read, of `count` heads from row `begin` on."""
    if count >= ranks.size:
        share = count // ranks.size
        return RowSpan(begin + ranks.rank * share * dim, target, share * dim), ReplicaIndex()
    copies = ranks.size // count
    head, number = divmod(ranks.rank, copies)
    return RowSpan(begin + head * dim, target, dim), ReplicaIndex(number, copies)


def shard_model(model: CausalLM, mesh: DeviceMesh | Ranks) -> None:
    """Keeps only this rank's shard of each layer; on the meta device, before the weights are read.

    With expert parallelism call `shard_experts` first: experts that are already distributed stay as
    they are. With `Ranks` there are no process groups for gradients. Raises ValueError for a model
    that cannot be sharded over so many ranks.
    """
    ranks = as_ranks(mesh)
    check_tensor_ranks(model, ranks.size)
    tied, before = model.ties_head, set(model.shard_specs)
    excluded = _expert_parallel_modules(model)
    specs = dict(_shard_specs(model, ranks, excluded))
    specs |= adapter_specs(model, specs)
    model.shard_specs = {
        name: spec for name, spec in specs.items() if not (tied and name == "lm_head.weight")
    }
    for name, spec in model.shard_specs.items():
        if name in before:
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        whole: Tensor = module.get_parameter(leaf)
        if len(spec.pieces) > 1 or spec.length != whole.shape[spec.dim]:
            setattr(module, leaf, nn.Parameter(spec.take(whole.detach()), whole.requires_grad))
    set_local_adapters(model, specs, ranks)
    size = model.config.vocab_size
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            _set_local_heads(module, ranks)
        elif isinstance(module, GatedDeltaNet):
            module.key_heads //= ranks.size
            module.value_heads //= ranks.size
        elif isinstance(module, LMHead) and model.config.labels:
            module.scorers = ranks
        elif isinstance(module, Embedding | LMHead):
            rows = module.num_embeddings if isinstance(module, Embedding) else size
            module.vocabulary = _vocabulary_shard(rows, module, ranks)
    if tied:
        model.lm_head.weight = cast(nn.Parameter, model.model.embed_tokens.weight)
    model.tensor_ranks = ranks
    install_modules(model, TensorPass(ranks))
    model.model.set_state_kinds()
    if isinstance(mesh, DeviceMesh):
        model.tensor_parallel = TensorParallel(model, mesh)


def _vocabulary_shard(size: int, module: nn.Module, ranks: Ranks) -> VocabularyShard:
    """Which of the `size` rows of an embedding or head this rank has."""
    ((rows, _),) = vocabulary_rows(module, size, ranks)
    return VocabularyShard.build(ranks.group, ranks.size, rows.source, rows.length, size)


def install_modules(model: CausalLM, tensor: TensorPass) -> None:
    """Puts the modules of `tensor_modules` in place of the model's; parameters and hooks stay."""
    _install(model.model, TensorParallelDecoder, tensor=tensor)
    moes = [module for module in model.modules() if isinstance(module, SparseMoE)]
    inside = {module for moe in moes for module in moe.modules()}
    for moe in moes:
        _install(moe, DispatchedMoE if moe.divided else TensorParallelMoE, tensor=tensor)
        experts = DispatchedExperts if moe.divided else TensorParallelExperts
        _install(moe.experts, experts, tensor=tensor)
    for block in model.model.layers:
        for module in block.modules():
            if isinstance(module, LatentAttention):
                _install(module, TensorParallelLatentAttention, tensor=tensor)
                _install(module.o_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, Attention):
                for projection in filter(None, (module.qkv_proj, module.gate_proj)):
                    _install(projection, ColumnParallelLinear, tensor=tensor)
                _install(module.o_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, GatedDeltaNet | ShortConv):
                _install(module.in_proj, ColumnParallelLinear, tensor=tensor)
                _install(module.out_proj, RowParallelLinear, tensor=tensor)
            elif isinstance(module, GatedMLP) and module not in inside:  # a shared expert's
                _install(module.gate_up_proj, ColumnParallelGatedLinear, tensor=tensor)
                _install(module.down_proj, RowParallelLinear, tensor=tensor)
        if isinstance(block, PreNormBlock):
            tensor.norms += [block.input_layernorm, block.post_attention_layernorm]
    tensor.norms.append(model.model.norm)
    for place, norm in enumerate(tensor.norms):
        _install(norm, TensorParallelNorm, tensor=tensor, place=place)
    for path, module in model.named_modules():
        if type(module) is Linear and module not in inside and _is_whole(model, f"{path}.weight"):
            _install(module, ReplicatedLinear, tensor=tensor)


def _is_whole(model: CausalLM, name: str) -> bool:
    """Whether this rank has all of a parameter."""
    spec = model.shard_specs.get(name)
    return spec is not None and len(spec.pieces) == 1 and spec.length == spec.shape[spec.dim]


def _install(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    """Change the module's class to `kind` and set the attributes on it; of a class that `kind` does
    not know, to a subclass of both."""
    own = type(module)
    module.__class__ = kind if issubclass(kind, own) else type(kind.__name__, (kind, own), {})
    for name, value in attributes.items():
        setattr(module, name, value)


def check_tensor_ranks(model: CausalLM, ranks: int) -> None:
    """Raises ValueError for a model that cannot be sharded over this number of ranks."""
    sizes = [model.config.vocab_size]
    sizes += [m.num_embeddings for m in model.model.modules() if isinstance(m, Embedding)]
    for size in sizes:
        if (ranks - 1) * -(-size // ranks) >= size:
            raise ValueError(f"{ranks} ranks cannot share a vocabulary of {size} tokens")
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            raise ValueError("tensor parallelism does not work with quantized weights")
        if isinstance(module, TopKMLP):
            raise ValueError(
                f"{ranks} ranks cannot share an MLP with activation_sparsity_pattern: its cutoff "
                "needs the gates of all ranks; give parallel.tensor=1"
            )
        if isinstance(module, SoftmaxAttention):
            q, kv = module.heads, module.kv_heads
            if q % ranks or (kv % ranks and ranks % kv):
                raise ValueError(
                    f"{ranks} ranks cannot share {q} heads with {kv} kv heads: the number of ranks "
                    "(parallel.tensor, --tp, mesh) must divide the heads, and divide the kv heads "
                    "or be a multiple of them"
                )
        if isinstance(module, GatedDeltaNet) and module.key_heads % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share the {module.key_heads} key heads of Gated DeltaNet "
                "(linear_num_key_heads): the number of ranks (parallel.tensor, --tp, mesh) must "
                "divide them"
            )
    if any(config.dropout for config in model.adapters.values()):
        excluded = _expert_parallel_modules(model)
        every_rank = (Ranks("", rank, ranks) for rank in range(ranks))
        check_adapter_dropout(model, (dict(_shard_specs(model, r, excluded)) for r in every_rank))


def _expert_parallel_modules(model: CausalLM) -> set[nn.Module]:
    """MoE layers whose experts are distributed whole, and their submodules."""
    moes = [m for m in model.modules() if isinstance(m, SparseMoE) and m.divided]
    return {inner for moe in moes for inner in moe.modules()}


def _shard_specs(
    model: CausalLM, ranks: Ranks, excluded: Container[nn.Module]
) -> Iterator[tuple[str, ShardSpec]]:
    """Yields name and spec of every parameter: what it has already, or by `PLAN`, or replicated.

    `excluded`: modules to which no rule applies.
    """
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


def _set_local_heads(module: SoftmaxAttention, ranks: Ranks) -> None:
    """Sets the numbers of local heads, and makes norms over all heads take the ranks' mean."""
    if isinstance(module, Attention) and module.flat_qk_norm:
        copies = max(1, ranks.size // module.kv_heads)
        for norm, heads in (module.q_norm, module.heads), (module.k_norm, module.kv_heads * copies):
            assert norm is not None
            _install(norm, FlatParallelNorm, ranks=ranks, elements=heads * module.head_dim)
    module.heads //= ranks.size
    module.kv_heads = max(1, module.kv_heads // ranks.size)
