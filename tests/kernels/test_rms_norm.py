import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tigon.kernels import rms_norm
from tigon.kernels.norm import common
from tigon.kernels.norm.rms_norm import rms_norm_ref

OWN = sys.modules["tigon.kernels.norm.rms_norm"]
CUDA = torch.cuda.is_available()
# 41 and 101 rows make a program take several steps, of which the last is not full
SHAPES = [(1, 1), (3, 7), (2, 5, 123), (41, 1000), (101, 300), (3, 1152)]
if CUDA:
    SHAPES += [(63, 96), (1000, 2880), (2047, 4096), (5, 9000), (5, 20000), (70000, 128)]
EPS = 1e-2
DTYPES = [torch.float16, torch.bfloat16]


def exact(
    x: Tensor, weight: Tensor | None, offset: float = 0.0, gate: Tensor | None = None
) -> Tensor:
    x = x.double()
    y = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5
    if weight is not None:
        y = y * (weight.double() + offset)
    if gate is not None:
        y = y * gate.double() / (1 + (-gate.double()).exp())
    return y


def assert_close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)


def assert_gradients(actual: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """`actual` and `expected` are scalars of the same inputs."""
    found = torch.autograd.grad(actual, inputs, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def kernels_only(path: str) -> None:
    if path != "triton":
        pytest.skip("about the kernels")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")])
def test_forward_and_gradients(shape: tuple[int, ...], offset: float, cast: str) -> None:
    x = (0.2 * torch.randn(shape)).requires_grad_()  # small, so that eps counts
    weight = torch.randn(shape[-1], requires_grad=True)
    upstream = torch.randn(shape)
    y = rms_norm(x, weight, EPS, offset=offset, cast=cast)
    expected = exact(x, weight, offset)
    assert_close(y, expected)
    assert_gradients((y * upstream).sum(), (expected * upstream).sum(), [x, weight])


@pytest.mark.parametrize("shape", [(2, 5, 123), (41, 1000)], ids=str)
def test_residual(shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape), torch.randn(shape)
    weight = torch.randn(shape[-1])
    tensors = [x.requires_grad_(), residual.requires_grad_(), weight.requires_grad_()]
    before = [t.detach().clone() for t in tensors]
    normed, total = rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(total, x + residual)
    expected = exact(x + residual, weight)
    assert_close(normed, expected)
    up, side = torch.randn(shape), torch.randn(shape)
    assert_gradients(
        (normed * up + total * side).sum(), (expected * up + (x + residual) * side).sum(), tensors
    )
    kept = side.clone()
    torch.autograd.backward([normed, total], [up, side])
    assert torch.equal(side, kept) and side._version == 0
    rms_norm(x.detach(), weight, EPS, residual=residual.detach())
    assert all(torch.equal(t, b) and t._version == 0 for t, b in zip(tensors, before, strict=True))


def test_one_of_two_outputs_is_used() -> None:
    shape = (5, 33)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    weight, up = torch.randn(33, requires_grad=True), torch.randn(shape)
    normed, total = rms_norm(inputs[0], weight, EPS, residual=inputs[1])
    expected = (exact(inputs[0] + inputs[1], weight) * up).sum()
    assert_gradients((normed * up).sum(), expected, [*inputs, weight])
    (total * up).sum().backward()
    assert torch.equal(inputs[0].grad, up) and torch.equal(inputs[1].grad, up)
    assert weight.grad is None


def test_a_tensor_is_its_own_residual() -> None:
    x, weight, up = torch.randn(5, 33, requires_grad=True), torch.randn(33), torch.randn(5, 33)
    normed, total = rms_norm(x, weight, EPS, residual=x)
    expected = (exact(2 * x, weight) * up + 2 * x).sum()
    assert_gradients((normed * up + total).sum(), expected, [x])


def test_the_first_backward_leaves_the_second_branch_alone() -> None:
    x, r = torch.randn(5, 33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    weight, upstream = torch.randn(33), torch.randn(5, 33)
    y = rms_norm(x, weight, EPS) + r
    y.backward(upstream)
    assert torch.equal(r.grad, upstream)


def test_without_a_weight() -> None:
    x, up = torch.randn(2, 5, 123, requires_grad=True), torch.randn(2, 5, 123)
    y, expected = rms_norm(x, None, EPS), exact(x, None)
    assert_close(y, expected)
    assert_gradients((y * up).sum(), (expected * up).sum(), [x])


@pytest.mark.parametrize("scaled", [True, False])
def test_gate(scaled: bool) -> None:
    x, gate, up = torch.randn(3, 41, 72).unbind()  # what a packed projection gives
    x, gate = x.requires_grad_(), gate.requires_grad_()
    weight = torch.randn(72, requires_grad=True) if scaled else None
    y, expected = rms_norm(x, weight, EPS, gate=gate), exact(x, weight, gate=gate)
    assert_close(y, expected)
    inputs = [x, gate] if weight is None else [x, gate, weight]
    assert_gradients((y * up).sum(), (expected * up).sum(), inputs)
    for frozen in inputs:
        rest = [t for t in inputs if t is not frozen]
        y = rms_norm(
            *(t if t is not frozen else t.detach() for t in (x, weight)),
            EPS,
            gate=gate.detach() if gate is frozen else gate,
        )
        assert_gradients((y * up).sum(), (exact(x, weight, gate=gate) * up).sum(), rest)


def test_gate_and_residual() -> None:
    x, residual, gate, up = torch.randn(4, 6, 40)
    inputs = [t.requires_grad_() for t in (x, residual, gate, torch.randn(40))]
    y, total = rms_norm(x, inputs[3], EPS, residual=residual, gate=gate)
    expected = exact(x + residual, inputs[3], gate=gate)
    assert_close(y, expected)
    assert_gradients((y * up + total).sum(), (expected * up + x + residual).sum(), inputs)


def test_strided_inputs() -> None:
    x, weight = torch.randn(7, 3, 10), torch.randn(20)[::2].requires_grad_()
    wide = torch.randn(4, 40)
    for strided in (x.transpose(0, 1), x[::2], x.expand(7, 3, 10), wide[:, ::4], wide[:, 5:15]):
        a = strided.detach().requires_grad_()
        up = torch.randn(*a.shape[:-1], 20)[..., ::2]
        y, expected = rms_norm(a, weight, EPS), exact(a, weight)
        assert_close(y, expected)
        assert_gradients((y * up).sum(), (expected * up).sum(), [a, weight])
        r, z = wide[0, :10].expand(a.shape), torch.randn(*a.shape[:-1], 20)[..., 10:]
        normed, total = rms_norm(r, weight, EPS, residual=a, gate=z.requires_grad_())
        assert_close(normed, exact(r + a, weight, gate=z))
        # an expanded gradient: every element is the same one
        expected = (exact(r + a, weight, gate=z) + a).sum()
        assert_gradients(normed.sum() + total.sum(), expected, [a, z])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_where_it_is_rounded(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, residual, z = torch.randn(3, 64, 256).to(dtype).unbind()
    weight = torch.randn(256).to(weight_dtype or dtype)
    t = x.float() + residual.float()
    h = t.to(dtype).float()
    h = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    silu = z.float() * z.float().sigmoid()
    before = weight.float() * h.to(dtype).float()  # Llama's two roundings
    gated = (before.to(weight.dtype).float() * silu).to(dtype)
    after = weight.float() * h
    offset = (1.0 + weight).float() * h.to(dtype).float()
    assert (before.to(dtype) != after.to(dtype)).float().mean() > 0.1
    # rsqrt and 1 / sqrt differ by an ulp of fp32, which now and then moves a rounding
    for kwargs, expected in (
        ({}, before.to(dtype)),
        ({"offset": 1.0}, offset.to(dtype)),
        ({"cast": "after_weight"}, after.to(dtype)),
        ({"gate": z}, gated),
    ):
        y, total = rms_norm(x, weight, EPS, residual=residual, **kwargs)
        assert y.dtype == total.dtype == dtype
        assert torch.equal(total, t.to(dtype))
        assert (y != expected).float().mean() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(100, 96), *([(2047, 2880), (63, 4096)] if CUDA else [])])
def test_half_precision_is_as_good_as_eager(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, up, side = torch.randn(4, *shape).to(dtype).unbind()
    inputs = [x, residual, torch.randn(shape[-1]).to(dtype)]
    inputs = [t.requires_grad_() for t in inputs]

    def results(norm: Callable[..., Any], cast: type[Tensor] | Any = lambda t: t) -> list[Tensor]:
        leaves = [cast(t) for t in inputs]
        normed, total = norm(*leaves)
        grads = torch.autograd.grad([normed, total], leaves, [cast(up), cast(side)])
        return [normed, total, *grads]

    def errors(found: list[Tensor]) -> list[float]:
        best = results(lambda x, r, w: (exact(x + r, w), x + r), Tensor.double)
        return [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, best, strict=True)
        ]

    ours = results(lambda x, r, w: rms_norm(x, w, EPS, residual=r))
    eager = results(lambda x, r, w: (rms_norm_ref(x + r, w, EPS), x + r))
    for ours_error, eager_error in zip(errors(ours), errors(eager), strict=True):
        assert ours_error <= 2 * eager_error


@pytest.mark.parametrize(("offset", "cast"), [(0.0, "before_weight"), (1.0, "after_weight")])
def test_it_does_not_matter_who_makes_the_sum(path: str, offset: float, cast: str) -> None:
    kernels_only(path)
    x, residual, up, side = torch.randn(4, 33, 80).half()
    weight = torch.randn(80).half()
    options = {"offset": offset, "cast": cast}

    def results(norm: Callable[..., Any]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        out = norm(*leaves)
        return [*out, *torch.autograd.grad(out, leaves, [up, side])]

    expected = results(lambda x, r, w: rms_norm(x, w, EPS, residual=r, **options))
    found = results(lambda x, r, w: OWN.norm_of_stream(x + r, w, EPS, **options))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 5
    with pytest.raises(ValueError, match=r"eps=-1"):
        OWN.norm_of_stream(x.clone().requires_grad_(), weight, -1.0)
    only = x.clone().requires_grad_()
    (OWN.norm_of_stream(only, weight, EPS)[1] * side).sum().backward()  # the norm is not used
    assert torch.equal(only.grad, side)


def test_dtypes_that_the_kernels_leave_to_torch() -> None:
    x, residual = torch.randn(4, 16).bfloat16(), torch.randn(4, 16)
    normed, total = rms_norm(x, torch.ones(16), EPS, residual=residual)
    assert total.dtype == normed.dtype == torch.float32
    assert_close(normed, exact(x + residual, torch.ones(16)))
    x, weight = residual.double(), torch.rand(16).double()
    torch.testing.assert_close(rms_norm(x, weight, EPS), exact(x, weight), rtol=1e-5, atol=1e-6)


def test_rows_wider_than_a_program_holds() -> None:
    x, weight = torch.randn(2, OWN.WIDEST + 1, requires_grad=True), torch.randn(OWN.WIDEST + 1)
    y, up = rms_norm(x, weight, EPS), torch.randn(2, OWN.WIDEST + 1)
    assert_close(y, exact(x, weight))
    assert_gradients((y * up).sum(), (exact(x, weight) * up).sum(), [x])


def test_no_rows() -> None:
    for shape in ((0, 8), (2, 0, 8), (3, 0)):
        x = torch.randn(shape, requires_grad=True)
        weight = torch.randn(shape[-1], requires_grad=True)
        y, total = rms_norm(x, weight, EPS, residual=x.detach())
        assert y.shape == total.shape == shape
        (y.sum() + total.sum()).backward()
        assert x.grad.shape == shape and torch.equal(weight.grad, torch.zeros_like(weight))


def test_only_what_is_needed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_only(path)
    x, weight = torch.randn(40, 33), torch.randn(33, requires_grad=True)
    saved: list[bool] = []
    forward, sums = OWN._forward, OWN.sum_partials
    monkeypatch.setattr(OWN, "_forward", lambda *a: saved.append(a[2]) or forward(*a))
    summed: list[Tensor] = []
    monkeypatch.setattr(OWN, "sum_partials", lambda *a: summed.append(a[3]) or sums(*a))
    with torch.no_grad():
        rms_norm(x.requires_grad_(), weight, EPS)
    rms_norm(x.detach(), weight.detach(), EPS)
    assert saved == [False, False]
    rms_norm(x, weight.detach(), EPS).sum().backward()
    assert not summed and weight.grad is None
    y, up = rms_norm(x.detach(), weight, EPS), torch.randn(40, 33)
    kept = [t.numel() for t in y.grad_fn.saved_tensors if t is not None]
    assert kept == [40 * 33, 33, 40]  # x, the weight, 1 / rms of each row
    (y * up).sum().backward()
    (expected,) = torch.autograd.grad((exact(x, weight) * up).sum(), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-5)
    # a residual alone wants a gradient
    r = torch.randn(40, 33, requires_grad=True)
    normed, _ = rms_norm(x.detach(), weight.detach(), EPS, residual=r)
    assert_gradients(normed.sum(), exact(x.detach() + r, weight.detach()).sum(), [r])


def test_gradients_are_the_same_each_time() -> None:
    x, weight = torch.randn(70, 96, requires_grad=True), torch.randn(96, requires_grad=True)
    normed, total = rms_norm(x, weight, EPS, residual=torch.randn(70, 96))
    loss = (normed * total).sum()
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_second_derivative(path: str) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = rms_norm(x, weight, EPS)
    if path == "triton":
        with pytest.raises(RuntimeError, match=r"rms_norm .*second derivative"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    else:
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert grad.requires_grad


def test_operators_keep_torchs_rules(path: str) -> None:
    kernels_only(path)
    x, residual, gate, dy, dtotal = torch.randn(5, 6, 40)
    weight = torch.randn(40)
    rstd = torch.rand(6)
    for args in (
        (x, None, False, None, weight, EPS, 0.0, True),
        (x, residual, True, gate, None, EPS, 1.0, False),
    ):
        torch.library.opcheck(OWN._forward.op, args)
    for args in (
        (x, None, None, [True, False, False], rstd, dy, None, 0.0, True),
        (x, gate, weight, [True, True, True], rstd, dy, dtotal, 1.0, False),
    ):
        torch.library.opcheck(OWN._backward.op, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_eager(dynamic: bool, path: str) -> None:
    kernels_only(path)

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = rms_norm(x, weight, EPS, residual=residual)
        return rms_norm(normed * 2, weight, EPS, gate=total), total

    torch._dynamo.reset()
    compiled = torch.compile(
        step, backend="inductor" if CUDA else "aot_eager", fullgraph=True, dynamic=dynamic
    )
    weight = torch.randn(24, requires_grad=True)
    for rows in (6, 9) if dynamic else (6,):
        x, residual, up = torch.randn(3, rows, 24).unbind()
        inputs = [x.requires_grad_(), residual.requires_grad_(), weight]
        found, expected = compiled(*inputs), step(*inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(
            torch.autograd.grad(found, inputs, [up, up]),
            torch.autograd.grad(expected, inputs, [up, up]),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), step(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_graph_replay_is_eager() -> None:
    x, residual, up = torch.randn(3, 100, 1152).bfloat16().unbind()
    inputs = [t.requires_grad_() for t in (x, residual, torch.randn(1152).bfloat16())]

    def step() -> list[Tensor]:
        normed, total = rms_norm(x, inputs[2], EPS, residual=residual)
        return [normed, total, *torch.autograd.grad([normed, total], inputs, [up, up])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in (x, residual, up):
            t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_offsets_past_32_bits(path: str) -> None:
    kernels_only(path)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 64), (2**30, 1))
    x = far.copy_(torch.randn(3, 64)).requires_grad_()
    near, weight, up = x.detach().clone().requires_grad_(), torch.randn(64), torch.randn(3, 64)
    y, expected = rms_norm(x, weight, EPS), rms_norm(near, weight, EPS)
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y, x, up.bfloat16())
    assert torch.equal(grad, torch.autograd.grad(expected, near, up.bfloat16())[0])


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(path: str) -> None:
    kernels_only(path)
    weight = torch.randn(96, requires_grad=True)
    kernels = OWN._forward_kernel, OWN._backward_kernel, common._sum_kernel
    counts = []
    for rows in (18001, 18003, 36005):  # more than are resident, or launched with PDL
        rms_norm(torch.randn(rows, 96, requires_grad=True), weight, EPS).sum().backward()
        counts.append([len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels])
    assert counts[0] == counts[1] == counts[2]


def test_weight_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"weight \(7,\) does not fit x \(2, 8\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)


def test_other_bad_inputs() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"residual \(8,\) does not fit x \(2, 8\)"):
        rms_norm(x, weight, EPS, residual=torch.ones(8))
    with pytest.raises(ValueError, match=r"gate \(1, 8\) does not fit x \(2, 8\)"):
        rms_norm(x, weight, EPS, gate=torch.ones(1, 8))
    with pytest.raises(ValueError, match=r"cast='never' is not one of \('before_weight'"):
        rms_norm(x, weight, EPS, cast="never")
    with pytest.raises(ValueError, match=r"eps=-1.0 and offset=0.0 must not be negative"):
        rms_norm(x, weight, -1.0)
    with pytest.raises(ValueError, match=f"x is on {x.device}; weight is on meta"):
        rms_norm(x, weight.to("meta"), EPS)
    with pytest.raises(ValueError, match="residual is on meta"):
        rms_norm(x, None, EPS, residual=x.to("meta"))
