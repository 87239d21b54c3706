"""The states of mixers that read tokens one after the other: recurrences and convolutions.

# R rows of the cache, N tokens that can be dropped again, W kernel size of the convolution, M its
# channels, H value heads, Dk and Dv head dims of keys and values, T tokens of a row
"""

import torch
from torch import Tensor

from tigon.layers.context import BlockInputs
from tigon.layers.kv_state import LayerState


class RecurrentState(LayerState):
    """Tensors [R, N + 1, ...] with what a mixer has after the last token of each row.

    The first has the last inputs of a convolution, [R, N + 1, W - 1, M]; a delta rule has its state
    in a second one, fp32 [R, N + 1, H, Dk, Dv]. `keep_history` makes room for what they are after
    the N tokens before, too: those of a row of n tokens are in slot n % (N + 1).
    """

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

    @property
    def layout(self) -> str:
        """Names the sizes alone, which do not depend on `keep_history`."""
        sizes = (" x ".join(map(str, x.shape[2:])) for x in self.tensors)
        return f"state of {' and '.join(sizes)} numbers"

    @property
    def window(self) -> int:
        """W - 1, the tokens that the convolution looks back."""
        return self.tensors[0].shape[2]

    def keep_history(self, tokens: int) -> None:
        """Makes room in an empty state to drop up to `tokens` of a row's last tokens."""
        self.history = self.rollback = tokens
        self.tensors = tuple(
            x.new_zeros(x.shape[0], tokens + 1, *x.shape[2:]) for x in self.tensors
        )

    def read(self, lengths: Tensor | int) -> tuple[Tensor, ...]:
        """Returns the tensors [R, ...] of rows of `lengths` [R] tokens, zeros of empty ones."""
        index = self._index(lengths)
        found = [x[index] for x in self.tensors]
        if self.history is None:  # views, which steps change in place
            return tuple(found)
        empty = torch.as_tensor(lengths, device=self.tensors[0].device) == 0
        return tuple(x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0) for x in found)

    def write(self, lengths: Tensor | int, *values: Tensor) -> None:
        """Stores tensors [R, ...] of rows of `lengths` tokens, in place."""
        index = self._index(lengths)
        for x, value in zip(self.tensors, values, strict=True):
            x[index] = value

    def replace(self, *values: Tensor) -> None:
        """Puts other tensors [R, ...] in place of what is kept."""
        self.tensors = tuple(x[:, None] for x in values)

    def _index(self, lengths: Tensor | int) -> tuple[slice, int] | tuple[Tensor, Tensor]:
        """Returns rows and slots [R] of rows of `lengths` tokens; all and 0 without a history."""
        if self.history is None:
            return slice(None), 0
        count, slots = self.tensors[0].shape[:2]
        rows = torch.arange(count, device=self.tensors[0].device)
        return rows, (torch.as_tensor(lengths, device=rows.device) % slots).expand(count)


def token_bounds(x: Tensor, ctx: BlockInputs) -> tuple[Tensor, Tensor]:
    """Returns where new tokens of each row of the cache begin in the flattened batch, and behind
    which they end, [R] each; x [B, T, ...] are the tokens."""
    if ctx.append is not None and ctx.append.slots is not None:
        bounds = ctx.append.slots.bounds
        return bounds[:-1], bounds[1:]
    b, t = x.shape[:2]
    starts = torch.arange(b, device=x.device) * t
    if ctx.real is None:
        return starts, starts + t
    positions = torch.arange(1, t + 1, device=x.device)
    return starts, starts + (positions * ctx.real).amax(1)  # padding may be on the right


def last_inputs(
    x: Tensor,  # [N, M], the flattened batch
    before: Tensor | None,  # [R, W - 1, M]: the inputs before the first token of each row, or zeros
    starts: Tensor,  # [R]: the row's first token
    ends: Tensor,  # [R]: behind its last token
    window: int,  # W - 1
) -> Tensor:
    """Returns the last W - 1 inputs of each row, [R, W - 1, M]."""
    at = ends[:, None] + torch.arange(-window, 0, device=x.device)
    new = x[at.clamp(min=0)]
    earlier = torch.zeros_like(new)
    if before is not None:
        index = (window + at - starts[:, None]).clamp(0, max(window - 1, 0))
        earlier = before.to(x.dtype).gather(1, index[..., None].expand_as(new))
    return torch.where((at >= starts[:, None])[..., None], new, earlier)
