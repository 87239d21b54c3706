"""The states of mixers that read tokens one after the other: recurrences and convolutions.

# R rows of the cache, N tokens that can be dropped again, W kernel size of the convolution, M its
# channels, H value heads, Dk and Dv head dims of keys and values, T tokens of a row
"""

import torch
from torch import Tensor

from tigon.layers.kv_state import LayerState


class RecurrentState(LayerState):
    """Tensors [R, N + 1, ...] with what a mixer has after the last token of each row.

    The first has the last inputs of a convolution, [R, N + 1, W - 1, M]. `keep_history` makes room
    for what it has after the N tokens before, too: that of a row of n tokens is in slot
    n % (N + 1).
    """

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors

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
        if self.history is None:
            return tuple(x[:, 0] for x in self.tensors)
        index = self._index(lengths)
        empty = torch.as_tensor(lengths, device=self.tensors[0].device) == 0
        found = [x[index] for x in self.tensors]
        return tuple(x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0) for x in found)

    def write(self, lengths: Tensor | int, *values: Tensor) -> None:
        """Stores tensors [R, ...] of rows of `lengths` tokens, in place."""
        if self.history is None:
            for x, value in zip(self.tensors, values, strict=True):
                x[:, 0].copy_(value)
        else:
            index = self._index(lengths)
            for x, value in zip(self.tensors, values, strict=True):
                x[index] = value

    def replace(self, *values: Tensor) -> None:
        """Puts other tensors [R, ...] in place of what is kept."""
        self.tensors = tuple(x[:, None] for x in values)

    def _index(self, lengths: Tensor | int) -> tuple[Tensor, Tensor]:
        """Returns rows and slots [R] of rows of `lengths` tokens."""
        count, slots = self.tensors[0].shape[:2]
        rows = torch.arange(count, device=self.tensors[0].device)
        return rows, (torch.as_tensor(lengths, device=rows.device) % slots).expand(count)


class DeltaState(RecurrentState):
    """The inputs of the convolution, and the delta rule's state, fp32 [R, N + 1, H, Dk, Dv]."""

    @property
    def layout(self) -> str:
        """Names the heads and their dims alone."""
        heads, *dims = self.tensors[1].shape[2:]
        return f"state of {heads} heads with {dims[0]} x {dims[1]} numbers"


class ConvState(RecurrentState):
    """The last inputs of a convolution."""

    @property
    def layout(self) -> str:
        """Names the channels and how many inputs there are of each."""
        window, channels = self.tensors[0].shape[2:]
        return f"state of {channels} channels with {window} inputs"


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


def real_ends(real: Tensor) -> Tensor:
    """Returns [B], the position behind the last True of each row of `real` [B, T]; 0 if none is."""
    return (torch.arange(1, real.shape[1] + 1, device=real.device) * real).amax(1)
