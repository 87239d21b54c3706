"""Gated DeltaNet: linear attention with a recurrent state, in place of softmax attention.

# B batch, T tokens, N tokens of all rows, K key heads, H value heads, Dk and Dv their dims,
# M = 2 K Dk + H Dv channels of the convolution, W its kernel size, R rows of the
# cache, S sequences

Source: Yang et al. 2024 (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.delta.causal_conv import causal_conv_qkv
from tigon.kernels.delta.delta_gates import delta_gates
from tigon.kernels.delta.gated_delta import MAX_STEP_TOKENS, gated_delta_rule, gated_delta_step
from tigon.layers.context import BlockInputs, CacheAppend
from tigon.layers.float32 import Float32Module
from tigon.layers.kv_state import StateSpec
from tigon.layers.linear import FusedLinear, Linear, RowOrder
from tigon.layers.norm import RMSNorm
from tigon.layers.recurrent_state import RecurrentState, last_inputs, token_bounds


class Decay(Float32Module):
    """Maps a and b [..., H] to the logarithm of each head's decay, and to how much it corrects.

    Decays are in fp32: what a head forgets in a thousand tokens is a power of one.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def init_weights(self) -> None:
        """Sets A_log to the logarithm of numbers from U(0.01, 16), and dt_bias to 1."""
        nn.init.uniform_(self.A_log, 0.01, 16).log_()
        nn.init.ones_(self.dt_bias)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return delta_gates(a, b, self.A_log, self.dt_bias)


class DeltaTokens(NamedTuple):
    """What a layer computes of its tokens from their projections."""

    mixed: Tensor  # [B, T, M], the convolution's input
    g: Tensor  # fp32 [B, T, H], the logarithm of each head's decay
    beta: Tensor  # [B, T, H], how much each head corrects

    def flatten(self) -> Self:
        """Returns the tokens of all rows [N, ...]."""
        return type(self)(*(x.flatten(0, 1) for x in self))

    def masked(self, tokens: Tensor) -> Self:
        """Returns them with those in a mask [B, T, 1] leaving the recurrent state as it is."""
        return self._replace(g=self.g.masked_fill(tokens, 0), beta=self.beta.masked_fill(tokens, 0))


class GatedDeltaNet(nn.Module):
    """The gated delta rule between projections: x [B, T, C] -> [B, T, C].

    Queries, keys and values pass a causal convolution over `kernel_size` tokens; value head h reads
    key head `h // (H // K)`. `interleaved_heads`: checkpoints have one projection of q, k, v and
    the gate z, and one of b and a, with the rows of each key head together; else those of q, k, v
    and of z, b and a each.
    """

    def __init__(
        self,
        dim: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        kernel_size: int,
        eps: float,
        interleaved_heads: bool = False,
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
        if interleaved_heads:
            sizes = key_dim, key_dim, ratio * value_dim, ratio * value_dim
            orders = (
                RowOrder(key_heads, sizes, (0, 1, 2, 3)),
                RowOrder(key_heads, (ratio, ratio), (0, 1)),
            )
            self.in_proj = FusedLinear(dim, (channels + values, 2 * value_heads), orders=orders)
        else:
            self.in_proj = FusedLinear(dim, (channels, values, value_heads, value_heads))
        self.conv1d = nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=False)
        self.decay = Decay(value_heads)
        self.norm = RMSNorm(value_dim, eps)
        self.out_proj = Linear(values, dim, bias=False)

    def make_state(self, spec: StateSpec) -> RecurrentState:
        """Returns an empty state, which has the same size for any `capacity`, and is not quantized:
        it would be rounded again with every token."""
        window = spec.rows, 1, self.conv1d.kernel_size[0] - 1, self.channels
        inputs = torch.zeros(window, dtype=spec.dtype, device=spec.device)
        shape = spec.rows, 1, self.value_heads, self.key_dim, self.value_dim
        return RecurrentState(inputs, torch.zeros(shape, dtype=torch.float32, device=spec.device))

    @property
    def channels(self) -> int:
        """M, the channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def forward(
        self, x: Tensor, rotation: Any, state: RecurrentState | None, ctx: BlockInputs
    ) -> Tensor:
        """Returns [B, T, C] for x [B, T, C]; tokens see those before them in their sequence.

        With a `state`, goes on from it and changes it. Padding leaves it as it is.
        """
        sizes = self.channels, self.value_heads * self.value_dim, self.value_heads, self.value_heads
        mixed, z, b, a = self.in_proj(x, *ctx.dropout_args).split(sizes, -1)
        tokens = DeltaTokens(mixed, *self.decay(a, b))
        if ctx.real is not None:
            tokens = DeltaTokens(*(y.masked_fill(~ctx.real[..., None], 0) for y in tokens))
        if state is None or ctx.append is None:
            o, _ = self._scan(tokens, ctx)
        else:
            self._check_gradients(tokens, ctx.append)
            if ctx.append.lengths is not None:
                o = self._step(tokens, state, ctx.append.lengths)
            else:
                o = self._append(tokens, state, ctx, ctx.append)
        y = self.norm(o, z.unflatten(-1, (-1, self.value_dim)))
        return self.out_proj(y.flatten(2), *ctx.dropout_args)

    def _check_gradients(self, tokens: DeltaTokens, append: CacheAppend) -> None:
        """Raises ValueError if this pass has gradients, which would not reach the tokens before."""
        is_first = append.lengths is None and append.slots is None and not append.cached_tokens
        inputs = *tokens, self.conv1d.weight
        if not is_first and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            raise ValueError(
                "a state of Gated DeltaNet keeps no gradients: call the model inside "
                "torch.no_grad() or torch.inference_mode(), or without a cache"
            )

    def _convolve(self, mixed: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q and k [B, T, K, Dk], and v [B, T, H, Dv]."""
        options |= {"key_heads": self.key_heads, "key_dim": self.key_dim}
        q, k, v = causal_conv_qkv(mixed, self.conv1d.weight[:, 0], **options)
        return q, k, v.unflatten(-1, (-1, self.value_dim))

    def _scan(
        self,
        tokens: DeltaTokens,
        ctx: BlockInputs,
        inputs: Tensor | None = None,  # [R, W - 1, M], of the convolution before the first token
        recurrent_state: Tensor | None = None,  # [R, H, Dk, Dv], before it; None: zeros
    ) -> tuple[Tensor, Tensor]:
        """Returns [B, T, H, Dv] for the tokens of whole sequences, or for those that follow a
        state, and the recurrent state behind each sequence [S, H, Dk, Dv]."""
        (mixed, g, beta), starts, cu = tokens, ctx.starts, None
        if starts is not None:
            cu = sequence_bounds(ctx.mask)
            mixed, g, beta, starts = (y.flatten(0, 1)[None] for y in (mixed, g, beta, starts))
        q, k, v = self._convolve(mixed, starts=starts, state=inputs)
        o, final = gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, state=recurrent_state)
        return o.view(*tokens.g.shape, self.value_dim), final

    def _append(
        self, tokens: DeltaTokens, state: RecurrentState, ctx: BlockInputs, append: CacheAppend
    ) -> Tensor:
        """Returns [B, T, H, Dv] for prompts, or for what follows equally many tokens in all rows;
        their last tokens, as many as can be taken back, are steps."""
        cached, slots = append.cached_tokens, append.slots
        before = state.read(cached) if cached else (None, None)
        starts, ends = token_bounds(tokens.mixed, ctx)
        flat = tokens.flatten()
        if slots is None or not state.history:
            o, final = self._scan(tokens, ctx, *before)
            inputs = last_inputs(flat.mixed, before[0], starts, ends, state.window)
            if slots is not None:
                state.write(cached + ends - starts, inputs, final)
            elif ctx.starts is None:  # packed sequences have no single end to go on from
                state.replace(inputs.detach(), final.detach())
            return o
        steps = min(state.history, len(flat.g))
        at = torch.maximum(starts, ends - steps)  # the first token that can be taken back
        token = torch.arange(len(flat.g), device=at.device)
        recent = (token >= at[slots.rows]).view(*tokens.g.shape[:2], 1)
        o, final = self._scan(tokens.masked(recent), ctx, *before)
        lengths = cached + at - starts
        state.write(lengths, last_inputs(flat.mixed, before[0], starts, at, state.window), final)
        # A row of fewer tokens than steps takes more behind its end, which change nothing
        index = at[:, None] + torch.arange(steps, device=at.device)
        late = DeltaTokens(*(y[index.clamp(max=len(y) - 1)] for y in flat))
        of_late = self._step(late.masked((index >= ends[:, None])[..., None]), state, lengths)
        of_late = of_late[slots.rows, (token - at[slots.rows]).clamp(0, steps - 1)]
        return torch.where(recent[..., None], of_late.view(o.shape), o)

    def _step(self, tokens: DeltaTokens, state: RecurrentState, lengths: Tensor) -> Tensor:
        """Returns [R, T, H, Dv] for T new tokens of every row, which hold `lengths` [R]."""
        inputs, recurrent_state = state.read(lengths)
        mixed, g, beta = tokens
        if state.history is None:
            q, k, v = self._convolve(mixed, state=inputs, update_state=True)
            if mixed.shape[1] <= MAX_STEP_TOKENS:
                return gated_delta_step(q, k, v, g, beta, recurrent_state)
            o, final = gated_delta_rule(q, k, v, g, beta, state=recurrent_state)
            recurrent_state.copy_(final)
            return o
        q, k, v = self._convolve(mixed, state=inputs)
        inputs = torch.cat((inputs, mixed.to(inputs.dtype)), 1)
        outputs = []
        for t in range(mixed.shape[1]):
            one = slice(t, t + 1)
            token = q[:, one], k[:, one], v[:, one], g[:, one], beta[:, one]
            outputs.append(gated_delta_step(*token, recurrent_state))
            last = inputs[:, t + 1 : t + 1 + state.window]
            state.write(lengths + t + 1, last, recurrent_state)
        return torch.cat(outputs, 1)


def sequence_bounds(mask: AttentionMask) -> Tensor:
    """Returns the bounds int32 [S + 1] of a mask's packed sequences in the flattened batch; raises
    ValueError if the host would have to look at them and cannot."""
    if mask.cu_seq_lens is not None:
        return mask.cu_seq_lens
    sequences = mask.sequences()
    if isinstance(sequences, str):
        raise ValueError(f"packed sequences in Gated DeltaNet: {sequences}")
    return sequences.cu
