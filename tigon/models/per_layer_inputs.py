"""The decoder of Gemma 3n and Gemma 4, whose blocks each get an input of their own.

# B batch, T tokens, C model dim, L layers, P dims of a block's input
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tigon.layers import Embedding, Linear, RMSNorm
from tigon.models.config import ConfigError
from tigon.models.decoder import Decoder, TransformerBlock


def multiply(x: Tensor, scale: float, *, rounded: bool) -> Tensor:
    """Multiplies x by a number, which is rounded to the dtype of x first if `rounded`."""
    return x * torch.full((), scale, dtype=x.dtype, device=x.device) if rounded else x * scale


class PerLayerDecoder(Decoder):
    """A decoder with a second embedding of L * P dims, of which each block gets P.

    A projection of the first embedding is added to it. `rounded_scales`: the two constants of this
    sum are rounded to the model's dtype. Tokens that the second embedding lacks have its row 0.
    Without hidden_size_per_layer_input in the config it is a `Decoder`.
    """

    def __init__(
        self, c: Any, block: type[TransformerBlock], *, rounded_scales: bool = False, **options: Any
    ):
        super().__init__(c, block, **options)
        self.rounded_scales, self.dim = rounded_scales, c.hidden_size
        self.layer_dims = (c.num_hidden_layers, c.hidden_size_per_layer_input)
        layers, dim = self.layer_dims
        if not dim:
            return
        size, padding = c.vocab_size_per_layer_input, c.pad_token_id
        if padding is not None and padding >= size:
            raise ConfigError(
                f"pad_token_id={padding} is not below vocab_size_per_layer_input={size}"
            )
        self.embed_tokens_per_layer = Embedding(
            c.vocab_size_per_layer_input, layers * dim, padding_idx=c.pad_token_id, scale=dim**0.5
        )
        self.per_layer_model_projection = Linear(c.hidden_size, layers * dim, bias=False)
        self.per_layer_projection_norm = RMSNorm(
            dim, c.rms_norm_eps, offset=block.norm_offset, cast=block.norm_cast
        )

    @property
    def needs_ids(self) -> bool:
        """Whether inputs_embeds are not enough."""
        return self.layer_dims[1] > 0

    @property
    def embeddings(self) -> list[Embedding]:
        """Both embeddings."""
        return super().embeddings + ([self.embed_tokens_per_layer] if self.needs_ids else [])

    @property
    def first_modules(self) -> list[nn.Module]:
        """The projection of the first embedding, and its norm."""
        modules: list[nn.Module] = super().first_modules
        if self.needs_ids:
            modules += [self.per_layer_model_projection, self.per_layer_projection_norm]
        return modules

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeds ids [B, T] twice: [B, T, C + L P], in one tensor, so that whatever drops or
        divides tokens does so with both."""
        x = super().embed(input_ids)
        if not self.needs_ids:
            return x
        table = self.embed_tokens_per_layer
        # PEFT's layer around a table does not know its size
        inside = input_ids < getattr(table, "num_embeddings", len(table.weight))
        return torch.cat((x, table(torch.where(inside, input_ids, 0))), -1)

    def begin(self, x: Tensor, *dropout_args: Tensor) -> tuple[Tensor, Sequence[Tensor] | None]:
        """The first embedding [B, T, C], and each block's input [B, T, P]."""
        if not self.needs_ids:
            return super().begin(x)
        x, layer_embeds = x.split((self.dim, x.shape[-1] - self.dim), -1)
        x, _ = super().begin(x.contiguous())  # what is saved of it does not keep the rest
        projected = self.per_layer_model_projection(x, *dropout_args)
        projected = multiply(projected, self.dim**-0.5, rounded=self.rounded_scales)
        projected = self.per_layer_projection_norm(projected.unflatten(-1, self.layer_dims))
        inputs = projected + layer_embeds.unflatten(-1, self.layer_dims)
        return x, multiply(inputs, 2**-0.5, rounded=self.rounded_scales).unbind(-2)
