"""The problems of bench/kernels.py: each operator's tensors, truth and providers.

Every provider gets the layout that it likes best: where Tigon reads one packed tensor, the plain
formulas and Liger get the separate tensors that transformers would hand to them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.measure import Problem, Provider, Run, Tensors, leaf, randn, truth
from bench.peers import call, imported, liger, plain, quack, tigon

EPS = 1e-6
VALID = 0.3  # share of the targets that are not ignored in the sparse cases
LIGER = "liger_kernel.transformers.functional:"
QUACK_NORM = "rmsnorm:rmsnorm"
FLA_NORM = "fla.modules.fused_norm_gate:rms_norm_gated"
TAPS = 4  # of the convolution before the gated delta rule


def by_rows(
    formula: Callable[..., Any],
    rows: Tensors,
    shared: Tensors,
    options: Sequence[Any],  # of the formula, behind all tensors
    outputs: dict[str, Tensor | None],  # with the gradients that come in; none into a loss
    providers: Sequence[Provider],  # ours first
    exact: Sequence[Any] | None = None,  # options of the truth, if they are others
) -> Problem:
    """Ours, then the plain formula, then the others."""
    tensors, names = rows | shared, tuple(outputs)
    upstream = tuple(gradient for gradient in outputs.values() if gradient is not None)

    def define(*given: Tensor) -> Any:
        return formula(*given, *(options if exact is None else exact))

    own = sum(p.name.startswith("tigon") for p in providers)
    plain_ones = plain(formula, *tensors.values(), *options)
    every = [*providers[:own], *plain_ones, *providers[own:]]
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    exactly = partial(truth, define, rows, shared, names, upstream)
    return Problem(leaves, names, upstream, exactly, every)


def rms_norm(n: int, c: int) -> Problem:
    x, w, dy = leaf(n, c), leaf(c, scale=0.1, shift=1.0), randn(n, c)
    providers = [
        tigon("rms_norm", x, w, EPS),
        Provider("F.rms_norm", lambda: partial(F.rms_norm, x, (c,), w, EPS)),
        # by default it writes dx over dy
        liger("liger_rms_norm", x, w, EPS, overwrites=(dy,)),
        quack(QUACK_NORM, x, w, eps=EPS),
    ]
    return by_rows(peers.llama_norm, {"x": x}, {"weight": w}, [EPS], {"y": dy}, providers)


def rms_norm_residual(n: int, c: int) -> Problem:
    x, r, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1, shift=1.0)
    upstream = {"normed": randn(n, c), "total": randn(n, c)}
    overwrites = (upstream["normed"],)
    providers = [
        tigon("rms_norm", x, w, EPS, residual=r),
        liger("liger_fused_add_rms_norm", x, r, w, EPS, overwrites=overwrites),
        quack(QUACK_NORM, x, w, residual=r, eps=EPS, prenorm=True),
    ]
    rows = {"x": x, "residual": r}
    return by_rows(peers.add_norm, rows, {"weight": w}, [EPS], upstream, providers)


def sandwich_norm(n: int, c: int) -> Problem:
    x, r, post, w = leaf(n, c), leaf(n, c), leaf(c, scale=0.1), leaf(c, scale=0.1)
    upstream = {"normed": randn(n, c), "total": randn(n, c)}

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
        tigon("sandwich_norm", x, r, post, w, EPS),
        Provider("Liger", of_liger),
        Provider("QuACK", of_quack),
    ]
    rows, shared = {"x": x, "residual": r}, {"post_weight": post, "weight": w}
    return by_rows(peers.sandwich, rows, shared, [EPS], upstream, providers)


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
        # writes both gradients over what it saved
        liger(name, gate, up, overwrites=(gate, up)),
    ]
    if act == "silu":
        path = "liger_kernel.ops.swiglu:LigerFusedGateUpSiLUMulFunction"
        providers.append(
            Provider("Liger packed", lambda: partial(imported(path).apply, gate_up), **packed)
        )
    return by_rows(peers.gated, {"gate": gate, "up": up}, {}, [act], {"y": dy}, providers)


def sigmoid_gate(n: int, c: int) -> Problem:
    x, gate, dy = leaf(n, c), leaf(n, c), randn(n, c)
    providers = [tigon("sigmoid_gate", x, gate)]
    return by_rows(peers.sigmoid_gate, {"x": x, "gate": gate}, {}, [], {"y": dy}, providers)


def gated_norm(n: int, d: int) -> Problem:
    x, gate, dy = leaf(n, d), leaf(n, d), randn(n, d)
    w = leaf(d, scale=0.1, shift=1.0)
    providers = [
        tigon("rms_norm", x, w, EPS, gate=gate),
        Provider("FLA", lambda: partial(imported(FLA_NORM), x, gate, w, None, eps=EPS)),
    ]
    rows = {"x": x, "gate": gate}
    return by_rows(peers.gated_norm, rows, {"weight": w}, [EPS], {"y": dy}, providers)


def causal_conv_qkv(b: int, t: int, k: int, h: int, d: int) -> Problem:
    channels = (2 * k + h) * d
    x, w = leaf(b, t, channels), leaf(channels, TAPS, scale=0.5)
    upstream = {name: randn(b, t, n, d) for name, n in (("q", k), ("k", k))}
    upstream["v"] = randn(b, t, h * d)

    def of_fla() -> Run:
        conv, norm = (
            imported("fla.modules.conv:causal_conv1d"),
            imported("fla.modules.l2norm:l2norm"),
        )

        def run() -> tuple[Tensor, ...]:
            y, _ = conv(x, w, activation="silu")
            q, k_, v = y.split((k * d, k * d, h * d), -1)
            return norm(q.unflatten(-1, (k, d))) * d**-0.5, norm(k_.unflatten(-1, (k, d))), v

        return run

    providers = [tigon("causal_conv_qkv", x, w, key_heads=k, key_dim=d), Provider("FLA", of_fla)]
    return by_rows(peers.conv_qkv, {"x": x}, {"weight": w}, [k, d], upstream, providers)


def causal_conv(b: int, t: int, c: int, taps: int) -> Problem:
    x, w, dy = leaf(b, t, c), leaf(c, taps, scale=0.5), randn(b, t, c)

    def of_fla() -> Run:
        conv = imported("fla.modules.conv:causal_conv1d")
        return lambda: conv(x, w)[0]

    providers = [tigon("causal_conv", x, w), Provider("FLA", of_fla)]
    return by_rows(peers.conv, {"x": x}, {"weight": w}, [], {"y": dy}, providers)


def tables(t: int, d: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Cosine and sine of Llama 3's base: [1, T, D/2] in fp32, and [1, T, D] in fp64 and bf16."""
    inverse = 500000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (torch.arange(t, dtype=torch.float64)[:, None] * inverse)[None]
    whole = torch.cat((angle, angle), -1)
    wide = [whole.cos(), whole.sin()]
    return [angle.cos().float(), angle.sin().float()], wide, [x.bfloat16() for x in wide]


def heads_first(rotate: Callable[..., Any], q: Tensor, k: Tensor, *args: Tensor) -> Any:
    """RoPE by a function of [B, heads, T, D]."""
    out = rotate(q.transpose(1, 2), k.transpose(1, 2), *args)
    return tuple(x.transpose(1, 2) for x in out)


def rope(b: int, t: int, h: int, k: int, d: int) -> Problem:
    q_in, k_in = leaf(b, t, h, d), leaf(b, t, k, d)
    upstream = {"q": randn(b, t, h, d), "k": randn(b, t, k, d)}
    table, wide, rounded = tables(t, d)

    providers = [
        tigon("rope", q_in, k_in, *table),
        # rotates in place, forward and backward
        Provider(
            "Liger",
            lambda: partial(heads_first, imported(f"{LIGER}liger_rope"), q_in, k_in, *rounded),
            overwrites=(q_in, k_in, *upstream.values()),
        ),
    ]
    rows = {"q_in": q_in, "k_in": k_in}
    return by_rows(peers.rope, rows, {}, rounded, upstream, providers, wide)


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
    table, wide, rounded = tables(t, d)

    def apart(results: Tensors) -> Tensors:
        d_q, d_k, _ = heads(results["dqkv"])
        return {**results, "dq_in": d_q, "dk_in": d_k}

    def of_liger() -> Run:
        norm, rotate = (imported(f"{LIGER}{name}") for name in ("liger_rms_norm", "liger_rope"))
        return lambda: heads_first(rotate, norm(q_in, q_w, EPS), norm(k_in, k_w, EPS), *rounded)

    ours = tigon("qk_norm_rope", qkv, *table, heads=h, kv_heads=k, eps=EPS, **weights)
    ours.leaves, ours.split = {"qkv": qkv, **weights}, apart
    ours.upstream = (*upstream.values(), dv)
    providers = [ours, Provider("Liger", of_liger, overwrites=tuple(upstream.values()))]
    rows, exact = {"q_in": q_in, "k_in": k_in}, [*wide, EPS]
    return by_rows(peers.norm_rope, rows, weights, [*rounded, EPS], upstream, providers, exact)


def cross_entropy(n: int, v: int) -> Problem:
    logits, targets = leaf(n, v, scale=2.0), torch.randint(v, (n,))

    def of_tigon(overwrite: bool) -> Run:
        function = imported("tigon.kernels:cross_entropy")
        return lambda: function(logits, targets, overwrite=overwrite)[0]

    providers = [
        Provider("tigon", lambda: of_tigon(False)),
        Provider("tigon overwrite", lambda: of_tigon(True), overwrites=(logits,)),
        # writes the gradient over the logits, in forward
        liger("liger_cross_entropy", logits, targets, reduction="sum", overwrites=(logits,)),
        quack("cross_entropy:cross_entropy", logits, targets, reduction="sum"),
    ]
    rows = {"logits": logits, "targets": targets}
    return by_rows(peers.cross_entropy, rows, {}, ["sum"], {"loss": None}, providers)


def peaked(n: int, c: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets whose predictions look like a trained model's.

    Tokens have Zipf frequencies, which feature 0 puts into every row's logits and which the
    targets follow; noise of deviation 1.5 tells the rest of the vocabulary apart; and the row
    of the target is mixed into the hidden state with a margin uniform in [0, 2 log V], so that
    some tokens are open and many are nearly certain. `notes` in the results say how many.
    """
    log_rank = (torch.randperm(v) + 1.0).log()
    targets = torch.multinomial((-log_rank).exp(), n, replacement=True)
    weight = torch.randn(v, c) * 0.02
    weight[:, 0] = 0.0
    hidden = torch.randn(n, c) * (1.5 / (0.02 * math.sqrt(c)))
    margin = torch.rand(n) * (2 * math.log(v))
    rows = weight[targets]
    hidden += rows * (margin / rows.square().sum(-1))[:, None]
    hidden[:, 0], weight[:, 0] = 16.0, log_rank / -16.0
    return hidden.bfloat16(), weight.bfloat16(), targets


def certainty(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """Of the first 1024 tokens: their mean loss, and the share predicted with p > 1/2."""
    loss = F.cross_entropy((hidden[:1024] @ weight.T).float(), targets[:1024], reduction="none")
    return {
        "mean_loss": loss.mean().item(),
        "share_over_half": (loss < math.log(2.0)).float().mean().item(),
    }


def linear_cross_entropy(n: int, c: int, v: int, variant: str) -> Problem:
    if variant == "peaked":
        hidden, weight, targets = peaked(n, c, v)
    else:
        hidden, weight = randn(n, c, scale=0.5), randn(v, c, scale=0.02)
        targets = torch.randint(v, (n,))
    notes = certainty(hidden, weight, targets)
    if variant == "30 % valid":
        targets[torch.rand(n) >= VALID] = -100
    notes["share_valid"] = (targets != -100).float().mean().item()
    hidden.requires_grad_(), weight.requires_grad_()
    count = (targets != -100).sum().float()
    elsewhere = torch.ones(v, dtype=torch.bool)
    elsewhere[targets.clamp(min=0)] = False

    def with_elsewhere(results: Tensors) -> Tensors:
        # where the gradient is all softmax and no target: what a filter of small values loses
        return {**results, "dweight, no target": results["dweight"][elsewhere]}

    def of_tigon() -> Run:
        function = imported("tigon.kernels:linear_cross_entropy")
        # as a model does it: before its blocks, so that nobody waits for the count
        active = imported("tigon.kernels.loss.terms:find_valid_rows")(targets)
        known = {"denominator": count, "active": active}
        return lambda: function(hidden, weight, targets, **known)[0]

    def define(hidden: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return peers.linear_cross_entropy(hidden, targets, weight, "sum") / count

    def exact() -> Tensors:
        given = {"hidden": hidden, "targets": targets}, {"weight": weight}, ("loss",), ()
        return with_elsewhere(truth(define, *given, step=1024, dtype=torch.float32))

    args = (hidden, weight, targets)
    flce = "liger_fused_linear_cross_entropy"
    fp32 = liger(flce, *args, accum_dtype=torch.float32)
    fp32.name = "Liger fp32 dW"
    wider = liger(flce, *args, chunk_mem_const=32)  # its own chunks are short
    wider.name = "Liger wider chunks"
    providers = [
        Provider("tigon", of_tigon),
        *plain(peers.linear_cross_entropy, hidden, targets, weight, "mean"),
        liger(flce, *args),
        fp32,
        wider,
        quack("linear_cross_entropy:chunked_linear_cross_entropy", *args),
        Provider("CCE", lambda: partial(peers.cce(exact=False), *args)),
        Provider("CCE exact", lambda: partial(peers.cce(exact=True), *args)),
    ]
    for provider in providers:
        provider.split = with_elsewhere
    products: dict[str, Run] = {}
    if variant != "30 % valid":
        x, w = hidden.detach(), weight.detach()
        d = x @ w.T  # stands for the logits' gradient: the same shape, and not zeros
        products = {"x @ W.T": lambda: x @ w.T, "d @ W": lambda: d @ w, "d.T @ x": lambda: d.T @ x}
        parts = tuple(products.values())
        products["gemms_ms"] = lambda: [run() for run in parts]
    leaves = {"hidden": hidden, "weight": weight}
    return Problem(leaves, ("loss",), (), exact, providers, products, notes)
