"""One rank's part of a model, without process groups."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tigon.distributed.collectives import Ranks
from tigon.kernels.loss.vocab_parallel import VocabularyShard
from tigon.layers import (
    Attention,
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    LMHead,
    LoRAPart,
    LowRank,
    LowRankEmbedding,
    LowRankExperts,
    SparseMoE,
)
from tigon.layers.lora import MAGNITUDE, B
from tigon.models import CausalLM
from tigon.parallel.context_parallel import check_context
from tigon.parallel.expert_parallel import divide_experts
from tigon.parallel.mesh import MeshSizes
from tigon.utils.random import GOLDEN, WORD, as_int64
from tigon.weights import Copy, Cut, Rows, own_rows, own_slices


def take_part(model: CausalLM, sizes: MeshSizes) -> None:
    """Reduce a model on the meta device to the part of rank 0, before FSDP. Collectives return meta
    tensors of the right size; experts get equally many tokens.

    ValueError for a model that the sizes do not divide.
    """
    if sizes.expert > 1:
        divide_experts(model, Ranks("", 0, sizes.expert))
    if sizes.tensor > 1:
        cut_parts(model, Ranks("", 0, sizes.tensor))
    if sizes.context > 1:
        check_context(model, sizes.context)
        model.context = Ranks("", 0, sizes.context)


# Gradients of parameters that tensor parallelism replicates: norms, routers, kv heads.
#
# Each rank has a partial gradient, that of its tokens or heads; they are summed once a step.


class TensorParallel:
    """The tensor ranks of a split model, and its groups of replicas, by their size."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh) -> None:
        self.ranks = Ranks.of(mesh.get_group())
        self.layout = model.layout(stacked_experts=True)
        of = {n: {p.copy.of for p in parts if p.copy} - {1} for n, parts in self.layout.items()}
        self.copied = {
            name for name, counts in of.items() if counts
        }  # wholly, or some of their rows
        counts: set[int] = set().union(*of.values())
        self.members: list[int] = mesh.mesh.tolist()  # global ranks
        self.alike = {self.ranks.size: self.ranks}
        for count in sorted(counts - {self.ranks.size}):
            self.alike[count] = self._neighbours(count)

    def _neighbours(self, count: int) -> Ranks:
        first = self.ranks.rank // count * count
        of = self.members[first : first + count]
        group = dist.new_group(of, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks.of(group)

    def sum_apart(self) -> None:
        """Sum gradients in a process group of their own, for a model that sums in backward: its
        collectives then do not queue behind those of the pass, nor delay them. Every rank calls
        this."""
        self.alike[self.ranks.size] = self._neighbours(self.ranks.size)

    def sum_gradients(self, model: nn.Module) -> None:
        """Once a step, after its last backward pass, before clipping and the optimizer.

        Every rank calls this.
        """
        self.sum_some(model.named_parameters())

    @torch.no_grad()
    def sum_some(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """`sum_gradients` of some parameters, the same ones on all ranks."""
        blocks: dict[int, list[Tensor]] = {count: [] for count in self.alike}
        for name, p, gradient in _gradients(named):
            if name in self.copied:
                for copy, block in self._blocks(name, p, gradient):
                    if copy.of > 1:
                        blocks[copy.of].append(block)
        for count, ranks in self.alike.items():
            if found := blocks[count]:
                # In float32, so that a sum of bfloat16 is rounded once
                total = ranks.sum(torch.cat([block.flatten() for block in found]).float())
                each = total.split([block.numel() for block in found])
                torch._foreach_copy_(
                    found, [x.view_as(b) for b, x in zip(found, each, strict=True)]
                )

    def counted(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's gradients, without those that an earlier rank has too, so that a norm over
        all ranks counts each once; paired with their parameter, which may have several."""
        for name, p, gradient in _gradients(named):
            if name in self.copied:
                for copy, block in self._blocks(name, p, gradient):
                    if not copy.number:
                        yield p, block
            elif gradient.numel():
                yield p, gradient

    def _blocks(self, name: str, p: Tensor, gradient: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        _, first = own_rows(name, p)
        for part in self.layout[name]:
            for _, block in own_slices(part, p.shape, gradient, first):
                yield part.copy or Copy(), block


def _gradients(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, parameter and local gradient of each parameter that has one."""
    for name, p in named:
        if p.grad is not None:
            yield name, p, p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


def find_tensor(model: nn.Module) -> TensorParallel | None:
    return vars(model).get("_tensor")


def set_tensor(model: CausalLM, mesh: DeviceMesh) -> None:
    vars(model)["_tensor"] = TensorParallel(model, mesh)


# Tensor parallelism of low-rank adapters, which are added before the model is split.
#
# An adapter is split like its weight: B and DoRA's magnitudes by rows if the weight is
# column-wise parallel (split by its outputs), A by columns if it is row-wise parallel (split by
# its inputs), and an embedding's A by vocabulary. The rest is replicated, with partial gradients.
# Norms of rows that are split over ranks take a sum over the ranks.

Pieces = tuple[tuple[Rows, Copy], ...]
DRAWN = 4  # columns of a dropout mask that share 64 random bits


def check_dropout(model: CausalLM, cuts_of: Iterable[Mapping[str, Cut]]) -> None:
    """Raises ValueError for adapters whose dropout masks would differ from those of one process;
    `cuts_of`: for each rank, how the weights are split."""
    for cuts in cuts_of:
        for at, low, (weight, *_) in _adapters(model, cuts):
            first = weight.pieces[0][0].source
            if isinstance(low, LowRank) and low.dropout and _by_inputs(weight) and first % DRAWN:
                raise ValueError(
                    f"dropout={low.dropout} does not work where a rank's columns begin at {first} "
                    f"({at}), which {DRAWN} does not divide: give 0, or another number of ranks"
                )


def adapter_cuts(model: CausalLM, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
    """The cuts of adapter parameters that are split; `cuts` are those of the weights."""
    for at, low, weights in _adapters(model, cuts):
        for part, weight in zip(low.parts, weights, strict=True):
            if isinstance(low, LowRankEmbedding):
                names, dim, pieces = ["lora_embedding_A"], 1, weight.pieces
            elif _by_inputs(weight):
                names, dim, pieces = [low.name_of_a(part)], 1, weight.pieces
            else:
                names, dim, pieces = [B + part.name], 0, _within(weight, part)
                names += [MAGNITUDE + part.name] * low.dora
            for name in names:
                yield f"{at}.{name}", Cut(tuple(low.get_parameter(name).shape), dim, pieces)


def share_adapters(model: CausalLM, cuts: Mapping[str, Cut], ranks: Ranks) -> None:
    """Tell adapters which columns of their parts are local, and where dropout masks begin."""
    for _, low, weights in _adapters(model, cuts):
        if isinstance(low, LowRankEmbedding):
            low.token_ranks = ranks
            continue
        low.parts = tuple(map(_local_lora_part, low.parts, weights))
        weight = weights[0]
        if not isinstance(low, LowRank) or not _by_inputs(weight):
            continue
        low.column_ranks = ranks
        if low.dropout:
            # Column c of the rank has the draws of column first + c
            seed = low.seed + weight.pieces[0][0].source // DRAWN * GOLDEN
            low.seed = as_int64(seed & WORD)


def _adapters(
    model: CausalLM, cuts: Mapping[str, Cut]
) -> Iterator[tuple[str, LowRank | LowRankEmbedding | LowRankExperts, Sequence[Cut]]]:
    """Each adapter with its path, and how the weight of each of its parts is split."""
    for path, low in model.named_modules():
        if isinstance(low, LowRank | LowRankEmbedding | LowRankExperts):
            layer = path.rpartition(".lora.")[0]
            experts = isinstance(low, LowRankExperts)
            if experts and model.get_submodule(layer).shard is not None:  # whole experts' own
                continue
            names = [part.name if experts else "weight" for part in low.parts]
            if model.ties_head and layer == "lm_head":
                layer = "model.embed_tokens"
            yield path, low, [cuts[f"{layer}.{name}"] for name in names]


def _by_inputs(weight: Cut) -> bool:
    return weight.dim == len(weight.shape) - 1


def _within(weight: Cut, part: LoRAPart) -> Pieces:
    """The pieces of the weight's rows that belong to the part, counted from its first row."""
    found = []
    for rows, copy in weight.pieces:
        begin = max(rows.source, part.first)
        end = min(rows.source + rows.length, part.first + part.size)
        if begin < end:
            found.append((Rows(begin, rows.target + begin - rows.source, end - begin), copy))
    start = min(rows.target for rows, _ in found)
    return tuple((Rows(s - part.first, t - start, n), copy) for (s, t, n), copy in found)


def _local_lora_part(part: LoRAPart, weight: Cut) -> LoRAPart:
    if _by_inputs(weight):
        return part
    pieces = _within(weight, part)
    # The position of the first of them in the local weight
    source = part.first + pieces[0][0].source
    (first,) = (
        rows.target + source - rows.source
        for rows, _ in weight.pieces
        if rows.source <= source < rows.source + rows.length
    )
    return part._replace(first=first, size=sum(rows.length for rows, _ in pieces))


# Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism between blocks (Korthikanti
# et al., 2022): how each parameter is split, as data.
#
# Projections into a block are column-wise parallel: split by their outputs, which are heads, or
# units of the MLP and of each expert. Those out of it are row-wise parallel: split by their
# inputs, with partial sums of the block's output on each rank. Embedding and head are split by
# vocabulary. All else is replicated, also the MoE layer itself if ranks have whole experts: it
# computes with the rank's own tokens. Packed projections are split part by part, [q; k; v] to
# [q_r; k_r; v_r], which no DTensor placement expresses: parameters are plain local ones, which
# the model's layout describes, and which fully_shard shards further.

# Outputs are split at multiples of it if each rank then gets some: loads are aligned, and fp8 GEMMs
# need it
UNIT = 16


class How(NamedTuple):
    """The dimension that a parameter is split in, and which of its rows a rank has."""

    dim: int
    pieces: Callable[[nn.Module, int, Ranks], Pieces]  # of the module, the size and the rank


def queries(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Rows [H, D] of heads."""
    return (_heads(0, size, 0, ranks),)


def keys(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Rows [K, D] of kv heads; a head that several ranks need is replicated on them."""
    assert isinstance(module, Attention)
    kv_heads = size // module.head_dim
    return (_kv(0, kv_heads, module.head_dim, 0, ranks),)


def heads(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Rows [(H + K + K), D] of packed q, k and v."""
    assert isinstance(module, Attention)
    d = module.head_dim
    q, k, _ = module.qkv_proj.parts
    own = q // ranks.size
    first = _kv(q, k // d, d, own, ranks)
    return _heads(0, q, 0, ranks), first, _kv(q + k, k // d, d, own + first[0].length, ranks)


def halves(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Packed gate and up: the same units of both."""
    gate = _local_rows(0, size // 2, 0, ranks)
    return gate, _local_rows(size // 2, size // 2, gate[0].length, ranks)


def units(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    return (_local_rows(0, size, 0, ranks),)


def tokens(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """The vocabulary: equally many rows on each rank, but fewer on the last."""
    share = -(-size // ranks.size)
    first = ranks.rank * share
    return ((Rows(first, 0, min(share, size - first)), Copy()),)


# For each kind of module, the parameters that are split, by name
PLAN: Mapping[type[nn.Module], Mapping[str, How]] = {
    Attention: {
        "qkv_proj.weight": How(0, heads),
        "qkv_proj.bias": How(0, heads),
        "o_proj.weight": How(1, queries),
    },
    GatedMLP: {
        "gate_up_proj.weight": How(0, halves),
        "gate_up_proj.bias": How(0, halves),
        "down_proj.weight": How(1, units),
    },
    Experts: {"gate_up_proj": How(1, halves), "down_proj": How(2, units)},
    Embedding: {"weight": How(0, tokens)},
    LMHead: {"weight": How(0, tokens), "bias": How(0, tokens)},
}
# Norms over all heads together
FLAT = {"q_norm.weight": How(0, queries), "k_norm.weight": How(0, keys)}
# The projections whose outputs are partial sums
SUMMANDS = {Attention: "o_proj", GatedMLP: "down_proj"}


def bounds(size: int, ranks: int) -> tuple[int, ...]:
    """The bounds of the ranks' parts of `size`: R + 1 of them."""
    unit = UNIT if size >= UNIT * ranks else 1
    return *(size // unit * r // ranks * unit for r in range(ranks)), size


def _local_rows(begin: int, size: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """The rank's part of `size` rows from `begin` on."""
    at = bounds(size, ranks.size)
    first, end = at[ranks.rank], at[ranks.rank + 1]
    return Rows(begin + first, target, end - first), Copy()


def _heads(begin: int, size: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """As `_own`, for a size that the ranks divide."""
    own = size // ranks.size
    return Rows(begin + ranks.rank * own, target, own), Copy()


def _kv(begin: int, count: int, dim: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """Of `count` kv heads from `begin` on, those that the rank's queries read."""
    if count >= ranks.size:
        own = count // ranks.size
        return Rows(begin + ranks.rank * own * dim, target, own * dim), Copy()
    copies = ranks.size // count
    head, number = divmod(ranks.rank, copies)
    return Rows(begin + head * dim, target, dim), Copy(number, copies)


def cut_model(model: CausalLM, mesh: DeviceMesh) -> None:
    """Keep only this rank's part of each layer; on the meta device, before the weights are read.

    With expert parallelism call `share_experts` first: experts that are already distributed stay as
    they are. ValueError for a model that so many ranks cannot split.
    """
    cut_parts(model, Ranks.of(mesh.get_group()))
    set_tensor(model, mesh)


def cut_parts(model: CausalLM, ranks: Ranks) -> None:
    """As `cut_model`, without the process groups that sum replicated gradients."""
    check(model, ranks.size)
    tied, before = model.ties_head, set(model.cuts)
    apart = _apart(model)
    cuts = dict(_cuts(model, ranks, apart))
    cuts |= adapter_cuts(model, cuts)
    model.cuts = {
        name: cut for name, cut in cuts.items() if not (tied and name == "lm_head.weight")
    }
    for name, cut in model.cuts.items():
        if name in before:
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        whole: Tensor = module.get_parameter(own)
        if len(cut.pieces) > 1 or cut.length != whole.shape[cut.dim]:
            setattr(module, own, nn.Parameter(cut.take(whole.detach()), whole.requires_grad))
    share_adapters(model, cuts, ranks)
    size = model.config.vocab_size
    ((rows, _),) = tokens(model, size, ranks)
    vocabulary = VocabularyShard.of(ranks.group, ranks.size, rows.source, rows.length, size)
    for module in model.modules():
        if isinstance(module, Attention):
            _share_heads(module, ranks)
        elif isinstance(module, LMHead) and model.config.labels:
            module.scorers = ranks
        elif isinstance(module, Embedding | LMHead):
            module.vocabulary = vocabulary
        for kind, name in SUMMANDS.items():
            if isinstance(module, kind) and module not in apart:
                product = module.get_submodule(name)
                assert isinstance(product, Linear)
                product.summands = ranks.size
    if tied:
        model.lm_head.weight = cast(nn.Parameter, model.model.embed_tokens.weight)
    model.model.tensor = ranks
    model.model.set_holds()


def check(model: CausalLM, ranks: int) -> None:
    """Raises ValueError for a model that so many ranks cannot split."""
    size = model.config.vocab_size
    if (ranks - 1) * -(-size // ranks) >= size:
        raise ValueError(f"{ranks} ranks cannot share a vocabulary of {size} tokens")
    for module in model.modules():
        if isinstance(module, Linear) and module.quantized is not None:
            raise ValueError("tensor parallelism does not work with quantised weights")
        if isinstance(module, Attention):
            q, kv = module.heads, module.kv_heads
            if q % ranks or (kv % ranks and ranks % kv):
                raise ValueError(
                    f"{ranks} ranks cannot share {q} heads with {kv} kv heads: the number of ranks "
                    "(parallel.tensor, --tp, mesh) must divide the heads, and divide the kv heads "
                    "or be a multiple of them"
                )
    if any(config.dropout for config in model.adapters.values()):
        apart, each = _apart(model), (Ranks("", rank, ranks) for rank in range(ranks))
        check_dropout(model, (dict(_cuts(model, own, apart)) for own in each))


def _apart(model: CausalLM) -> set[nn.Module]:
    """MoE layers whose experts are distributed whole, and their submodules."""
    moes = [m for m in model.modules() if isinstance(m, SparseMoE) and m.divided]
    return {inner for moe in moes for inner in moe.modules()}


def _cuts(model: CausalLM, ranks: Ranks, apart: Container[nn.Module]) -> Iterator[tuple[str, Cut]]:
    """The cut of every parameter."""
    hows: dict[str, tuple[nn.Module, How]] = {}
    for path, module in model.named_modules():
        if module in apart:
            continue
        rules = dict(next((PLAN[kind] for kind in PLAN if isinstance(module, kind)), {}))
        if isinstance(module, LMHead) and model.config.labels:  # a row for each score
            rules = {}
        if isinstance(module, Embedding | LMHead) and rules and module.copies is not None:
            rules |= {f"copies.{name}": rules["weight"] for name in module.copies._parameters}
        if isinstance(module, Attention) and module.flat_qk_norm:
            rules |= FLAT
        for name, how in rules.items():
            hows[f"{path}.{name}"] = module, how
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name in model.cuts:
            yield name, model.cuts[name]
            continue
        if name not in hows:
            every = (Rows(0, 0, shape[0]), Copy(ranks.rank, ranks.size))
            yield name, Cut(shape, 0, (every,))
            continue
        module, how = hows[name]
        yield name, Cut(shape, how.dim, how.pieces(module, shape[how.dim], ranks))


def _share_heads(module: Attention, ranks: Ranks) -> None:
    """Set the numbers of local heads."""
    if module.flat_qk_norm and module.q_norm is not None and module.k_norm is not None:
        copies = max(1, ranks.size // module.kv_heads)
        module.q_norm.shared = ranks, module.heads * module.head_dim
        module.k_norm.shared = ranks, module.kv_heads * module.head_dim * copies
    module.heads //= ranks.size
    module.kv_heads = max(1, module.kv_heads // ranks.size)
