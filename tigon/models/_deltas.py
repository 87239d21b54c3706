"""What adapters add to weights, in float32 and rounded once; every rank of a sharded model adds its
own rows."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tigon.layers import LowRank, LowRankEmbedding, LowRankExperts
from tigon.layers.lora import MAGNITUDE, B
from tigon.layers.lora_experts import A
from tigon.weights import own_rows, row_group


def add_delta(weight: Tensor, low: LowRank) -> None:
    """scale B A, and DoRA's lengths, to this rank's rows of the weight."""
    own, start = own_rows("weight", weight)
    a, rank = _whole(low.lora_A).float(), 0
    for part in low.parts:
        b = _whole(low.get_parameter(B + part.name)).float()
        # By all ranks, of which some may have no row of the part
        lengths = _whole(low.get_parameter(MAGNITUDE + part.name)).float() if low.dora else None
        begin, end = max(part.first, start), min(part.first + part.size, start + len(own))
        if begin < end:
            rows = own[begin - start : end - start]
            here = slice(begin - part.first, end - part.first)
            delta = b[here] @ a[rank : rank + part.rank]
            total = rows.float().add_(delta, alpha=part.scale)
            if lengths is not None:
                total *= (lengths[here] / low.row_lengths(total)).unsqueeze(1)
            rows.copy_(total)
        rank += part.rank


def add_embedding_delta(weight: Tensor, low: LowRankEmbedding) -> None:
    """(scale B A)^T and DoRA's lengths, to this rank's rows of the weight, one for each token."""
    own, start = own_rows("weight", weight)
    a, b = (_whole(p).float() for p in (low.lora_embedding_A, low.lora_embedding_B))
    (part,) = low.parts
    delta = a[:, start : start + len(own)].t() @ b.t()
    total = own.float().add_(delta, alpha=part.scale)
    if low.dora:
        total *= _whole(low.lora_magnitude_vector).float() / column_lengths(total, weight, low)
    own.copy_(total)


def column_lengths(rows: Tensor, weight: Tensor, low: LowRankEmbedding) -> Tensor:
    """[C], of this rank's rows [n, C] of the weight; every rank calls this."""
    return low.column_lengths(rows, row_group(weight) if isinstance(weight, DTensor) else None)


def add_experts_deltas(layer: nn.Module, low: LowRankExperts) -> None:
    """scale B_e A_e to the matrices of this rank's experts."""
    for part in low.parts:
        own, start = own_rows(part.name, layer.get_parameter(part.name))
        a, b = (_whole(low.get_parameter(kind + part.name)).float() for kind in (A, B))
        a = a.view(low.experts, part.rank, -1)
        b = b.view(part.size, part.rank, low.experts)
        for e, matrix in enumerate(own, start):
            matrix.copy_(matrix.float().addmm_(b[..., e], a[e], alpha=part.scale))


def _whole(parameter: Tensor) -> Tensor:
    """All rows; every rank of a sharded one calls this."""
    whole = parameter.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole
