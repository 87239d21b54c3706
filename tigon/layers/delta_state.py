"""What Gated DeltaNet keeps of earlier tokens.

# R rows of the cache, N tokens that can be taken back, W taps of the convolution, M its channels,
# H value heads, Dk and Dv head dims of keys and values, T tokens of a row
"""

import torch
from torch import Tensor

from tigon.layers.kv_cache import LayerState


class DeltaState(LayerState):
    """The last inputs of the convolution and the recurrent state, after the last token of each row.

    `keep_history` makes room for those after the N tokens before, too: what belongs to a row of n
    tokens is in slot n % (N + 1).
    """

    def __init__(
        self,
        inputs: Tensor,  # [R, N + 1, W - 1, M]
        memory: Tensor,  # fp32 [R, N + 1, H, Dk, Dv]
    ):
        self.inputs, self.memory = inputs, memory

    @property
    def layout(self) -> str:
        """Names the heads and their dims alone."""
        heads, *dims = self.memory.shape[2:]
        return f"state of {heads} heads with {dims[0]} x {dims[1]} numbers"

    @property
    def window(self) -> int:
        """W - 1, the tokens that the convolution looks back."""
        return self.inputs.shape[2]

    def keep_history(self, tokens: int) -> None:
        """Makes room in an empty state to take back up to `tokens` of a row's last tokens."""
        self.history = self.kept = tokens
        for name in ("inputs", "memory"):
            x: Tensor = getattr(self, name)
            setattr(self, name, x.new_zeros(x.shape[0], tokens + 1, *x.shape[2:]))

    def read(self, lengths: Tensor | int) -> tuple[Tensor, Tensor]:
        """Returns inputs [R, W - 1, M] and state [R, H, Dk, Dv] of rows of `lengths` [R] tokens.

        They are copies if there is a history, and zeros where a row is empty.
        """
        if self.history is None:
            return self.inputs[:, 0], self.memory[:, 0]
        index = self._index(lengths)
        empty = torch.as_tensor(lengths, device=self.memory.device) == 0
        found = self.inputs[index], self.memory[index]
        inputs, memory = (x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0) for x in found)
        return inputs, memory

    def write(self, lengths: Tensor | int, inputs: Tensor, memory: Tensor) -> None:
        """Stores inputs [R, W - 1, M] and state [R, H, Dk, Dv] of rows of `lengths` tokens, in
        place."""
        if self.history is None:
            self.inputs[:, 0].copy_(inputs)
            self.memory[:, 0].copy_(memory)
        else:
            index = self._index(lengths)
            self.inputs[index], self.memory[index] = inputs, memory

    def replace(self, inputs: Tensor, memory: Tensor) -> None:
        """Puts other tensors of the same shapes, without gradients, in place of what is kept."""
        self.inputs, self.memory = inputs.detach()[:, None], memory.detach()[:, None]

    def check_gradients(self, x: Tensor, first: bool) -> None:
        """Raises ValueError if x needs a gradient, which would not reach the tokens before."""
        if x.requires_grad and torch.is_grad_enabled() and not first:
            raise ValueError(
                "a state of Gated DeltaNet keeps no gradients: call the model inside "
                "torch.no_grad() or torch.inference_mode(), or without a cache"
            )

    def _index(self, lengths: Tensor | int) -> tuple[Tensor, Tensor]:
        """Returns rows and slots [R] of rows of `lengths` tokens."""
        rows = torch.arange(len(self.memory), device=self.memory.device)
        slots = torch.as_tensor(lengths, device=rows.device) % self.memory.shape[1]
        return rows, slots.expand(len(rows))


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
