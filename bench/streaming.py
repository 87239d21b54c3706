"""Problems of the operators that one pass over memory bounds: norms, gated activation, RoPE.

Every provider gets the layout that it likes best: where Tigon reads one packed tensor, the plain
formulas and Liger get the separate tensors that transformers would hand to them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.cases import EPS, Case
from bench.peers import compiled, imported, liger, ours
from bench.problem import Problem, Provider, Tensors, leaf, randn, truth
from bench.timing import Run


def rms_norm(case: Case) -> Problem:
    n, c = case.sizes
    x, w, dy = leaf(n, c), leaf(c, scale=0.1, shift=1.0), randn(n, c)
    args = (x, w, EPS)
    return Problem(
        {"x": x, "weight": w},
        ("y",),
        (dy,),
        partial(
            truth,
            lambda t, _: peers.llama_norm(t["x"], t["weight"], EPS, torch.float64),
            {"x": x},
            {"weight": w},
            ("y",),
            (dy,),
            step=2**25 // c,
        ),
        [
            Provider("tigon", lambda: partial(ours("rms_norm"), *args)),
            Provider("eager", lambda: partial(peers.llama_norm, *args)),
            Provider("F.rms_norm", lambda: partial(F.rms_norm, x, (c,), w, EPS)),
            Provider("torch.compile", lambda: partial(compiled(peers.llama_norm), *args)),
            # by default it writes dx over dy
            Provider("Liger", lambda: partial(liger("liger_rms_norm"), *args), overwrites=(dy,)),
            Provider("QuACK", lambda: partial(imported("quack.rmsnorm:rmsnorm"), x, w, eps=EPS)),
        ],
    )


def rms_norm_residual(case: Case) -> Problem:
    n, c = case.sizes
    x, r, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1, shift=1.0)
    upstream = (randn(n, c), randn(n, c))
    args = (x, r, w, EPS)
    outputs = ("normed", "total")
    quack = {"residual": r, "eps": EPS, "prenorm": True}
    return Problem(
        {"x": x, "residual": r, "weight": w},
        outputs,
        upstream,
        partial(
            truth,
            lambda t, _: peers.add_norm(t["x"], t["residual"], t["weight"], EPS, torch.float64),
            {"x": x, "residual": r},
            {"weight": w},
            outputs,
            upstream,
            step=2**25 // c,
        ),
        [
            Provider("tigon", lambda: partial(ours("rms_norm"), x, w, EPS, residual=r)),
            Provider("eager", lambda: partial(peers.add_norm, *args)),
            Provider("torch.compile", lambda: partial(compiled(peers.add_norm), *args)),
            Provider(
                "Liger",
                lambda: partial(liger("liger_fused_add_rms_norm"), *args),
                overwrites=upstream[:1],
            ),
            Provider("QuACK", lambda: partial(imported("quack.rmsnorm:rmsnorm"), x, w, **quack)),
        ],
    )


def sandwich_norm(case: Case) -> Problem:
    n, c = case.sizes
    x, r, post, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1), leaf(c, scale=0.1)
    upstream = (randn(n, c), randn(n, c))
    args = (x, r, post, w, EPS)
    outputs = ("normed", "total")

    def of_liger() -> Run:
        norm, add_norm = liger("liger_rms_norm"), liger("liger_fused_add_rms_norm")

        def run() -> tuple[Tensor, Tensor]:
            # not in place, as Liger runs Gemma: the gradient it would write over is used twice
            branch = norm(x, post, EPS, 1.0, "gemma", False)
            return add_norm(branch, r, w, EPS, 1.0, "gemma", False)

        return run

    def of_quack() -> Run:
        norm = imported("quack.rmsnorm:rmsnorm")

        def run() -> tuple[Tensor, Tensor]:
            branch = norm(x, post, eps=EPS, weight_offset=1.0)
            return norm(branch, w, residual=r, eps=EPS, prenorm=True, weight_offset=1.0)

        return run

    return Problem(
        {"x": x, "residual": r, "post_weight": post, "weight": w},
        outputs,
        upstream,
        partial(
            truth,
            lambda t, _: peers.sandwich(
                t["x"], t["residual"], t["post_weight"], t["weight"], EPS, torch.float64
            ),
            {"x": x, "residual": r},
            {"post_weight": post, "weight": w},
            outputs,
            upstream,
            step=2**25 // c,
        ),
        [
            Provider("tigon", lambda: partial(ours("sandwich_norm"), *args)),
            Provider("eager", lambda: partial(peers.sandwich, *args)),
            Provider("torch.compile", lambda: partial(compiled(peers.sandwich), *args)),
            Provider("Liger", of_liger),
            Provider("QuACK", of_quack),
        ],
    )


def gated_act(case: Case) -> Problem:
    n, i = case.sizes
    act = case.variant
    gate_up, dy = leaf(n, 2 * i), randn(n, i)
    gate, up = (half.contiguous().requires_grad_() for half in gate_up.detach().chunk(2, -1))

    def halves(results: Tensors) -> Tensors:
        d_gate, d_up = results["dgate_up"].chunk(2, -1)
        return {"y": results["y"], "dgate": d_gate, "dup": d_up}

    packed: dict[str, Any] = {"leaves": {"gate_up": gate_up}, "split": halves}
    # overwrite asks for what a projection gives: no leaf, and all of its memory
    owned = gate_up.detach().requires_grad_().clone()
    name = "liger_swiglu" if act == "silu" else "liger_geglu"
    providers = [
        Provider("tigon", lambda: partial(ours("gated_act"), gate_up, act), **packed),
        Provider(
            "tigon overwrite",
            lambda: partial(ours("gated_act"), owned, act, overwrite=True),
            **(packed | {"leaves": {"gate_up": owned}, "overwrites": (owned,)}),
        ),
        Provider("eager", lambda: partial(peers.gated, gate, up, act)),
        Provider("torch.compile", lambda: partial(compiled(peers.gated), gate, up, act)),
        # writes both gradients over what it saved
        Provider("Liger", lambda: partial(liger(name), gate, up), overwrites=(gate, up)),
    ]
    if act == "silu":
        path = "liger_kernel.ops.swiglu:LigerFusedGateUpSiLUMulFunction"
        providers.append(
            Provider("Liger packed", lambda: partial(imported(path).apply, gate_up), **packed)
        )
    return Problem(
        {"gate": gate, "up": up},
        ("y",),
        (dy,),
        partial(
            truth,
            lambda t, _: peers.gated(t["gate"], t["up"], act),
            {"gate": gate, "up": up},
            {},
            ("y",),
            (dy,),
            step=2**25 // i,
        ),
        providers,
    )


def angles(t: int, d: int) -> Tensor:
    """[1, T, D/2] in fp64, of Llama 3's base."""
    inverse = 500000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return (torch.arange(t, dtype=torch.float64)[:, None] * inverse)[None]


def rope(case: Case) -> Problem:
    b, t, h, k, d = case.sizes
    q_in, k_in = leaf(b, t, h, d), leaf(b, t, k, d)
    upstream = (randn(b, t, h, d), randn(b, t, k, d))
    angle = angles(t, d)
    cos, sin = angle.cos().float(), angle.sin().float()
    wide = [f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin)]
    rounded = [table.bfloat16() for table in wide]

    def of_liger() -> Run:
        function = liger("liger_rope")

        def run() -> tuple[Tensor, ...]:
            out = function(q_in.transpose(1, 2), k_in.transpose(1, 2), *rounded)
            return tuple(x.transpose(1, 2) for x in out)

        return run

    return Problem(
        {"q_in": q_in, "k_in": k_in},
        ("q", "k"),
        upstream,
        partial(
            truth,
            lambda t, _: peers.rope(t["q_in"], t["k_in"], *wide),
            {"q_in": q_in, "k_in": k_in},
            {},
            ("q", "k"),
            upstream,
            step=1,
        ),
        [
            Provider("tigon", lambda: partial(ours("rope"), q_in, k_in, cos, sin)),
            Provider("eager", lambda: partial(peers.rope, q_in, k_in, *rounded)),
            Provider("torch.compile", lambda: partial(compiled(peers.rope), q_in, k_in, *rounded)),
            # rotates in place, forward and backward
            Provider("Liger", of_liger, overwrites=(q_in, k_in, *upstream)),
        ],
    )


def qk_norm_rope(case: Case) -> Problem:
    b, t, h, k, d = case.sizes
    qkv = leaf(b, t, (h + 2 * k) * d)
    widths = (h * d, k * d, k * d)

    def heads(packed: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (-1, d)) for x in packed.split(widths, -1)]

    q_in, k_in = (x.contiguous().requires_grad_() for x in heads(qkv.detach())[:2])
    q_w, k_w = (leaf(d, scale=0.1, shift=1.0) for _ in range(2))
    upstream = (randn(b, t, h, d), randn(b, t, k, d))
    dv = randn(b, t, k, d)
    weights = {"q_weight": q_w, "k_weight": k_w}
    angle = angles(t, d)
    cos, sin = angle.cos().float(), angle.sin().float()
    wide = [f(torch.cat((angle, angle), -1)) for f in (torch.cos, torch.sin)]
    rounded = [table.bfloat16() for table in wide]
    args = (q_in, k_in, q_w, k_w, *rounded, EPS)

    def apart(results: Tensors) -> Tensors:
        d_q, d_k, _ = heads(results["dqkv"])
        return {**results, "dq_in": d_q, "dk_in": d_k}

    def of_liger() -> Run:
        norm, rotate = liger("liger_rms_norm"), liger("liger_rope")

        def run() -> tuple[Tensor, ...]:
            normed = norm(q_in, q_w, EPS), norm(k_in, k_w, EPS)
            out = rotate(*(x.transpose(1, 2) for x in normed), *rounded)
            return tuple(x.transpose(1, 2) for x in out)

        return run

    return Problem(
        {"q_in": q_in, "k_in": k_in, **weights},
        ("q", "k"),
        upstream,
        partial(
            truth,
            lambda t, _: peers.norm_rope(
                t["q_in"], t["k_in"], t["q_weight"], t["k_weight"], *wide, EPS, torch.float64
            ),
            {"q_in": q_in, "k_in": k_in},
            weights,
            ("q", "k"),
            upstream,
            step=1,
        ),
        [
            Provider(
                "tigon",
                lambda: partial(
                    ours("qk_norm_rope"),
                    *(qkv, cos, sin),
                    **{"heads": h, "kv_heads": k, "eps": EPS, **weights},
                ),
                leaves={"qkv": qkv, **weights},
                upstream=(*upstream, dv),
                split=apart,
            ),
            Provider("eager", lambda: partial(peers.norm_rope, *args)),
            Provider("torch.compile", lambda: partial(compiled(peers.norm_rope), *args)),
            Provider("Liger", of_liger, overwrites=upstream),
        ],
    )
