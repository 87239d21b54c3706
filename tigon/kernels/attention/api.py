"""Causal attention with grouped heads, packed sequences, padding, windows, softcap and sinks.

Backends, by the names that `attention=` takes: "fa4" flash-attn-4 (Hopper, Blackwell; an extra),
"cudnn" and "flash" (FlashAttention-2, also packed) as torch has them, "triton" Tigon's kernels, for
head dims above 256, "flex" FlexAttention, "sdpa" torch's own choice with a dense mask where one is
needed, "reference".

# B batch, T query tokens, S key tokens, H query heads, K kv heads, D head dim
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from tigon.kernels import runtime
from tigon.kernels.attention import fa4
from tigon.kernels.attention.backends import (
    AttentionRequest,
    BackendChoice,
    capability,
    flash_attn_4,
    fused_shapes,
    select_backend,
)
from tigon.kernels.attention.mask import AttentionMask
from tigon.kernels.attention.sequences import Sequences
from tigon.kernels.attention.sinks import AttentionWithSinks, FusedPasses, scale_by_sinks
from tigon.kernels.attention.wide import wide_attention
from tigon.kernels.saved_sources import save_sources

FA4_MIN_SEQLEN = 512  # below it as the longest sequence, flash-attn-4 would compile once more
FLEX_MULTIPLE = 256  # FlexAttention compiles for every length: rows are padded to a multiple

Bounds: TypeAlias = tuple[Tensor | None, Tensor | None]  # cu_seqlens of queries and of keys


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`softmax(cap(q k^T * scale)) v`, fp32 inside, over the keys that `mask` allows.

    With `sinks` [H] the softmax is over one more score, the head's sink, whose value is 0.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.float() @ k.float().transpose(-1, -2) * scale  # [B, H, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.dense(window, q.device), float("-inf"))
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return (probabilities @ v.float()).to(q.dtype).transpose(1, 2)


class AttentionPlan(NamedTuple):
    """The backend and layout by which layers of one kind compute attention in this forward pass."""

    choice: BackendChoice
    window: int | None  # None also where no sequence is longer
    softcap: float | None
    scale: float | None
    sequences: Sequences | None = None  # of packed rows; None: the mask says all
    even: AttentionMask | None = None  # in place of `sequences`, if all have one length

    def reach(self, causal: bool) -> tuple[int | None, int | None]:
        """Returns how many tokens before and after itself a query in a window sees; None is all."""
        if self.window is None:
            return None, None
        return self.window - 1, 0 if causal else self.window - 1


def _fa4(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns flash-attn-4's attention [B, T, H, D] in the sequences of the plan, or in rows."""
    is_op = torch.compiler.is_compiling() or runtime.launches_on_fakes()
    if is_op or sinks is not None:
        return _run_passes(_fa4_passes, q, k, v, mask, plan, sinks)
    options: dict[str, Any] = {
        "softmax_scale": plan.scale,
        "causal": mask.causal,
        "window_size": plan.reach(mask.causal),
        "softcap": plan.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_lse": True,  # without it evaluation would compile a kernel of its own
    }
    if plan.sequences is None:
        return flash_attn_4().flash_attn_func(q, k, v, **options)[0]
    flat, (cu, cu_k), (longest, longest_k) = _flatten_sequences(q, k, v, plan.sequences)
    out = flash_attn_4().flash_attn_varlen_func(
        *flat,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max(longest, FA4_MIN_SEQLEN),
        max_seqlen_k=max(longest_k, FA4_MIN_SEQLEN),
        **options,
    )[0]
    return out.view(q.shape)


def _run_passes(
    make_passes: Callable[..., FusedPasses],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    plan: AttentionPlan,
    sinks: Tensor | None,
) -> Tensor:
    """Returns attention [B, T, H, D] by the passes that `make_passes` makes of bounds and longest
    lengths, mask and plan; without sinks by the forward pass, which autograd knows."""
    flat, bounds, longest = _flatten_sequences(q, k, v, plan.sequences)
    passes = make_passes(bounds, longest, mask, plan)
    if sinks is None:
        out = passes.forward(*flat)[0]
    else:
        out = AttentionWithSinks.apply(*flat, sinks, passes)
    return out if plan.sequences is None else out.view(q.shape)


def _fa4_passes(
    bounds: Bounds, longest: tuple[int, int], mask: AttentionMask, plan: AttentionPlan
) -> FusedPasses:
    """Returns flash-attn-4's passes over sequences with these bounds, or over rows without."""
    lengths = (None, None) if bounds[0] is None else [max(n, FA4_MIN_SEQLEN) for n in longest]
    options = *bounds, *lengths, plan.scale, mask.causal, *plan.reach(mask.causal)
    options = *options, plan.softcap or 0.0, torch.are_deterministic_algorithms_enabled()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return *fa4._forward(q, k, v, *options), ()

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        return fa4._backward(q, k, v, out, dout, lse, *options)

    return FusedPasses(forward, backward)


def _flash_passes(
    bounds: Bounds, longest: tuple[int, int], mask: AttentionMask, plan: AttentionPlan
) -> FusedPasses:
    """Returns the passes of torch's FlashAttention-2."""
    # The operators that varlen_attn and SDPA call: cheaper on the host, and with windows for rows
    causal, (left, right) = mask.causal and plan.window is None, plan.reach(mask.causal)
    options = {"scale": plan.scale, "window_size_left": left, "window_size_right": right}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        run = torch.ops.aten._flash_attention_forward
        out, lse, *rest, _ = run(q, k, v, *bounds, *longest, 0.0, causal, False, **options)
        return out, lse, (*rest,)

    def backward(dout: Tensor, *saved: Tensor) -> Any:
        (*given, rng, unused), run = saved, torch.ops.aten._flash_attention_backward
        middle = *bounds, *longest, 0.0, causal, rng, unused
        return run(dout, *given, *middle, **options)

    return FusedPasses(forward, backward)


def _flatten_sequences(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Bounds, tuple[int, int]]:
    """Returns flat q, k and v, and cu_seqlens and the longest length of queries and of keys;
    without sequences q, k and v as they are, and no cu_seqlens.

    If these differ, the last query of a sequence sees all its keys.
    """
    if sequences is None:
        return (q, k, v), (None, None), (q.shape[1], k.shape[1])
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    cu, longest, keys = sequences
    if keys is None:
        return (q, k, v), (cu, cu), (longest, longest)
    return (q, keys.take(k), keys.take(v)), (cu, keys.cu), (longest, keys.longest)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns cuDNN's attention [B, T, H, D] over whole rows, causal or not."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    run, grad = torch.ops.aten._scaled_dot_product_cudnn_attention, _needs_grad(q, k, v)
    out = run(*heads, None, grad, 0.0, mask.causal, False, scale=plan.scale)[0]
    return out.transpose(1, 2)


def _triton(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns the attention [B, T, H, D] of Tigon's kernels."""
    flat, bounds, longest = _flatten_sequences(q, k, v, plan.sequences)
    if plan.sequences is None:
        flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    left, right = plan.reach(mask.causal)
    reach = left, 0 if mask.causal else right
    return wide_attention(*flat, bounds, longest, scale=plan.scale, reach=reach).view(q.shape)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns FlexAttention's [B, T, H, D] with the mask's blocks, and the softcap as a score_mod.

    Outside of torch.compile, rows are padded to a multiple of FLEX_MULTIPLE, and it is compiled for
    each kind of call.
    """
    if runtime.launches_on_fakes():  # what torch.compile makes would run at addresses of nothing
        return fused_shapes(q, k, v, sinks)
    run: Callable[..., Any] = flex_attention
    b, t = q.shape[:2]
    if not torch.compiler.is_compiling():
        tokens = t + -t % FLEX_MULTIPLE
        keys = max(mask.keys, mask.past + tokens)
        keys += -keys % FLEX_MULTIPLE
        if (tokens, keys) != (t, mask.keys):
            sizes = (tokens, q), (keys, k), (keys, v)
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, size - x.shape[1])) for size, x in sizes)
            mask = mask.pad(tokens, keys, b, q.device)
        form = mask.causal, mask.segment_ids is None, mask.key_mask is None, mask.past > 0
        kind = q.shape, k.shape, q.dtype, q.device, _needs_grad(q, k, v), form, sinks is None
        run = _compiled_flex(*kind, plan.window, plan.softcap, plan.scale)
    cap = plan.softcap
    out = run(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=None if cap is None else lambda score, *_: cap * torch.tanh(score / cap),
        block_mask=mask.blocks(plan.window, q.device),
        scale=plan.scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        out = scale_by_sinks(out[0], out[1].lse, sinks)
    return out.transpose(1, 2)[:, :t]


@functools.cache
def _compiled_flex(*kind: Any) -> Callable[..., Any]:
    """Returns FlexAttention compiled for one kind of call: torch 2.11 fails on dynamic lengths."""

    def run(*tensors: Any, **options: Any) -> Any:
        return flex_attention(*tensors, **options)

    # Dynamo compiles a code object at most eight times. Then it runs eagerly, which materializes
    # all scores, and only warns. So each kind of call has a code object of its own
    run.__code__ = run.__code__.replace()
    return torch.compile(run, dynamic=False, fullgraph=True)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns F.scaled_dot_product_attention's [B, T, H, D], with a dense mask where `is_causal` is
    not enough; on a CPU packed sequences one by one, where that pays."""
    eager_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager_cpu and (masks := mask.split_sequences(len(q))):
        sizes = [one.tokens for one in masks]
        parts = (x.flatten(0, 1)[None].split(sizes, 1) for x in (q, k, v))
        each = zip(*parts, masks, strict=True)
        outputs = [_sdpa(x, y, z, one, plan, sinks) for x, y, z, one in each]
        return torch.cat(outputs, 1).view(q.shape)
    window, scale = plan.window, plan.scale
    bias = mask.bias(window, q.dtype, q.device) if mask.needs_dense(window) else None
    b, t, h, d = q.shape
    kv_heads = k.shape[2]
    causal = bias is None and mask.causal
    if t == 1:  # `and` would be symbolic for dynamic lengths, which SDPA refuses
        causal = False
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if t == 1 and h != kv_heads:
        # One token per row: the heads of a group become the queries of their kv head
        grouped = q.reshape(b, kv_heads, h // kv_heads, d)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bias, scale=scale)
        return out.reshape(b, t, h, d)
    if (bias is not None or d > 256) and q.is_cuda and h != kv_heads:
        # With a mask or wide heads, SDPA's only kernel for grouped heads materializes all scores
        k, v = (x.repeat_interleave(h // kv_heads, 1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=bias,
        is_causal=causal,
        scale=scale,
        enable_gqa=k.shape[1] != h,
    ).transpose(1, 2)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: AttentionPlan, sinks: Tensor | None
) -> Tensor:
    """Returns `attention_ref` by the plan."""
    options: dict[str, Any] = {"softcap": plan.softcap, "scale": plan.scale, "sinks": sinks}
    return attention_ref(q, k, v, mask=mask, window=plan.window, **options)


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "fa4": _fa4,
    "cudnn": _cudnn,
    "flash": functools.partial(_run_passes, _flash_passes),
    "triton": _triton,
    "flex": _flex,
    "sdpa": _sdpa,
    "reference": _reference,
}
VARLEN_BACKENDS = ("fa4", "cudnn", "flash", "triton")  # take the bounds of sequences, not a mask


def attention(
    q: Tensor,  # [B, T, H, D]
    k: Tensor,  # [B, S, K, D]
    v: Tensor,  # [B, S, K, D]
    *,
    mask: AttentionMask,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Returns the attention output [B, T, H, D]; head h reads kv head `h // (H / K)`.

    A window of W covers W tokens, including the query's own. `scale` defaults to D ** -0.5. A sink
    is one more score of its head in every softmax, neither scaled nor masked, whose value is 0.
    `mask.backend` names the backend; docs/attention.md says what "auto" takes. Raises ValueError,
    with the reason, if the named backend cannot serve the call, and for shapes that do not match.
    """
    _check_inputs(q, k, v, mask, window, softcap, sinks)
    if q.is_meta and runtime.runs_triton(q):
        with save_sources(q, k, v):
            return _attention_meta(q, k, v, mask, sinks)
    kind = (window, softcap, scale, sinks is not None, _needs_grad(q, k, v, sinks))
    if torch.compiler.is_compiling():
        plan = _plan(q, mask, *kind)
    else:
        key = (q.dtype, q.shape[-1], *kind)
        if key not in mask.plans:
            mask.plans[key] = _plan(q, mask, *kind)
        plan = mask.plans[key]
    run = BACKENDS[plan.choice.name]
    if plan.choice.name == "flex":  # torch.compile makes it, and does not trace hooks
        return run(q, k, v, mask, plan, sinks)
    with save_sources(q, k, v):
        if plan.even is None:
            return run(q, k, v, mask, plan, sinks)
        rows = (x.reshape(-1, plan.even.tokens, *x.shape[2:]) for x in (q, k, v))
        return run(*rows, plan.even, plan, sinks).reshape(q.shape)


def _attention_meta(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sinks: Tensor | None
) -> Tensor:
    """Allocates what a backend with cu_seqlens does, for tensors on meta."""
    sequences = None
    if mask.prefixes is not None and mask.backend in ("auto", *VARLEN_BACKENDS):
        sequences = mask.sequences()
    if not isinstance(sequences, Sequences):
        return fused_shapes(q, k, v, sinks)
    (x, y, z), *_ = _flatten_sequences(q, k, v, sequences)
    return fused_shapes(x[None], y[None], z[None], sinks).view(q.shape)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raises ValueError for shapes, a window or a softcap that no backend takes."""
    b, t, h, d = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    s = mask.keys
    if t != mask.tokens:
        raise ValueError(
            f"q {tuple(q.shape)} is not [B, T, H, D] with the mask's {mask.tokens} tokens"
        )
    if k.dim() != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (b, s, d) or k.shape != v.shape:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} are not [{b}, {s}, K, {d}]: q is "
            f"{tuple(q.shape)}, and the mask has {mask.past} tokens before its {mask.tokens}"
        )
    if h % k.shape[2]:
        raise ValueError(f"{h} query heads cannot share {k.shape[2]} key/value heads")
    if sinks is not None and sinks.shape != (h,):
        raise ValueError(f"sinks {tuple(sinks.shape)} are not one for each of {h} query heads")
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} is not above 0; None disables it")


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> bool:
    """Whether autograd records a call on these tensors."""
    learned = q.requires_grad or k.requires_grad or v.requires_grad
    return torch.is_grad_enabled() and (learned or (sinks is not None and sinks.requires_grad))


def _plan(
    q: Tensor,
    mask: AttentionMask,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    sinks: bool,
    grad: bool,
) -> AttentionPlan:
    """Chooses backend and layout; may wait for the device to learn the lengths of the sequences."""
    compiling, gpu = torch.compiler.is_compiling(), q.device.type == "cuda"
    longest, part = mask.keys, mask.full_mask is not None
    if window is not None and window >= longest:
        window = None
    request = AttentionRequest(
        q.device.type,
        capability(q.device.index) if gpu else 0,
        q.dtype,
        q.shape[-1],
        longest=None if compiling else longest,
        layout="a window ends before the keys do" if window is not None and mask.after else "rows",
        cached=mask.past > 0 and not part,
        part=part,
        single=mask.tokens == 1,
        window=window is not None,
        softcap=softcap is not None,
        sinks=sinks,
        grad=grad,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compiling=compiling,
    )
    machine = mask.backend, q.device.index if gpu else 0, runtime._mode == "reference"
    choice = select_backend(request, *machine)
    plan = AttentionPlan(choice, window, softcap, scale)
    if mask.rows or choice.name not in VARLEN_BACKENDS:
        return plan
    sequences = mask.sequences()
    if isinstance(sequences, str):
        return plan._replace(choice=select_backend(request._replace(layout=sequences), *machine))
    if window is not None and window >= sequences.furthest:
        window = None
    even = not part and sequences.even(mask.tokens * q.shape[0])
    request = request._replace(
        layout="rows" if even else "sequences",
        longest=None if compiling else sequences.furthest,
        window=window is not None,
    )
    choice = select_backend(request, *machine)
    if even:
        return AttentionPlan(choice, window, softcap, scale, even=mask.even(sequences.longest))
    return AttentionPlan(choice, window, softcap, scale, sequences=sequences)
