"""Tensor parallelism (Shoeybi et al., 2019), with the stream's tokens divided between blocks
(Korthikanti et al., 2022): what each rank has of which parameter, as data.

Projections into a block are cut by their outputs: by heads, by units of the MLP and of each expert.
Those out of it are cut by their inputs, so that ranks have summands of what the block adds to the
stream. Embedding and head are cut by tokens. All else every rank has whole, and so a mixture whose
experts are divided whole: it computes with the rank's own tokens. Packed projections are
cut part by part, [q; k; v] to [q_r; k_r; v_r], which is no placement of a DTensor: parameters are
plain ones of the rank's own, which the model's layout describes, and fully_shard divides further.
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

# Outputs are cut at multiples of it where that leaves each rank some: kernels align, and products
# of 8-bit floats need it
UNIT = 16


class How(NamedTuple):
    """A parameter's dimension, and what a rank has of it."""

    dim: int
    pieces: Callable[[nn.Module, int, Ranks], Pieces]  # of the module, the size and the rank


def queries(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Of [H, D]."""
    return (_heads(0, size, 0, ranks),)


def keys(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Of [K, D]; a head that several ranks need is on each of them."""
    assert isinstance(module, Attention)
    kv_heads = size // module.head_dim
    return (_kv(0, kv_heads, module.head_dim, 0, ranks),)


def heads(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Of [(H + K + K), D]."""
    assert isinstance(module, Attention)
    d = module.head_dim
    q, k, _ = module.qkv_proj.parts
    own = q // ranks.size
    first = _kv(q, k // d, d, own, ranks)
    return _heads(0, q, 0, ranks), first, _kv(q + k, k // d, d, own + first[0].length, ranks)


def halves(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """Of gate and up, the same units."""
    gate = _own(0, size // 2, 0, ranks)
    return gate, _own(size // 2, size // 2, gate[0].length, ranks)


def units(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    return (_own(0, size, 0, ranks),)


def tokens(module: nn.Module, size: int, ranks: Ranks) -> Pieces:
    """As many on each rank, but fewer on the last."""
    share = -(-size // ranks.size)
    first = ranks.rank * share
    return ((Rows(first, 0, min(share, size - first)), Copy()),)


# Of the modules of a kind, the parameters that are cut, by their names in it
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
SUMMANDS = {Attention: "o_proj", GatedMLP: "down_proj"}  # the products that ranks add up


def bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Where each rank's part of so many begins, and the end."""
    unit = UNIT if size >= UNIT * ranks else 1
    return *(size // unit * r // ranks * unit for r in range(ranks)), size


def _own(begin: int, size: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """Of `size` from `begin` on, the rank's part."""
    at = bounds(size, ranks.size)
    first, end = at[ranks.rank], at[ranks.rank + 1]
    return Rows(begin + first, target, end - first), Copy()


def _heads(begin: int, size: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """As `_own`, of what ranks divide evenly."""
    own = size // ranks.size
    return Rows(begin + ranks.rank * own, target, own), Copy()


def _kv(begin: int, count: int, dim: int, target: int, ranks: Ranks) -> tuple[Rows, Copy]:
    """Of `count` heads from `begin` on, those that the rank's queries read."""
    if count >= ranks.size:
        own = count // ranks.size
        return Rows(begin + ranks.rank * own * dim, target, own * dim), Copy()
    copies = ranks.size // count
    head, number = divmod(ranks.rank, copies)
    return Rows(begin + head * dim, target, dim), Copy(number, copies)


def cut_model(model: CausalLM, mesh: DeviceMesh) -> None:
    """Leave to each rank of the mesh its part; on the meta device, before the weights are read.

    Experts that ranks are to have whole are divided before (`share_experts`), and stay as they are.
    ValueError for what ranks cannot share.
    """
    cut_parts(model, Ranks.of(mesh.get_group()))
    set_tensor(model, mesh)


def cut_parts(model: CausalLM, ranks: Ranks) -> None:
    """As `cut_model`, but for what is set up with the other ranks before the first step."""
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
    """Raises ValueError for a model that so many ranks cannot share."""
    size = model.config.vocab_size
    if (ranks - 1) * -(-size // ranks) >= size:
        raise ValueError(f"{ranks} ranks cannot share a vocabulary of {size} tokens")
    for module in model.modules():
        if isinstance(module, Linear) and module.quantised is not None:
            raise ValueError("tensor parallelism is not there for quantised weights")
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
    """Mixtures whose experts are divided whole, and what is in them."""
    moes = [m for m in model.modules() if isinstance(m, SparseMoE) and m.divided]
    return {inner for moe in moes for inner in moe.modules()}


def _cuts(model: CausalLM, ranks: Ranks, apart: Container[nn.Module]) -> Iterator[tuple[str, Cut]]:
    """Of every parameter."""
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
    """The numbers of the rank's own heads."""
    if module.flat_qk_norm and module.q_norm is not None and module.k_norm is not None:
        copies = max(1, ranks.size // module.kv_heads)
        module.q_norm.shared = ranks, module.heads * module.head_dim
        module.k_norm.shared = ranks, module.kv_heads * module.head_dim * copies
    module.heads //= ranks.size
    module.kv_heads = max(1, module.kv_heads // ranks.size)
