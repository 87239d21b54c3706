"""GPU backends of attention, played by plain torch: the last call that Tigon makes to each."""

import importlib
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tigon.kernels.attention import backends
from tigon.kernels.attention.backends import AttentionRequest, BackendChoice, choose_backend

implementation = importlib.import_module("tigon.kernels.attention.api")


def scores(q: Tensor, k: Tensor, causal: bool, scale: Any, *reach: Any) -> Tensor:
    """Of [T, H, D] and [S, K, D], aligned at the last query and key: [H, T, S]."""
    t, s, groups = len(q), len(k), q.shape[1] // k.shape[1]
    left, right = (s if side is None else side for side in reach)
    ahead = torch.arange(s) - torch.arange(s - t, s)[:, None]
    seen = (-left <= ahead) & (ahead <= (0 if causal else right))
    found = torch.einsum("thd,shd->hts", q, k.repeat_interleave(groups, 1))
    return (found * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -math.inf)


def flash(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """FlashAttention's definition."""
    v = v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("hts,shd->thd", scores(q, k, *options).softmax(-1), v)


def flash_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """As the kernels compute them, from the output and the lse [H, T] that they are given."""
    groups, scale = q.shape[1] // k.shape[1], options[1] or q.shape[-1] ** -0.5
    p = (scores(q, k, *options) - lse[..., None]).exp()
    dp = torch.einsum("thd,shd->hts", dout, v.repeat_interleave(groups, 1))
    ds = p * (dp - (out * dout).sum(-1).T[..., None]) * scale
    dq = torch.einsum("hts,shd->thd", ds, k.repeat_interleave(groups, 1))
    pairs = (torch.einsum("hts,thd->shd", *pair) for pair in ((ds, q), (p, dout)))
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in pairs)


def in_rows(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return torch.stack([flash(*row, *options) for row in zip(q, k, v, strict=True)])


def in_sequences(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cu_k: Tensor, *options: Any
) -> Tensor:
    """Of `cu` for queries and `cu_k` for keys and values."""
    for bounds, x in ((cu, q), (cu_k, k)):
        assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(x)
    parts = (x.split(bounds.diff().tolist()) for x, bounds in ((q, cu), (k, cu_k), (v, cu_k)))
    return torch.cat([flash(*part, *options) for part in zip(*parts, strict=True)])


def sequences_of(x: Tensor, cu: Tensor | None, dim: int = 0) -> tuple[Tensor, ...]:
    return x.unbind() if cu is None else x.split(cu.diff().tolist(), dim)


class Interface:
    """The inner functions of flash-attn-4, which take no part in autograd."""

    told: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def _reach(cls, **options: Any) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """Bounds of q, k and v, and what `scores` takes."""
        cls.told.append(options)
        bounds = [options[f"cu_seqlens_{of}"] for of in "qk"]
        for of, cu in zip("qk", bounds, strict=True):
            longest = options[f"max_seqlen_{of}"]
            assert (cu is None) == (longest is None) and (cu is None or longest >= cu.diff().max())
        names = ("causal", "softmax_scale", "window_size_left", "window_size_right")
        return (*bounds, bounds[1]), tuple(options[name] for name in names)

    @classmethod
    def _flash_attn_fwd(cls, q, k, v, *, return_lse, **options):
        assert return_lse
        bounds, reach = cls._reach(**options)
        cu = bounds[0]
        parts = zip(*map(sequences_of, (q, k, v), bounds), strict=True)
        out, lse = [], []
        for a, b, c in parts:
            out.append(flash(a, b, c, *reach))
            lse.append(scores(a, b, *reach).logsumexp(-1))
        join = torch.stack if cu is None else torch.cat
        return join(out), torch.stack(lse) if cu is None else torch.cat(lse, 1), None, None, None

    @classmethod
    def _flash_attn_bwd(cls, q, k, v, out, dout, lse, *, dq, dk, dv, **options):
        bounds, reach = cls._reach(**options)
        cu, of = bounds[0], (*bounds, bounds[0], bounds[0], *bounds)
        parts = list(map(sequences_of, (q, k, v, out, dout, dq, dk, dv), of))
        parts.append(sequences_of(lse, cu, 1))
        for a, b, c, o, do, *grads, s in zip(*parts, strict=True):
            for x, found in zip(grads, flash_gradients(a, b, c, o, do, s, *reach), strict=True):
                x.copy_(found)
        return dq, dk, dv


class FlashAttn4:
    interface = Interface

    @staticmethod
    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, **rest):
        assert rest == {"softcap": 0.0, "deterministic": False, "return_lse": True}
        return in_rows(q, k, v, causal, softmax_scale, *window_size), None

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size, **rest
    ):
        assert rest.pop("max_seqlen_q") >= cu_seqlens_q.diff().max()
        assert rest.pop("max_seqlen_k") >= cu_seqlens_k.diff().max()
        assert rest == {"softcap": 0.0, "deterministic": False, "return_lse": True}
        bounds = cu_seqlens_q, cu_seqlens_k
        return in_sequences(q, k, v, *bounds, causal, softmax_scale, *window_size), None


def aten_flash(q, k, v, cu, cu_k, t, s, dropout, causal, debug, *, scale, **window):
    options = causal, scale, window.pop("window_size_left"), window.pop("window_size_right")
    assert dropout == 0.0 and not debug and not window
    if cu is None:
        assert cu_k is None
        assert (t, s) == (q.shape[1], k.shape[1])
    else:
        assert cu.diff().max() <= t and cu_k.diff().max() <= s
    pairs = zip(sequences_of(q, cu), sequences_of(k, cu_k), strict=True)
    lse = [scores(*pair, *options).logsumexp(-1) for pair in pairs]
    state = None, None, None  # of dropout
    if cu is None:
        return in_rows(q, k, v, *options), torch.stack(lse), *state
    return in_sequences(q, k, v, cu, cu_k, *options), torch.cat(lse, 1), *state


def aten_flash_backward(
    dout, q, k, v, out, lse, cu, cu_k, t, s, dropout, causal, rng, unused, *, scale, **window
):
    options = causal, scale, window.pop("window_size_left"), window.pop("window_size_right")
    assert dropout == 0.0 and rng is None and unused is None and not window
    assert cu is not None or (t, s) == (q.shape[1], k.shape[1])
    parts = [sequences_of(x, cu) for x in (q, out, dout)] + [sequences_of(lse, cu, 1)]
    parts += [sequences_of(x, cu_k) for x in (k, v)]
    found = [
        flash_gradients(a, b, c, o, do, e, *options)
        for a, o, do, e, b, c in zip(*parts, strict=True)
    ]
    return tuple(map(torch.stack if cu is None else torch.cat, zip(*found, strict=True)))


def aten_cudnn(q, k, v, bias, lse, dropout, causal, debug, *, scale):
    assert bias is None and dropout == 0.0 and not debug and lse == q.requires_grad
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (in_rows(q, k, v, causal, scale, None, None).transpose(1, 2),)


def _play(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(request: AttentionRequest, backend: str, *_: Any) -> BackendChoice:
        gpu = {"device": "cuda", "sm": 90, "dtype": torch.bfloat16, "head_dim": 64}
        return choose_backend(request._replace(**gpu), backend)

    monkeypatch.setattr(implementation, "select_backend", settle)
    monkeypatch.setattr(implementation, "flash_attn_4", FlashAttn4)
    monkeypatch.setattr(backends, "flash_attn_4", FlashAttn4)
    monkeypatch.setattr(Interface, "told", [])
    monkeypatch.setattr(
        implementation, "FA4_MIN_SEQLEN", 0
    )  # so that too short a longest is noticed


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """`played`, but for torch's own ops, which torch.compile would not know again."""
    _play(monkeypatch)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend serves a call on the CPU if it could serve it on a Hopper GPU in bf16."""
    _play(monkeypatch)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_flash_backward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", aten_cudnn)
