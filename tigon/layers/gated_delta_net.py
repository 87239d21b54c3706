"""Gated DeltaNet: linear attention with a recurrent state, in place of softmax attention.

# B batch, T tokens, N tokens of all rows, K key heads, H value heads, Dk and Dv their dims,
# M = 2 K Dk + H Dv channels of the convolution, W its taps, R rows of the cache

Source: Yang et al. 2024 (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.kernels.attention.api import AttentionMask
from tigon.kernels.delta.causal_conv import causal_conv_qkv
from tigon.kernels.delta.gated_delta import MAX_STEP_TOKENS, gated_delta_rule, gated_delta_step
from tigon.kernels.norm.rms_norm import rms_norm
from tigon.layers.context import BlockInputs, CacheAppend
from tigon.layers.float32 import Float32Module
from tigon.layers.kv_cache import Quantize
from tigon.layers.linear import FusedLinear, Linear, RowOrder
from tigon.layers.recurrent_state import DeltaState, last_inputs, real_ends


class GatedRMSNorm(nn.Module):
    """RMSNorm over the last dimension, times silu of a gate."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def init_weights(self) -> None:
        """Sets the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, gate=gate)


class Decay(Float32Module):
    """Maps a [..., H] to the logarithm of each head's decay, -exp(A_log) softplus(a + dt_bias).

    In fp32: what a head forgets in a thousand tokens is a power of it.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def init_weights(self) -> None:
        """Sets A_log to the logarithm of numbers from U(0.01, 16), and dt_bias to 1."""
        nn.init.uniform_(self.A_log, 0.01, 16).log_()
        nn.init.ones_(self.dt_bias)

    def forward(self, a: Tensor) -> Tensor:
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())


class GatedDeltaNet(nn.Module):
    """The gated delta rule between projections: x [B, T, C] -> [B, T, C].

    Queries, keys and values pass a causal convolution of `taps`; value head h reads key head
    `h // (H // K)`. `packed`: checkpoints have one projection of q, k, v and the gate z, and one of
    b and a, with the rows of each key head together; else those of q, k, v and of z, b and a each.
    """

    def __init__(
        self,
        dim: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        taps: int,
        eps: float,
        packed: bool = False,
    ):
        super().__init__()
        if value_heads % key_heads:
            raise ValueError(
                f"linear_num_value_heads={value_heads} is not a multiple of "
                f"linear_num_key_heads={key_heads}: each key head has as many value heads"
            )
        self.key_heads, self.value_heads = key_heads, value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values, ratio = key_heads * key_dim, value_heads * value_dim, value_heads // key_heads
        channels = 2 * keys + values
        if packed:
            sizes = key_dim, key_dim, ratio * value_dim, ratio * value_dim
            orders = (
                RowOrder(key_heads, sizes, (0, 1, 2, 3)),
                RowOrder(key_heads, (ratio, ratio), (0, 1)),
            )
            self.in_proj = FusedLinear(dim, (channels + values, 2 * value_heads), orders=orders)
        else:
            self.in_proj = FusedLinear(dim, (channels, values, value_heads, value_heads))
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        self.decay = Decay(value_heads)
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = Linear(values, dim, bias=False)

    def make_state(
        self,
        rows: int,
        capacity: int | None,
        *,
        chunk: int,
        dtype: torch.dtype,
        device: torch.device | str,
        quantize: Quantize = None,
    ) -> DeltaState:
        """Returns an empty state, which has the same size for any `capacity`, and is not quantized:
        it would be rounded again with every token."""
        inputs = torch.zeros(
            rows, 1, self.conv1d.kernel_size[0] - 1, self.channels, dtype=dtype, device=device
        )
        shape = rows, 1, self.value_heads, self.key_dim, self.value_dim
        return DeltaState(inputs, torch.zeros(shape, dtype=torch.float32, device=device))

    @property
    def channels(self) -> int:
        """M, the channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def forward(
        self, x: Tensor, rotation: Any, state: DeltaState | None, ctx: BlockInputs
    ) -> Tensor:
        """Returns [B, T, C] for x [B, T, C]; tokens see those before them in their sequence.

        With a `state`, goes on from it and changes it. Padding leaves it as it is.
        """
        sizes = self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads
        mixed, z, b, a = self.in_proj(x, *ctx.dropout_args).split(sizes, -1)
        beta, g = b.sigmoid(), self.decay(a)
        if ctx.real is not None:
            padding = ~ctx.real[..., None]
            mixed, beta, g = (t.masked_fill(padding, 0) for t in (mixed, beta, g))
        append = ctx.append
        if state is not None and append is not None:
            grows = append.lengths is None and append.slots is None
            learned = torch.is_grad_enabled() and any(
                t.requires_grad for t in (mixed, g, beta, self.conv1d.weight)
            )
            state.check_gradients(learned, first=grows and not append.cached_tokens)
        if state is not None and append is not None and append.lengths is not None:
            o = self._step(mixed, g, beta, state, append.lengths)
        else:
            o = self._scan(mixed, g, beta, state, ctx)
        y = self.norm(o, z.unflatten(-1, (-1, self.value_dim)))
        return self.out_proj(y.flatten(2), *ctx.dropout_args)

    def _convolved(self, mixed: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q and k [B, T, K, Dk], and v [B, T, H, Dv]."""
        options |= {"key_heads": self.key_heads, "key_dim": self.key_dim}
        q, k, v = causal_conv_qkv(mixed, self.conv1d.weight[:, 0], **options)
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def _step(
        self, mixed: Tensor, g: Tensor, beta: Tensor, state: DeltaState, lengths: Tensor
    ) -> Tensor:
        """Returns [B, T, H, Dv] for T new tokens of every row, which hold `lengths` [R]."""
        inputs, memory = state.read(lengths)
        if state.history is None:
            q, k, v = self._convolved(mixed, state=inputs, update_state=True)
            if mixed.shape[1] <= MAX_STEP_TOKENS:
                return gated_delta_step(q, k, v, g, beta, memory)
            o, final = gated_delta_rule(q, k, v, g, beta, state=memory)
            memory.copy_(final)
            return o
        q, k, v = self._convolved(mixed, state=inputs)
        inputs = torch.cat((inputs, mixed.to(inputs.dtype)), 1)
        outputs = []
        for t in range(mixed.shape[1]):
            one = slice(t, t + 1)
            token = q[:, one], k[:, one], v[:, one], g[:, one], beta[:, one]
            outputs.append(gated_delta_step(*token, memory))
            state.write(lengths + t + 1, inputs[:, t + 1 : t + 1 + state.window], memory)
        return torch.cat(outputs, 1)

    def _scan(
        self, mixed: Tensor, g: Tensor, beta: Tensor, state: DeltaState | None, ctx: BlockInputs
    ) -> Tensor:
        """Returns [B, T, H, Dv] for whole sequences, or for what follows equally many tokens in
        all rows of the cache."""
        (b, t), starts, cu = mixed.shape[:2], ctx.starts, None
        cached = 0 if ctx.append is None else ctx.append.cached_tokens
        before, memory = (None, None) if state is None or not cached else state.read(cached)
        if starts is not None:
            cu = sequence_bounds(ctx.mask)
            mixed, g, beta, starts = (y.flatten(0, 1)[None] for y in (mixed, g, beta, starts))
        q, k, v = self._convolved(mixed, starts=starts, state=before)
        o, final = gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, state=memory)
        if state is None or ctx.append is None:
            return o.view(b, t, *o.shape[2:])
        if ctx.append.slots is not None:
            bounds = ctx.append.slots.bounds
            rows = mixed.flatten(0, 1), before, bounds[:-1]
            if state.history is None:
                inputs = last_inputs(*rows, bounds[1:], state.window)
                state.write(cached, inputs, final)
            else:
                self._write_history(state, ctx.append, rows, (q, k, v, g, beta), cu, memory)
        elif starts is None:  # packed sequences have no single end to go on from
            first = torch.arange(b, device=mixed.device) * t
            ends = first + (t if ctx.real is None else real_ends(ctx.real))
            inputs = last_inputs(mixed.flatten(0, 1), before, first, ends, state.window)
            state.replace(inputs.detach(), final.detach())
        return o.view(b, t, *o.shape[2:])

    def _write_history(
        self,
        state: DeltaState,
        append: CacheAppend,
        rows: tuple[Tensor, Tensor | None, Tensor],  # of `last_inputs`
        tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],  # q, k, v, g and beta
        cu: Tensor | None,
        memory: Tensor | None,  # before the first token
    ) -> None:
        """Stores the states after all of the last tokens that can be taken back."""
        slots, n = append.slots, state.history
        assert slots is not None and n is not None
        (q, k, v, g, beta), starts, ends = tokens, slots.bounds[:-1], slots.bounds[1:]
        last = (slots.positions >= slots.ends - n).view(*g.shape[:2], 1)
        early, kept = g.masked_fill(last, 0), beta.masked_fill(last, 0)
        _, memory = gated_delta_rule(q, k, v, early, kept, cu_seqlens=cu, state=memory)
        at = torch.maximum(starts, ends - n)
        for i in range(n + 1):
            inputs = last_inputs(*rows, at, state.window)
            state.write(append.cached_tokens + at - starts, inputs, memory)
            if i < n:
                new = at < ends  # rows of fewer tokens are at their end
                index = at.clamp(max=g.shape[0] * g.shape[1] - 1)
                q_t, k_t, v_t, *gates = (y.flatten(0, 1)[index][:, None] for y in tokens)
                g_t, beta_t = (y.masked_fill(~new[:, None, None], 0) for y in gates)
                gated_delta_step(q_t, k_t, v_t, g_t, beta_t, memory)
                at = at + new


def sequence_bounds(mask: AttentionMask) -> Tensor:
    """Returns the bounds int32 [S + 1] of a mask's packed sequences in the flattened batch; raises
    ValueError if the host would have to look at them and cannot."""
    if mask.cu_seq_lens is not None:
        return mask.cu_seq_lens
    sequences = mask.sequences()
    if isinstance(sequences, str):
        raise ValueError(f"packed sequences in Gated DeltaNet: {sequences}")
    return sequences.cu
