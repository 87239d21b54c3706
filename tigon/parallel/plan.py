"""Tensor parallelism (Shoeybi et al., 2019) with sequence parallelism between blocks (Korthikanti
et al., 2022): how each parameter is split, as data.

Projections into a block are column-wise parallel: split by their outputs, which are heads, or units
of the MLP and of each expert. Those out of it are row-wise parallel: split by their inputs, with
partial sums of the block's output on each rank. Embedding and head are split by vocabulary. All
else is replicated, also the MoE layer itself if ranks have whole experts: it computes with the
rank's own tokens. Packed projections are split part by part, [q; k; v] to [q_r; k_r; v_r], which no
DTensor placement expresses: parameters are plain local ones, which the model's layout describes,
and which fully_shard shards further.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tigon.kernels._vocabulary import VocabularyShard
from tigon.layers import Attention, Embedding, Experts, GatedMLP, Linear, LMHead, SparseMoE
from tigon.layers.collectives import Ranks
from tigon.models import CausalLM
from tigon.parallel.adapters import Pieces, adapter_cuts, check_dropout, share_adapters
from tigon.parallel.gradients import set_tensor
from tigon.weights import Copy, Cut, Rows

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
    gate = _own(0, size // 2, 0, ranks)
    return gate, _own(size // 2, size // 2, gate[0].length, ranks)


def units(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    return (_own(0, size, 0, ranks),)


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


def _own(begin: int, size: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
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
        if isinstance(module, Linear) and module.quantised is not None:
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
