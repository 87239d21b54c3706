"""Problems of the operators that one pass over memory bounds: norms, gated activation, RoPE.

Every provider gets the layout that it likes best: where Tigon reads one packed tensor, the plain
formulas and Liger get the separate tensors that transformers would hand to them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.measure import Problem, Provider, Run, Tensors, leaf, randn, truth
from bench.peers import call, imported, liger, plain, quack, tigon

EPS = 1e-6
FP64 = torch.float64
LIGER = "liger_kernel.transformers.functional:"
QUACK_NORM = "rmsnorm:rmsnorm"


def by_rows(
    rows: Tensors,
    shared: Tensors,
    outputs: Tensors,  # the gradients that come in
    define: Callable[..., Any],
    providers: list[Provider],
) -> Problem:
    names, upstream = tuple(outputs), tuple(outputs.values())
    exact = partial(truth, define, rows, shared, names, upstream)
    return Problem(rows | shared, names, upstream, exact, providers)


def rms_norm(n: int, c: int) -> Problem:
    x, w, dy = leaf(n, c), leaf(c, scale=0.1, shift=1.0), randn(n, c)
    args = (x, w, EPS)
    providers = [
        tigon("rms_norm", *args),
        *plain(peers.llama_norm, *args),
        Provider("F.rms_norm", lambda: partial(F.rms_norm, x, (c,), w, EPS)),
        # by default it writes dx over dy
        liger("liger_rms_norm", *args, overwrites=(dy,)),
        quack(QUACK_NORM, x, w, eps=EPS),
    ]
    exact = partial(peers.llama_norm, eps=EPS, up=FP64)
    return by_rows({"x": x}, {"weight": w}, {"y": dy}, exact, providers)


def rms_norm_residual(n: int, c: int) -> Problem:
    x, r, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1, shift=1.0)
    upstream = {"normed": randn(n, c), "total": randn(n, c)}
    args = (x, r, w, EPS)
    providers = [
        tigon("rms_norm", x, w, EPS, residual=r),
        *plain(peers.add_norm, *args),
        liger("liger_fused_add_rms_norm", *args, overwrites=(upstream["normed"],)),
        quack(QUACK_NORM, x, w, residual=r, eps=EPS, prenorm=True),
    ]
    exact = partial(peers.add_norm, eps=EPS, up=FP64)
    return by_rows({"x": x, "residual": r}, {"weight": w}, upstream, exact, providers)


def sandwich_norm(n: int, c: int) -> Problem:
    x, r, post, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1), leaf(c, scale=0.1)
    upstream = {"normed": randn(n, c), "total": randn(n, c)}
    args = (x, r, post, w, EPS)

    def of_liger() -> Run:
        norm = imported(f"{LIGER}liger_rms_norm")
        add_norm = imported(f"{LIGER}liger_fused_add_rms_norm")

        def run() -> tuple[Tensor, Tensor]:
            # not in place, as Liger runs Gemma: the gradient it would write over is used twice
            branch = norm(x, post, EPS, 1.0, "gemma", False)
            return add_norm(branch, r, w, EPS, 1.0, "gemma", False)

        return run

    def of_quack() -> Run:
        norm = partial(imported(f"quack.{QUACK_NORM}"), eps=EPS, weight_offset=1.0)
        return lambda: norm(norm(x, post), w, residual=r, prenorm=True)

    providers = [
        tigon("sandwich_norm", *args),
        *plain(peers.sandwich, *args),
        Provider("Liger", of_liger),
        Provider("QuACK", of_quack),
    ]
    shared = {"post_weight": post, "weight": w}
    exact = partial(peers.sandwich, eps=EPS, up=FP64)
    return by_rows({"x": x, "residual": r}, shared, upstream, exact, providers)


def gated_act(n: int, i: int, act: str) -> Problem:
    gate_up, dy = leaf(n, 2 * i), randn(n, i)
    gate, up = (half.contiguous().requires_grad_() for half in gate_up.detach().chunk(2, -1))

    def halves(results: Tensors) -> Tensors:
        d_gate, d_up = results["dgate_up"].chunk(2, -1)
        return {"y": results["y"], "dgate": d_gate, "dup": d_up}

    packed: dict[str, Any] = {"leaves": {"gate_up": gate_up}, "split": halves}
    # overwrite asks for what a projection gives: no leaf, and all of its memory
    owned = gate_up.detach().requires_grad_().clone()
    own = packed | {"leaves": {"gate_up": owned}, "overwrites": (owned,)}
    name = "liger_swiglu" if act == "silu" else "liger_geglu"
    ours = "tigon.kernels:gated_act"
    providers = [
        Provider("tigon", call(ours, gate_up, act), **packed),
        Provider("tigon overwrite", call(ours, owned, act, overwrite=True), **own),
        *plain(peers.gated, gate, up, act),
        # writes both gradients over what it saved
        liger(name, gate, up, overwrites=(gate, up)),
    ]
    if act == "silu":
        path = "liger_kernel.ops.swiglu:LigerFusedGateUpSiLUMulFunction"
        providers.append(
            Provider("Liger packed", lambda: partial(imported(path).apply, gate_up), **packed)
        )
    exact = partial(peers.gated, act=act)
    return by_rows({"gate": gate, "up": up}, {}, {"y": dy}, exact, providers)


def tables(t: int, d: int) -> tuple[list[Tensor], list[Tensor]]:
    """Cosine and sine of Llama 3's base: [1, T, D/2] in fp32, and [1, T, D] in fp64."""
    inverse = 500000.0 ** (-torch.arange(0, d, 2, dtype=FP64) / d)
    angle = (torch.arange(t, dtype=FP64)[:, None] * inverse)[None]
    wide = torch.cat((angle, angle), -1)
    return [angle.cos().float(), angle.sin().float()], [wide.cos(), wide.sin()]


def heads_first(rotate: Callable[..., Any], q: Tensor, k: Tensor, *args: Tensor) -> Any:
    """RoPE by a function of [B, heads, T, D]."""
    out = rotate(q.transpose(1, 2), k.transpose(1, 2), *args)
    return tuple(x.transpose(1, 2) for x in out)


def rope(b: int, t: int, h: int, k: int, d: int) -> Problem:
    q_in, k_in = leaf(b, t, h, d), leaf(b, t, k, d)
    upstream = {"q": randn(b, t, h, d), "k": randn(b, t, k, d)}
    table, wide = tables(t, d)
    rounded = [x.bfloat16() for x in wide]

    def of_liger() -> Run:
        return partial(heads_first, imported(f"{LIGER}liger_rope"), q_in, k_in, *rounded)

    providers = [
        tigon("rope", q_in, k_in, *table),
        *plain(peers.rope, q_in, k_in, *rounded),
        # rotates in place, forward and backward
        Provider("Liger", of_liger, overwrites=(q_in, k_in, *upstream.values())),
    ]
    rows = {"q_in": q_in, "k_in": k_in}
    return by_rows(rows, {}, upstream, lambda q, k: peers.rope(q, k, *wide), providers)


def qk_norm_rope(b: int, t: int, h: int, k: int, d: int) -> Problem:
    qkv = leaf(b, t, (h + 2 * k) * d)
    widths = (h * d, k * d, k * d)

    def heads(packed: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (-1, d)) for x in packed.split(widths, -1)]

    q_in, k_in = (x.contiguous().requires_grad_() for x in heads(qkv.detach())[:2])
    q_w, k_w = (leaf(d, scale=0.1, shift=1.0) for _ in range(2))
    upstream = {"q": randn(b, t, h, d), "k": randn(b, t, k, d)}
    dv = randn(b, t, k, d)
    weights = {"q_weight": q_w, "k_weight": k_w}
    table, wide = tables(t, d)
    rounded = [x.bfloat16() for x in wide]

    def apart(results: Tensors) -> Tensors:
        d_q, d_k, _ = heads(results["dqkv"])
        return {**results, "dq_in": d_q, "dk_in": d_k}

    def of_liger() -> Run:
        norm, rotate = (imported(f"{LIGER}{name}") for name in ("liger_rms_norm", "liger_rope"))
        return lambda: heads_first(rotate, norm(q_in, q_w, EPS), norm(k_in, k_w, EPS), *rounded)

    ours = tigon("qk_norm_rope", qkv, *table, heads=h, kv_heads=k, eps=EPS, **weights)
    ours.leaves, ours.split = {"qkv": qkv, **weights}, apart
    ours.upstream = (*upstream.values(), dv)
    providers = [
        ours,
        *plain(peers.norm_rope, q_in, k_in, q_w, k_w, *rounded, EPS),
        Provider("Liger", of_liger, overwrites=tuple(upstream.values())),
    ]
    return by_rows(
        {"q_in": q_in, "k_in": k_in},
        weights,
        upstream,
        lambda *t: peers.norm_rope(*t, *wide, EPS, FP64),
        providers,
    )
