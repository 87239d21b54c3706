import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_rope import rotate
from tigon.kernels import rms_norm_ref, rope_ref
from tigon.kernels.rope.qk_norm_rope import _backward, _forward, qk_norm_rope, qk_norm_rope_ref

CUDA = torch.cuda.is_available()
HALF = [torch.float16, torch.bfloat16]
B, T, H, K, D = 2, 3, 6, 3, 14
ROW = (H + 2 * K) * D
EPS = 1e-2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, so few programs that each has several tokens, and sums in steps."""
    if not CUDA:
        module = sys.modules["tigon.kernels.rope.qk_norm_rope"]
        monkeypatch.setattr(module, "RESIDENT", 2)
        monkeypatch.setattr(module, "SUM", (1, 8))


NORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"offset": 1.0, "cast": "after_weight"},
    "both": {"offset": 1.0},
}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def angles(rotated: int = D, batch: int = 1, tokens: int = T) -> Tensor:
    return torch.rand(batch, tokens, rotated // 2, dtype=torch.float64) * 6.0


def exact(
    qkv: Tensor,
    theta: Tensor,
    weights: tuple[Tensor, ...],
    *,
    heads: int = H,
    kv_heads: int = K,
    offset: float = 0.0,
    interleaved: bool = False,
    **_: Any,
) -> tuple[Tensor, ...]:
    packed = qkv.double().unflatten(-1, (heads + 2 * kv_heads, -1))
    *qk, v = packed.split((heads, kv_heads, kv_heads), 2)
    for i, w in enumerate(weights):
        mean = (qk[i] * qk[i]).sum(-1, keepdim=True) / qk[i].shape[-1]
        qk[i] = qk[i] / (mean + EPS) ** 0.5 * (w + offset)
    return *(rotate(x, theta, interleaved) for x in qk), v


def call(
    qkv: Tensor, theta: Tensor, weights: tuple[Tensor, ...], f: Any = qk_norm_rope, **options: Any
) -> tuple[Tensor, ...]:
    given = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    options = {"heads": H, "kv_heads": K, "eps": EPS} | given | options
    dtype = torch.float32 if qkv.dtype == torch.float64 else qkv.dtype
    return f(qkv, theta.cos().to(dtype), theta.sin().to(dtype), **options)


def check(
    qkv: Tensor,
    theta: Tensor,
    weights: tuple[Tensor, ...],
    upstreams: tuple[Tensor, ...] | None = None,
    **options: Any,
) -> None:
    """Outputs and gradients in fp32 against the definition in fp64."""
    qkv = qkv.detach().requires_grad_()
    weights = tuple(w.detach().requires_grad_() for w in weights)
    tensors = (qkv, *weights)
    before = [t.detach().clone() for t in tensors]
    out = call(qkv, theta, weights, **options)
    expected = exact(qkv, theta, weights, **options)
    for y, e in zip(out, expected, strict=True):
        torch.testing.assert_close(y.double(), e, rtol=1e-5, atol=1e-5)
    assert out[0].is_contiguous() and out[1].is_contiguous()
    ups = tuple(torch.randn_like(y) for y in out) if upstreams is None else upstreams
    grads = torch.autograd.grad(out, tensors, ups)
    reference = torch.autograd.grad(expected, tensors, tuple(u.double() for u in ups))
    for grad, e in zip(grads, reference, strict=True):
        torch.testing.assert_close(grad, e, rtol=1e-4, atol=2e-5)
    assert all(torch.equal(t, b) and t._version == 0 for t, b in zip(tensors, before, strict=True))


def weights(d: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(d), torch.randn(d)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [D, 6])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_normed(name: str, interleaved: bool, rotated: int) -> None:
    qkv = 0.2 * torch.randn(B, T, ROW)  # small, so that eps counts
    check(qkv, angles(rotated), weights(), interleaved=interleaved, **NORMS[name])


def test_second_backward() -> None:
    for w in ((), tuple(x.requires_grad_() for x in weights())):
        qkv = torch.randn(B, T, ROW, requires_grad=True)
        loss = sum(y.square().sum() for y in call(qkv, angles(), w))
        first = torch.autograd.grad(loss, (qkv, *w), retain_graph=True)
        kept = [grad.clone() for grad in first]
        for grad in first:
            grad.zero_()
        second = torch.autograd.grad(loss, (qkv, *w))
        assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [D, 6])
def test_plain_rope(interleaved: bool, rotated: int) -> None:
    check(torch.randn(B, T, ROW), angles(rotated, B), (), interleaved=interleaved)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 2, 2), (1, 2, 9, 1, 128, 128), (2, 1, 3, 3, 96, 96), (1, 2, 2, 5, 80, 32)],
    ids=str,
)
def test_sizes(normed: bool, sizes: tuple[int, ...]) -> None:
    b, t, h, k, d, rotated = sizes
    qkv = torch.randn(b, t, (h + 2 * k) * d)
    check(qkv, angles(rotated, b, t), weights(d) if normed else (), heads=h, kv_heads=k, offset=0.5)


@pytest.mark.parametrize("normed", [False, True])
def test_strided_inputs_and_upstreams(normed: bool) -> None:
    w = weights() if normed else ()
    shapes = [(B, T, H, D), (B, T, K, D), (B, T, K, D)]
    as_attention_gives = tuple(
        torch.randn(b, h, t, d).transpose(1, 2) for b, t, h, d in shapes
    )  # fmt: skip
    broadcast = tuple(torch.ones(()).expand(shape) for shape in shapes)
    columns = tuple(torch.randn(*shape[:-1], 2 * D)[..., ::2] for shape in shapes)
    inputs = (
        torch.randn(T, B, ROW).transpose(0, 1),
        torch.randn(B, T, ROW + 6)[..., 3:-3],
        torch.randn(B, T, ROW * 2)[..., ::2],
    )
    for qkv, ups in zip(inputs, (as_attention_gives, broadcast, columns), strict=True):
        check(qkv, angles(6), w, ups)


def test_strided_weights_and_angles() -> None:
    qkv, (wq, wk), theta = torch.randn(B, T, ROW), weights(), angles().float()
    expected = call(qkv, theta, (wq, wk))
    wide = torch.stack((wq, wk), 1)
    table = torch.stack((theta.cos(), theta.sin()), -1)
    for cos, sin in (
        (table[..., 0], table[..., 1]),
        (table[..., 0].expand(B, T, -1), table[..., 1].expand(B, T, -1)),
    ):
        out = qk_norm_rope(
            qkv, cos, sin, heads=H, kv_heads=K, q_weight=wide[:, 0], k_weight=wide[:, 1], eps=EPS
        )
        for a, b in zip(out, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_v_is_a_view_and_each_output_has_its_gradient() -> None:
    for w in ((), weights()):
        qkv = torch.randn(B, T, ROW, requires_grad=True)
        out = call(qkv * 1.0, angles(), w)
        packed = out[2].untyped_storage().nbytes()
        assert packed == qkv.untyped_storage().nbytes()
        for i, part in enumerate(((0, H), (H, H + K), (H + K, H + 2 * K))):
            (grad,) = torch.autograd.grad(out[i].sum(), qkv, retain_graph=True)
            heads = grad.view(B, T, H + 2 * K, D).abs().sum((0, 1, 3))
            inside = torch.zeros(H + 2 * K, dtype=torch.bool)
            inside[slice(*part)] = True
            assert (heads[inside] > 0).all() and (heads[~inside] == 0).all()


def rounded(
    qkv: Tensor, theta: Tensor, w: tuple[Tensor, ...], *, cast: str = "before_weight", offset: float
) -> list[Tensor]:
    """q and k in fp64, rounded where the definition says."""
    dtype = qkv.dtype
    cos, sin = (x.to(dtype).double()[:, :, None] for x in (theta.cos(), theta.sin()))
    packed = qkv.double().unflatten(-1, (H + 2 * K, D))
    out = []
    for x, weight in zip(packed.split((H, K, K), 2), w, strict=False):
        h = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        if cast == "before_weight":
            n = h.to(dtype).double() * (weight + offset).double()
        else:
            n = h * (weight.double() + offset)
        n1, n2 = n.to(dtype).double().chunk(2, -1)
        out.append(torch.cat((n1 * cos - n2 * sin, n2 * cos + n1 * sin), -1).to(dtype))
    return out


@norms
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same", "fp32 weight"])
def test_where_it_is_rounded(norm: dict[str, Any], dtype: torch.dtype, wide: bool) -> None:
    norm = {"offset": 0.0, "cast": "before_weight"} | norm
    qkv, theta = torch.randn(B, T, ROW).to(dtype), angles()
    w = tuple(x if wide else x.to(dtype) for x in weights())
    expected = rounded(qkv, theta, w, **norm)
    other = {"before_weight": "after_weight", "after_weight": "before_weight"}[norm["cast"]]
    wrong = rounded(qkv, theta, w, cast=other, offset=norm["offset"])
    for y, e, bad in zip(call(qkv, theta, w, **norm)[:2], expected, wrong, strict=True):
        assert y.dtype == dtype
        assert (bad != e).float().mean() > 0.1
        assert (y != e).float().mean() < 1e-2


@norms
def test_bf16_roughly(norm: dict[str, Any]) -> None:
    qkv, theta = torch.randn(B, T, ROW).bfloat16().requires_grad_(), angles()
    w = tuple(x.bfloat16().requires_grad_() for x in weights())
    results: list[Any] = []
    for f in (qk_norm_rope, qk_norm_rope_ref):
        y = call(qkv, theta, w, f, **norm)
        ups = tuple(a.detach() for a in y)
        results.append((*y, *torch.autograd.grad(y, (qkv, *w), ups)))
    for ours, eager in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        scale = eager.float().square().mean().sqrt().item()
        torch.testing.assert_close(ours, eager, rtol=2**-5, atol=scale / 8)


@pytest.mark.parametrize("frozen", ["q_weight", "k_weight", "both", "qkv"])
def test_frozen(frozen: str) -> None:
    qkv = torch.randn(B, T, ROW, requires_grad=True)
    wq, wk = (w.requires_grad_() for w in weights())
    theta = angles()
    out = call(qkv, theta, (wq, wk))
    expected = torch.autograd.grad(sum(y.sum() for y in out), (qkv, wq, wk))
    for x, name in ((qkv, "qkv"), (wq, "q_weight"), (wk, "k_weight")):
        x.requires_grad_(name != frozen and (frozen != "both" or name == "qkv"))
    sum(y.sum() for y in call(qkv, theta, (wq, wk))).backward()
    for x, e in zip((qkv, wq, wk), expected, strict=True):
        assert (x.grad is not None) == x.requires_grad
        if x.grad is not None:
            torch.testing.assert_close(x.grad, e, rtol=1e-5, atol=1e-5)


def test_what_is_saved(path: str) -> None:
    if path == "reference":
        return  # autograd saves what it likes
    qkv, theta = torch.randn(B, T, ROW, requires_grad=True), angles()
    for w, saves_qkv in (((), False), (weights(), True)):
        saved: list[int] = []

        def pack(t: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call(qkv, theta, w)
        assert (max(saved) >= qkv.numel()) == saves_qkv
        assert sum(saved) <= saves_qkv * qkv.numel() + 2 * T * D + 2 * D
        with torch.no_grad():
            assert all(y.grad_fn is None for y in call(qkv, theta, w))


def test_second_derivative_raises(path: str) -> None:
    if path == "reference":
        return  # plain torch has it
    for w in ((), weights()):
        qkv = torch.randn(B, T, ROW, requires_grad=True)
        with pytest.raises(RuntimeError, match="qk_norm_rope has no second derivative"):
            torch.autograd.grad(call(qkv, angles(), w)[0].sum(), qkv, create_graph=True)


def test_angles_that_learn() -> None:
    qkv, theta = torch.randn(B, T, ROW), angles().requires_grad_()
    w = weights()
    (grad,) = torch.autograd.grad(call(qkv, theta, w)[0].sum(), theta)
    (expected,) = torch.autograd.grad(exact(qkv, theta, w)[0].sum(), theta)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("empty", [(0, T), (B, 0)], ids=str)
def test_empty(empty: tuple[int, int]) -> None:
    for w in ((), tuple(x.requires_grad_() for x in weights())):
        qkv = torch.randn(*empty, ROW, requires_grad=True)
        out = call(qkv, angles(D, 1, empty[1]), w)
        assert [y.shape for y in out] == [(*empty, h, D) for h in (H, K, K)]
        grads = torch.autograd.grad(sum(y.sum() for y in out), (qkv, *w))
        assert grads[0].shape == qkv.shape and all((g == 0).all() for g in grads)


def test_registered_ops(path: str) -> None:
    if path == "reference":
        return
    qkv, theta, (wq, wk) = torch.randn(B, 2, ROW), angles(D, 1, 2).float(), weights()
    table = theta.cos(), theta.sin()
    ups = torch.randn(B, 2, H, D), torch.randn(B, 2, K, D), torch.randn(B, 2, K, D)
    for w, saved in (((None, None), None), ((wq, wk), qkv)):
        torch.library.opcheck(_forward.op, (qkv, *table, *w, H, K, EPS, 0.0, False, False))
        args = (*ups, *w, saved is not None, saved, *table, EPS, 0.0, True, True)
        torch.library.opcheck(_backward.op, args)


@pytest.mark.parametrize("normed", [False, True])
def test_compiled_equals_eager(normed: bool, path: str) -> None:
    if path == "reference":
        return  # plain torch
    w = tuple(x.requires_grad_() for x in weights()) if normed else ()

    def step(x: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
        return call(x * 1.5, theta, w)

    compiled = torch.compile(
        step, fullgraph=True, dynamic=normed, backend="inductor" if CUDA else "aot_eager"
    )
    for t in (3, 4) if normed else (3,):
        x, theta = torch.randn(B, t, ROW, requires_grad=True), angles(D, 1, t).float()
        ups = torch.randn(B, t, H, D), torch.randn(B, t, K, D), torch.randn(B, t, K, D)
        results = []
        for f in (step, compiled):
            y = f(x, theta)
            results.append((*y, *torch.autograd.grad(y, (x, *w), ups)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@norms
@pytest.mark.parametrize("tokens", [63, 100, 1000, 2047])
@pytest.mark.parametrize(
    "sizes", [(28, 4, 64), (32, 8, 128), (9, 3, 96), (4, 1, 256)], ids=lambda s: f"{s}"
)
def test_bf16_errors_are_those_of_eager_torch(
    norm: dict[str, Any], tokens: int, sizes: tuple[int, int, int]
) -> None:
    h, k, d = sizes
    qkv, theta = torch.randn(2, tokens, (h + 2 * k) * d).bfloat16(), angles(d, 1, tokens)
    w = tuple(x.bfloat16() for x in weights(d))
    options = {"heads": h, "kv_heads": k, **norm}
    ups = tuple(torch.randn(2, tokens, n, d).bfloat16() for n in (h, k, k))
    results = []
    for f in (qk_norm_rope, qk_norm_rope_ref, exact64):
        leaves = tuple(x.detach().clone().requires_grad_() for x in (qkv, *w))
        y = call(leaves[0], theta, leaves[1:], f, **options)
        results.append((*y, *torch.autograd.grad(y, leaves, tuple(u.to(y[0].dtype) for u in ups))))
    for ours, eager, right in zip(*results, strict=True):
        assert (ours - right).norm() <= 1.1 * (eager - right).norm()


def exact64(qkv: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The definition in fp64 with these very angles."""
    heads, kv_heads = options["heads"], options["kv_heads"]
    packed = qkv.double().unflatten(-1, (heads + 2 * kv_heads, -1))
    *qk, v = packed.split((heads, kv_heads, kv_heads), 2)
    cos, sin = cos.double()[:, :, None], sin.double()[:, :, None]
    out = []
    for x, name in zip(qk, ("q_weight", "k_weight"), strict=True):
        n = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        n1, n2 = (n * (options[name].double() + options.get("offset", 0.0))).chunk(2, -1)
        out.append(torch.cat((n1 * cos - n2 * sin, n2 * cos + n1 * sin), -1))
    return *out, v


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
def test_graph_replay_equals_eager(normed: bool) -> None:
    qkv = torch.randn(2, 63, 36 * 128, dtype=torch.bfloat16, requires_grad=True)
    theta = angles(128, 1, 63)
    w = tuple(x.bfloat16().requires_grad_() for x in weights(128)) if normed else ()
    table = theta.cos().bfloat16(), theta.sin().bfloat16()
    given = dict(zip(("q_weight", "k_weight"), w, strict=False))

    def step() -> tuple[Tensor, ...]:
        y = qk_norm_rope(qkv, *table, heads=28, kv_heads=4, **given)
        return *y, *torch.autograd.grad(y, (qkv, *w), tuple(a.detach() for a in y))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    with torch.no_grad():
        qkv.normal_()
    graph.replay()
    for replayed, eager in zip(outputs, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(path: str) -> None:
    if path == "reference":
        return  # its fp32 copies may not fit
    t, h, k, d = 140_000, 96, 16, 128
    qkv = torch.zeros(1, t, (h + 2 * k) * d, dtype=torch.bfloat16)
    qkv[:, -2:].normal_()
    last = qkv[:, -2:].clone().requires_grad_()
    w = tuple(x.bfloat16() for x in weights(d))
    theta = angles(d, 1, t)
    out = call(qkv.requires_grad_(), theta, w, heads=h, kv_heads=k)
    (grad,) = torch.autograd.grad(out, qkv, tuple(torch.ones_like(y) for y in out))
    expected = call(last, theta[:, -2:], w, heads=h, kv_heads=k)
    for y, e in zip(out, expected, strict=True):
        assert torch.equal(y[:, -2:], e)
    (right,) = torch.autograd.grad(expected, last, tuple(torch.ones_like(y) for y in expected))
    assert torch.equal(grad[:, -2:], right)


def test_the_reference_is_its_parts() -> None:
    qkv, theta, (wq, wk) = torch.randn(B, T, ROW), angles().float(), weights()
    q, k, v = qkv.view(B, T, -1, D).split((H, K, K), 2)
    cos, sin = theta.cos(), theta.sin()
    expected = (
        *rope_ref(rms_norm_ref(q, wq, EPS), rms_norm_ref(k, wk, EPS), cos, sin, interleaved=True),
        v,
    )
    for a, b in zip(
        call(qkv, theta, (wq, wk), qk_norm_rope_ref, interleaved=True), expected, strict=True
    ):
        assert torch.equal(a, b)


def test_bad_input() -> None:
    qkv, theta = torch.randn(B, T, ROW), angles()
    with pytest.raises(ValueError, match=rf"qkv \(2, 3, {ROW - 1}\) is not \[B, T, \(6 \+ 2 \* 3"):
        call(qkv[..., :-1], theta, ())
    with pytest.raises(ValueError, match="qkv"):
        call(qkv[0], theta, ())
    with pytest.raises(ValueError, match=r"k_weight \(13,\) does not fit heads of 14 dims"):
        call(qkv, theta, (torch.ones(D), torch.ones(D - 1)))
    with pytest.raises(ValueError, match="give q_weight and k_weight, or neither"):
        call(qkv, theta, (torch.ones(D),))
    with pytest.raises(ValueError, match="rotates 16 dims, but heads have 14"):
        call(qkv, angles(16), ())
    with pytest.raises(ValueError, match=r"not \[B or 1, T, R/2\]"):
        call(qkv, angles(D, 1, T + 1), ())
    with pytest.raises(ValueError, match=r"cast='never' is not one of \('before_weight'"):
        call(qkv, theta, weights(), cast="never")
    with pytest.raises(ValueError, match=r"eps=-1.0 and offset=0.0 must not be negative"):
        call(qkv, theta, weights(), eps=-1.0)
    with pytest.raises(ValueError, match="q_weight is on meta"):
        call(qkv, theta, tuple(w.to("meta") for w in weights()))
