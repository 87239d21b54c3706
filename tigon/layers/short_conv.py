"""Short convolution: a causal convolution between two gates, in place of attention.

# B batch, T tokens, C model dim, W kernel size, R rows of the cache
"""

from typing import Any

import torch
from torch import Tensor, nn

from tigon.kernels.delta.causal_conv import causal_conv
from tigon.layers.context import BlockInputs, CacheAppend
from tigon.layers.kv_state import StateSpec
from tigon.layers.linear import FusedLinear, Linear
from tigon.layers.recurrent_state import RecurrentState, last_inputs, token_bounds


class ShortConv(nn.Module):
    """A causal convolution over `kernel_size` tokens, between gates, [B, T, C] in and out.

    The projection's thirds are the gate of the convolution's input, that of its output, and the
    input itself. `bias`: that of all three layers. Source: LFM2 (arXiv 2511.23404).
    """

    def __init__(self, dim: int, kernel_size: int, *, bias: bool = False):
        super().__init__()
        self.in_proj = FusedLinear(dim, (dim, dim, dim), bias=bias)
        self.conv = nn.Conv1d(dim, dim, kernel_size, groups=dim, bias=bias)
        self.out_proj = Linear(dim, dim, bias=bias)

    def make_state(self, spec: StateSpec) -> RecurrentState:
        """Returns an empty state, of the same size for any `capacity`, not quantized."""
        channels, _, size = self.conv.weight.shape
        shape = spec.rows, 1, size - 1, channels
        return RecurrentState(torch.zeros(shape, dtype=spec.dtype, device=spec.device))

    def forward(
        self, x: Tensor, rotation: Any, state: RecurrentState | None, ctx: BlockInputs
    ) -> Tensor:
        """Returns [B, T, C] for x [B, T, C]; tokens see the W - 1 before them in their sequence.

        With a `state`, goes on from it and changes it; with `ctx.shard`, from the tokens of the
        ranks before. Padding counts as zeros.
        """
        gate_in, gate_out, x = self.in_proj(x, *ctx.dropout_args).chunk(3, -1)
        x = gate_in * x
        if ctx.real is not None:
            x = x.masked_fill(~ctx.real[..., None], 0)
        if ctx.shard is not None:
            count = self.conv.weight.shape[2] - 1
            before = ctx.shard.tokens_before(x, count, ctx.mask.segment_ids)
            y = self._convolve(x, starts=ctx.starts, state=before)
        elif state is None or ctx.append is None:
            y = self._convolve(x, starts=ctx.starts)
        elif ctx.append.lengths is not None:
            y = self._step(x, state, ctx.append.lengths)
        else:
            y = self._append(x, state, ctx, ctx.append)
        return self.out_proj(gate_out * y, *ctx.dropout_args)

    def _convolve(self, x: Tensor, **options: Any) -> Tensor:
        """Returns the convolution of x [B, T, C] and its bias."""
        y = causal_conv(x, self.conv.weight[:, 0], **options)
        return y if self.conv.bias is None else y + self.conv.bias.to(y.dtype)

    def _step(self, x: Tensor, state: RecurrentState, lengths: Tensor) -> Tensor:
        """Returns [B, T, C] for T new tokens of every row, which hold `lengths` [R]."""
        (before,) = state.read(lengths)
        if state.history is None:
            return self._convolve(x, state=before, update_state=True)
        inputs = torch.cat((before, x.to(before.dtype)), 1)
        for t in range(1, x.shape[1] + 1):
            state.write(lengths + t, inputs[:, t : t + state.window])
        return self._convolve(x, state=before)

    def _append(
        self, x: Tensor, state: RecurrentState, ctx: BlockInputs, append: CacheAppend
    ) -> Tensor:
        """Returns [B, T, C] for prompts, or for what follows equally many tokens in all rows."""
        cached = append.cached_tokens
        before = state.read(cached)[0] if cached else None
        y = self._convolve(x, starts=ctx.starts, state=before)
        starts, ends = token_bounds(x, ctx)
        for back in range(state.history or 0, -1, -1):  # rows of fewer tokens are at their start
            at = torch.maximum(starts, ends - back)
            inputs = last_inputs(x.flatten(0, 1), before, starts, at, state.window)
            if append.slots is not None:
                state.write(cached + at - starts, inputs)
            elif ctx.starts is None:  # packed sequences have no single end to go on from
                state.replace(inputs)
        return y
