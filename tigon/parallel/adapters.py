"""Tensor parallelism of low-rank adapters, which are added before the model is split.

An adapter is split like its weight: B and DoRA's magnitudes by rows if the weight is column-wise
parallel (split by its outputs), A by columns if it is row-wise parallel (split by its inputs), and
an embedding's A by vocabulary. The rest is replicated, with partial gradients. Norms of rows that
are split over ranks take a sum over the ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tigon.layers import LoRAPart, LowRank, LowRankEmbedding, LowRankExperts
from tigon.layers.collectives import Ranks
from tigon.layers.lora import MAGNITUDE, B
from tigon.models import CausalLM
from tigon.utils.random import GOLDEN, WORD, as_int64
from tigon.weights import Copy, Cut, Rows

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
        low.parts = tuple(map(_own, low.parts, weights))
        weight = weights[0]
        if not isinstance(low, LowRank) or not _by_inputs(weight):
            continue
        low.column_ranks = ranks
        if low.dropout:
            # Column c of the rank has the draws of column first + c
            place = low.place + weight.pieces[0][0].source // DRAWN * GOLDEN
            low.place = as_int64(place & WORD)


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


def _own(part: LoRAPart, weight: Cut) -> LoRAPart:
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
