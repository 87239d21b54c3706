"""Token embedding, scaled where a family does so.

# B batch, T tokens, C model dim, V vocab, r rank
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.distributed.all_reduce import all_reduce_small
from tigon.distributed.collectives import Ranks, reduce_from_group
from tigon.kernels.linear.linear import chunked_matmul, linear
from tigon.kernels.loss.vocab_parallel import VocabularyShard, embedding_rows
from tigon.kernels.norm.rms_norm import rms_norm
from tigon.layers.lora import Adapters, LayerAdapter, LoRAPart, Shapes


class LowRankEmbedding(LayerAdapter):
    """One adapter of an embedding: `scale * B A` [C, V], of which a token takes a column.

    As in PEFT, A [r, V] is initialized to 0 and B [C, r] randomly. With `dora` each of the C
    columns of the table then gets a learned norm over all tokens. `token_ranks`: the ranks that
    divide the tokens of table and A.
    """

    token_ranks: Ranks | None = None

    def __init__(
        self, dim: int, part: LoRAPart, *, dora: bool = False, dtype: torch.dtype, device: Any
    ):
        super().__init__()
        self.parts, self.dora = (part,), dora
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.lora_embedding_A = nn.Parameter(torch.empty(part.rank, part.size, **options))
        self.lora_embedding_B = nn.Parameter(torch.empty(dim, part.rank, **options))
        if dora:
            self.lora_magnitude_vector = nn.Parameter(torch.empty(dim, **options))

    def init_values(
        self, shapes: Shapes, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """As in the base, but zeros for A and standard normal numbers for B."""
        initial = super().init_values(shapes, generator)
        initial["lora_embedding_B"].normal_(generator=generator)
        return initial

    def forward(self, low: Tensor) -> Tensor:
        """Returns the addition to the table's rows, from rows of A^T [..., r]."""
        (part,) = self.parts
        return linear(low, self.lora_embedding_B) * part.scale

    def dora_scale(self, weight: Tensor) -> Tensor:
        """Returns [C] in fp32, each column's learned norm over that of W + (scale B A)^T."""
        (part,) = self.parts
        with torch.no_grad():
            a, b = self.lora_embedding_A, self.lora_embedding_B.float() * part.scale
            square = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32).square()
            square += 2 * (chunked_matmul(a.to(weight.dtype), weight).float().t() * b).sum(1)
            square += (b @ (a.float() @ a.float().t()) * b).sum(1)
            if self.token_ranks is not None:
                square = self.token_ranks.sum(square)
        return self.lora_magnitude_vector.float() / square.sqrt()


class Embedding(nn.Embedding):
    """ids [B, T] -> [B, T, C], times `scale` rounded to the weight's dtype, as in Gemma, or with
    `norm_eps` normed to a root mean square of 1, as in Muse.

    `copies`: modules_to_save of adapters, one of which may replace the weight. `lora`: low-rank
    adapters, one of which may be added. If ranks share the table, they sum a token's row, which one
    of them has, and zeros of the rest.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        padding_idx: int | None = None,
        scale: float = 1.0,
        norm_eps: float | None = None,
    ):
        super().__init__(vocab, dim, padding_idx=padding_idx)
        self.embed_scale, self.norm_eps = scale, norm_eps  # PEFT reads embed_scale
        self.vocabulary: VocabularyShard | None = None  # this rank's rows, if ranks share the table
        self.copies: Adapters | None = None
        self.lora: Adapters | None = None

    def forward(self, input: Tensor) -> Tensor:
        copy = None if self.copies is None else self.copies.active()
        x = self._rows(input, self.weight if copy is None else copy).to(self.weight.dtype)
        if self.lora is not None and (low := self.lora.active()) is not None:
            adapted = x + low(self._rows(input, low.lora_embedding_A.t()))
            x = (adapted * low.dora_scale(self.weight) if low.dora else adapted).to(x.dtype)
        if self.vocabulary is not None:
            add = reduce_from_group if torch.is_grad_enabled() else all_reduce_small
            x = add(x, Ranks.sharing(self.vocabulary))
        if self.norm_eps is not None:
            return rms_norm(x, None, self.norm_eps)
        if self.embed_scale == 1.0:
            return x
        # A fill on the device: a Python number would not be rounded, torch.tensor would wait
        return x * torch.full((), self.embed_scale, dtype=x.dtype, device=x.device)

    def _rows(self, ids: Tensor, table: Tensor) -> Tensor:
        """Returns the rows of the table [B, T, C] for ids; zeros for other ranks' tokens."""
        if self.vocabulary is None:
            return F.embedding(ids, table, self.padding_idx)
        return embedding_rows(ids, table, self.vocabulary, self.padding_idx)
