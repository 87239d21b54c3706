import sys

import pytest
import torch
from torch import Tensor

from tigon.kernels import rope, rope_ref
from tigon.kernels.rope.rope import _rope

CUDA = torch.cuda.is_available()
HALF = [torch.float16, torch.bfloat16]
B, T, H, K, D = 2, 3, 6, 3, 14


def angles(rotated: int = D, batch: int = B, tokens: int = T) -> Tensor:
    return torch.rand(batch, tokens, rotated // 2, dtype=torch.float64) * 6.0


def rotate(x: Tensor, theta: Tensor, interleaved: bool = False) -> Tensor:
    """Complex numbers turned by theta."""
    half = theta.shape[-1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    re, im = (
        (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    )
    turned = torch.complex(re, im) * torch.polar(torch.ones_like(theta), theta)[:, :, None]
    out = torch.empty_like(head)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    else:
        out = torch.cat((turned.real, turned.imag), -1)
    return torch.cat((out, rest), -1)


def check(
    q: Tensor,
    k: Tensor,
    theta: Tensor,
    interleaved: bool = False,
    upstreams: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Outputs and gradients in fp32 against the turned complex numbers."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    cos, sin = theta.cos().float(), theta.sin().float()
    tensors = [q, k, cos, sin]
    before = [t.detach().clone() for t in tensors]
    out = rope(*tensors, interleaved=interleaved)
    for x, y in zip((q, k), out, strict=True):
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), rotate(x, theta, interleaved), rtol=1e-5, atol=1e-6)
    ups = tuple(torch.randn_like(y) for y in out) if upstreams is None else upstreams
    grads = torch.autograd.grad(out, (q, k), ups)
    for grad, up in zip(grads, ups, strict=True):
        # The gradient of a rotation is the rotation back
        expected = rotate(up, -theta, interleaved).float()
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(t, b) and t._version == 0 for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [D, 6])
@pytest.mark.parametrize("batch", [1, B])
def test_forward_and_gradients(interleaved: bool, rotated: int, batch: int) -> None:
    q, k = torch.randn(B, T, H, D), torch.randn(B, T, K, D)
    check(q, k, angles(rotated, batch), interleaved)


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 2, 2), (1, 2, 9, 1, 128, 128), (2, 1, 3, 3, 96, 96), (1, 2, 2, 5, 80, 32)],
    ids=str,
)
def test_sizes(sizes: tuple[int, ...]) -> None:
    b, t, h, k, d, rotated = sizes
    check(torch.randn(b, t, h, d), torch.randn(b, t, k, d), angles(rotated, b, t))


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, D).expand(1, T, 1, D), torch.randn(1, 1, 1, D).expand(1, T, 1, D)
    theta = torch.arange(T)[None, :, None] * torch.rand(D // 2)
    q, k = rope(q, k, theta.cos(), theta.sin())
    scores = torch.einsum("bqhd,bkhd->qk", q, k)
    for distance in range(1 - T, T):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_inputs_and_upstreams(interleaved: bool) -> None:
    q, k, _ = torch.randn(B, T, H + 2 * K, D).split((H, K, K), dim=2)
    theta = angles(6)
    as_attention_gives = torch.randn(B, H, T, D), torch.randn(B, K, T, D)
    upstreams = as_attention_gives[0].transpose(1, 2), as_attention_gives[1].transpose(1, 2)
    check(q, k, theta, interleaved, upstreams)
    q, k = torch.randn(B, T, D, H).transpose(2, 3), torch.randn(B, T, K, 2 * D)[..., ::2]
    upstreams = torch.ones(()).expand(B, T, H, D), torch.randn(1, 1, K, D).expand(B, T, K, D)
    check(q, k, theta, interleaved, upstreams)


def test_strided_angles() -> None:
    q, k, theta = torch.randn(B, T, H, D), torch.randn(B, T, K, D), angles(D, 1)
    expected = rope(q, k, theta.cos().float(), theta.sin().float())
    table = torch.stack((theta.cos(), theta.sin()), -1).float()
    both = torch.cat((theta.cos(), theta.sin()), -1).float()
    for cos, sin in (
        (table[..., 0], table[..., 1]),
        (both[..., : D // 2], both[..., D // 2 :]),
        (table[..., 0].expand(B, T, D // 2), table[..., 1].contiguous().expand(B, T, D // 2)),
        (theta.cos().float(), theta.sin().float().transpose(0, 1).contiguous().transpose(0, 1)),
        (both[..., : D // 2], theta.sin().float()),
        (theta.cos(), theta.sin()),
    ):
        for a, b in zip(rope(q, k, cos, sin), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("table", [torch.float32, None], ids=["fp32 angles", "same"])
def test_rounded_once(dtype: torch.dtype, table: torch.dtype | None) -> None:
    q, k = torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, K, D).to(dtype).requires_grad_()
    theta = angles()
    cos, sin = theta.cos().to(table or dtype), theta.sin().to(table or dtype)
    q1, q2 = q.double().chunk(2, -1)
    c, s = cos.double()[:, :, None], sin.double()[:, :, None]
    expected = torch.cat((q1 * c - q2 * s, q2 * c + q1 * s), -1).to(dtype)
    y, yk = rope(q, k, cos, sin)
    assert y.dtype == yk.dtype == dtype
    assert (y != expected).float().mean() < 1e-2
    upstream = torch.randn_like(yk)
    (grad,) = torch.autograd.grad(yk, k, upstream)
    u1, u2 = upstream.double().chunk(2, -1)
    expected = torch.cat((u1 * c + u2 * s, u2 * c - u1 * s), -1).to(dtype)
    assert grad.dtype == dtype
    assert (grad != expected).float().mean() < 1e-2


def test_bf16_to_an_ulp() -> None:
    q, k = torch.randn(B, T, H, D).bfloat16(), torch.randn(B, T, K, D).bfloat16()
    cos, sin = angles().cos().bfloat16(), angles().sin().bfloat16()
    for ours, eager in zip(rope(q, k, cos, sin), rope_ref(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2**-7, atol=2**-10)


def test_one_of_the_two_wants_a_gradient() -> None:
    theta = angles()
    for wanted in (0, 1):
        x = [torch.randn(B, T, H, D), torch.randn(B, T, K, D)]
        x[wanted].requires_grad_()
        y = rope(*x, theta.cos(), theta.sin())
        (grad,) = torch.autograd.grad(y[wanted].sum(), x[wanted])
        expected = rotate(torch.ones_like(x[wanted]), -theta).float()
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert rope(*x, theta.cos(), theta.sin())[1].grad_fn is None


def test_second_backward() -> None:
    x = torch.randn(B, T, H, D, requires_grad=True), torch.randn(B, T, K, D, requires_grad=True)
    theta = angles()
    loss = sum(y.square().sum() for y in rope(*x, theta.cos(), theta.sin()))
    first = torch.autograd.grad(loss, x, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.zero_()
    second = torch.autograd.grad(loss, x)
    assert all(torch.equal(a, b) for a, b in zip(kept, second, strict=True))


def test_angles_that_learn() -> None:
    q, k, theta = torch.randn(B, T, H, D), torch.randn(B, T, K, D), angles().requires_grad_()
    y, _ = rope(q, k, theta.cos(), theta.sin())
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), theta)
    (expected,) = torch.autograd.grad(rotate(q, theta).sum(), theta)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_second_derivative_raises(path: str) -> None:
    if path == "triton":
        q = torch.randn(B, T, H, D, requires_grad=True)
        y, _ = rope(q, q, torch.ones(1, T, 7), torch.ones(1, T, 7))
        with pytest.raises(RuntimeError, match="rope has no second derivative"):
            torch.autograd.grad(y.sum(), q, create_graph=True)


@pytest.mark.parametrize("empty", [(0, T, H, K), (B, 0, H, K)], ids=str)
def test_empty(empty: tuple[int, ...]) -> None:
    b, t, h, k = empty
    x = torch.randn(b, t, h, D, requires_grad=True), torch.randn(b, t, k, D, requires_grad=True)
    y = rope(*x, torch.ones(1, t, 7), torch.ones(1, t, 7))
    grads = torch.autograd.grad(y[0].sum() + y[1].sum(), x)
    assert [g.shape for g in grads] == [a.shape for a in x] == [a.shape for a in y]


def test_registered_op(path: str) -> None:
    if path == "triton":
        q, k, theta = torch.randn(B, T, H, D), torch.randn(B, T, K, D), angles().float()
        torch.library.opcheck(_rope.op, (q, k, theta.cos(), theta.sin(), False, True))


def test_compiled_equals_eager(path: str) -> None:
    if path == "reference":
        return  # plain torch

    def step(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q * 1.5, k * 1.5, cos, sin)

    compiled = torch.compile(
        step, fullgraph=True, dynamic=CUDA, backend="inductor" if CUDA else "aot_eager"
    )
    for t in (3, 5) if CUDA else (3,):
        x = torch.randn(B, t, H, D, requires_grad=True), torch.randn(B, t, K, D, requires_grad=True)
        theta = angles(D, 1, t).float()
        ups = torch.randn(B, t, H, D), torch.randn(B, t, K, D)
        results = []
        for f in (step, compiled):
            y = f(*x, theta.cos(), theta.sin())
            results.append((*y, *torch.autograd.grad(y, x, ups)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [63, 100, 1000, 2047])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_bf16_errors_are_those_of_eager_torch(tokens: int, d: int, interleaved: bool) -> None:
    packed = torch.randn(2, tokens, 28 + 2 * 4, d).bfloat16()
    q, k, _ = packed.split((28, 4, 4), dim=2)
    theta = angles(d, 1, tokens)
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    results = []
    for f, dtype in ((rope, q.dtype), (rope_ref, q.dtype), (rope_ref, torch.float32)):
        x = q.detach().to(dtype).requires_grad_(), k.detach().to(dtype).requires_grad_()
        y = f(*x, cos, sin, interleaved=interleaved)
        results.append((*y, *torch.autograd.grad(y, x, tuple(a.detach() for a in x))))
    for ours, eager, right in zip(*results, strict=True):
        assert (ours - right).norm() <= 1.01 * (eager - right).norm()


@pytest.mark.gpu
def test_graph_replay_equals_eager() -> None:
    q = torch.randn(2, 63, 28, 128, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, 63, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    theta = angles(128, 1, 63)
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()

    def step() -> tuple[Tensor, ...]:
        y = rope(q, k, cos, sin)
        return *y, *torch.autograd.grad(y, (q, k), tuple(a.detach() for a in y))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    with torch.no_grad():
        q.normal_()
        k.normal_()
    graph.replay()
    for replayed, eager in zip(outputs, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(path: str) -> None:
    if path == "reference":
        return  # its fp32 copies may not fit
    t = 140_000
    q = torch.empty(1, t, 128, 128, dtype=torch.bfloat16)
    q[:, :-2] = 0
    q[:, -2:].normal_()
    k = torch.randn(1, t, 1, 128, dtype=torch.bfloat16)
    theta = angles(128, 1, t)
    cos, sin = theta.cos().bfloat16(), theta.sin().bfloat16()
    y, _ = rope(q, k, cos, sin)
    expected, _ = rope(q[:, -2:], k[:, -2:], cos[:, -2:], sin[:, -2:])
    assert torch.equal(y[:, -2:], expected)


@pytest.mark.gpu
def test_a_new_batch_size_compiles_nothing(path: str) -> None:
    if path == "reference":
        return  # nothing is compiled
    kernel = sys.modules["tigon.kernels.rope.rope"]._rope_kernel

    def run(batch: int, tokens: int) -> int:
        theta = angles(64, 1, tokens)
        rope(torch.randn(batch, tokens, 4, 64), torch.randn(batch, tokens, 2, 64), theta, theta)
        return sum(len(caches[0]) for caches in kernel.device_caches.values())

    before = run(2, 48)
    assert run(3, 48) == run(7, 48) == run(5, 80) == before


def test_more_angles_than_the_head_has() -> None:
    q = torch.randn(1, T, 1, 8)
    with pytest.raises(ValueError, match="rotates 10 dims, but heads have 8"):
        rope(q, q, torch.ones(1, T, 5), torch.ones(1, T, 5))


def test_angles_of_other_tokens() -> None:
    q, k = torch.randn(B, T, H, D), torch.randn(B, T, K, D)
    for cos in (torch.ones(1, T - 1, 7), torch.ones(B + 1, T, 7), torch.ones(T, 7)):
        with pytest.raises(ValueError, match=rf"not \[B or 1, T, R/2\] with B={B} and T={T}"):
            rope(q, k, cos, cos)
    with pytest.raises(ValueError, match=r"sin \(1, 3, 6\)"):
        rope(q, k, torch.ones(1, T, 7), torch.ones(1, T, 6))


def test_q_and_k_that_do_not_belong_together() -> None:
    cos = torch.ones(1, T, 7)
    for k in (torch.randn(B, T, K, D + 2), torch.randn(B, T - 1, K, D), torch.randn(T, K, D)):
        with pytest.raises(ValueError, match="with the same B, T and D"):
            rope(torch.randn(B, T, H, D), k, cos, cos)


def test_a_device_mix() -> None:
    q = torch.randn(B, T, H, D)
    with pytest.raises(ValueError, match=r"cos is on meta"):
        rope(q, q, torch.ones(1, T, 7, device="meta"), torch.ones(1, T, 7))
