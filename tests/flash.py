"""GPU backends of attention, played by plain torch: the last call that Tigon makes to each."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels._attention_backends import Choice, Request, choose

implementation = importlib.import_module("tigon.kernels.attention")


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Any, *reach: Any) -> Tensor:
    """FlashAttention's definition: [T, H, D] and [S, K, D], aligned at the last query and key."""
    t, s, groups = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    left, right = (s if side is None else side for side in reach)
    ahead = torch.arange(s) - torch.arange(s - t, s)[:, None]
    seen = (-left <= ahead) & (ahead <= (0 if causal else right))
    scores = torch.einsum("thd,shd->hts", q, k) * (scale or q.shape[-1] ** -0.5)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def in_rows(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    return torch.stack([flash(*row, *options) for row in zip(q, k, v, strict=True)])


def in_sequences(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *options: Any) -> Tensor:
    assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == len(q)
    parts = (x.split(cu.diff().tolist()) for x in (q, k, v))
    return torch.cat([flash(*part, *options) for part in zip(*parts, strict=True)])


class FlashAttn4:
    @staticmethod
    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, **rest):
        assert rest == {"softcap": 0.0, "deterministic": False}
        return in_rows(q, k, v, causal, softmax_scale, *window_size), None

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, **rest
    ):
        assert rest.pop("cu_seqlens_k") is cu_seqlens_q
        assert rest.pop("max_seqlen_k") == max_seqlen_q >= cu_seqlens_q.diff().max()
        assert rest == {"softcap": 0.0, "deterministic": False}
        return in_sequences(q, k, v, cu_seqlens_q, causal, softmax_scale, *window_size), None


def aten_flash(q, k, v, cu, cu_k, t, s, dropout, causal, debug, *, scale, **window):
    options = causal, scale, window.pop("window_size_left"), window.pop("window_size_right")
    assert cu is cu_k and dropout == 0.0 and not debug and not window
    if cu is None:
        assert (t, s) == (q.shape[1], k.shape[1])
        return (in_rows(q, k, v, *options),)
    assert cu.diff().max() == t == s
    return (in_sequences(q, k, v, cu, *options),)


def aten_cudnn(q, k, v, bias, lse, dropout, causal, debug, *, scale):
    assert bias is None and dropout == 0.0 and not debug and lse == q.requires_grad
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (in_rows(q, k, v, causal, scale, None, None).transpose(1, 2),)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend serves a call on the CPU if it could serve it on a Hopper GPU in bf16."""

    def settle(request: Request, backend: str, *_: Any) -> Choice:
        gpu = {"device": "cuda", "sm": 90, "dtype": torch.bfloat16, "head_dim": 64}
        return choose(request._replace(**gpu), backend)

    monkeypatch.setattr(implementation, "settle", settle)
    monkeypatch.setattr(implementation, "flash_attn_4", FlashAttn4)
    monkeypatch.setattr(implementation, "FA4_LEAST", 0)  # so that too short a longest is noticed
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_flash)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", aten_cudnn)
