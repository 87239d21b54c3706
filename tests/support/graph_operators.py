"""Operators for a tape: as their kernels do, they read no numbers of the GPU on the host.

# N tokens, E experts, C model dim; the rest as in the operators that they play
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.flash import aten_flash, aten_flash_backward
from tigon.kernels.mlp.grouped_mlp import _activate


def grouped_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    act: Any,
    slots: None = None,
    low: Any = None,
    *,
    biases: Any = None,
    transposed: bool = False,
) -> Tensor:
    """`grouped_mlp_ref` of experts that are all here: each row goes through all of them."""
    if low is not None:
        gate_up, down = gate_up + low.b_up @ low.a_up, down + low.b_down @ low.a_down
    if not transposed:
        gate_up, down = gate_up.mT, down.mT
    up, out = (0, 0) if biases is None else (b[:, None] for b in biases)
    y = _activate(x @ gate_up + up, act) @ down + out  # [E, N, C]
    chosen = y.transpose(0, 1).gather(1, experts[..., None].expand(-1, -1, y.shape[-1]))
    return (chosen * weights[..., None].float()).sum(1).to(x.dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    state: None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule_ref`, token by token: a state is forgotten where a sequence begins.

    Without the states behind sequences, which training does not read.
    """
    (b, t), (heads, dim), groups = q.shape[:2], v.shape[2:], v.shape[2] // q.shape[2]
    starts = torch.zeros(t + 1, dtype=torch.bool)
    if cu_seqlens is not None:  # its padding begins behind the last token
        starts = starts.index_fill(0, cu_seqlens.long(), True)
    decay = g.exp().masked_fill(starts[:t, None], 0)[..., None, None]
    q, k = (x.repeat_interleave(groups, 2)[..., None] for x in (q, k))
    memory, outputs = q.new_zeros(b, heads, q.shape[3], dim), []
    for i in range(t):
        memory = memory * decay[:, i]
        error = v[:, i] - (memory * k[:, i]).sum(-2)
        memory = memory + k[:, i] * (beta[:, i, :, None] * error)[..., None, :]
        outputs.append((memory * q[:, i]).sum(-2))
    return torch.stack(outputs, 1), memory


@torch.library.custom_op("tests::flash", mutates_args=())
def flash(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, cu_k: Tensor | None, t: int, s: int,
    causal: bool, scale: float | None, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2 as `flash.played` has it, as one operator with the numbers that it gets."""
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    return aten_flash(q, k, v, cu, cu_k, t, s, 0.0, causal, False, **options)[:2]


@torch.library.custom_op("tests::flash_backward", mutates_args=())
def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu: Tensor | None, cu_k: Tensor | None, t: int, s: int,
    causal: bool, scale: float | None, left: int | None, right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward pass."""
    given = dout, q, k, v, out, lse, cu, cu_k, t, s, 0.0, causal, None, None
    options = {"scale": scale, "window_size_left": left, "window_size_right": right}
    return aten_flash_backward(*given, **options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.rest = inputs[3:]


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    return *flash_backward(dout, *ctx.saved_tensors, *ctx.rest), *[None] * 8


flash.register_autograd(_backward, setup_context=_save)


@pytest.fixture
def flash_on_tape(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-2 serves what it could serve on a Hopper GPU, as an operator on a tape."""

    def forward(*given: Any, **options: Any) -> tuple[Any, ...]:
        *tensors, _, causal, _ = given
        return *flash(*tensors, causal, *options.values()), None, None, None

    def backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
        *tensors, _, causal, _, _ = given
        return flash_backward(*tensors, causal, *options.values())

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
