"""q and k rotated in the memory of qkv: the bits of copies, and whose memory is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tigon.kernels import qk_norm_rope
from tigon.kernels.rope.rope import _packed_rope

CUDA = torch.cuda.is_available()
B, T, H, K, D = 2, 3, 5, 2, 14
ROW = (H + 2 * K) * D
Make = Callable[[Tensor], Tensor]


def scaled(leaf: Tensor) -> Tensor:
    return leaf * 1.5


def rotated(
    leaf: Tensor, overwrite: bool, make: Make = scaled, turned: int = D, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """qkv, and q, k and v of it."""
    qkv = make(leaf)
    torch.manual_seed(1)
    theta = 6 * torch.rand(1, qkv.shape[1], turned // 2)
    table = theta.cos().to(qkv.dtype), theta.sin().to(qkv.dtype)
    sizes = {"heads": H, "kv_heads": K} | options
    return qkv, qk_norm_rope(qkv, *table, overwrite=overwrite, **sizes)


def numbers(leaf: Tensor, overwrite: bool, *given: Any, **options: Any) -> list[Tensor]:
    """q, k, v and the gradient, from upstreams as attention gives them."""
    _, out = rotated(leaf, overwrite, *given, **options)
    torch.manual_seed(2)
    ups = [torch.randn_like(y.mT.contiguous()).mT for y in out]
    return [*(y.detach() for y in out), *torch.autograd.grad(out, leaf, ups)]


def leaf_of(shape: tuple[int, ...] = (B, T, ROW), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 2, 2),
        (2, 3, 5, 2, 14, 14),
        (2, 3, 5, 2, 14, 6),
        (1, 2, 9, 1, 128, 128),  # some programs have heads that do not exist
        (1, 2, 2, 5, 80, 32),
        (1, 2, 2, 1, 6, 0),
    ],
    ids=str,
)
def test_same_bits(
    sizes: tuple[int, ...], dtype: torch.dtype, interleaved: bool, path: str
) -> None:
    b, t, h, k, d, turned = sizes
    leaf = leaf_of((b, t, (h + 2 * k) * d), dtype)
    options = {"turned": turned, "heads": h, "kv_heads": k, "interleaved": interleaved}
    expected, found = (numbers(leaf, o, **options) for o in (False, True))
    assert len(found) == 4 and all(map(torch.equal, found, expected))
    qkv, out = rotated(leaf, True, **options)
    assert ({memory(y) for y in out} == {memory(qkv)}) == (path == "triton")
    assert [y.shape for y in out] == [(b, t, n, d) for n in (h, k, k)]


def test_bytes_that_a_graph_keeps(path: str) -> None:
    """Of q, k and v where all three are kept, and nothing for the rotation's own gradient."""
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    leaf = leaf_of()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for y in rotated(leaf, True, lambda x: x + 1)[1]:
            y.square()
    angles = 2 * T * D // 2
    most = 2 * (H + 2 * K) * B * T * D if path == "reference" else ROW * B * T + angles
    assert sum(s.nbytes() for s in kept.values()) <= 4 * most


NOT_ALONE: dict[str, Make] = {
    "leaf": lambda leaf: leaf,
    "view of a leaf": lambda leaf: leaf.view(B, T, ROW),
    "rows": lambda leaf: (leaf * 1.5)[:1],
    "columns": lambda leaf: torch.cat((leaf * 1.5, leaf), -1)[..., :ROW],
    "transposed": lambda leaf: (leaf.mT.contiguous() * 1.5).mT,
    "expanded": lambda leaf: (leaf[:1] * 1.5).expand(B, T, ROW),
}


@pytest.mark.parametrize("case", NOT_ALONE)
def test_memory_of_others_is_left_alone(case: str) -> None:
    leaf, make = leaf_of(), NOT_ALONE[case]
    assert all(map(torch.equal, numbers(leaf, True, make), numbers(leaf, False, make)))
    qkv, _ = rotated(leaf, True, make)
    assert torch.equal(qkv, make(leaf)) and qkv._version == make(leaf)._version


def test_what_no_graph_keeps_is_left_alone() -> None:
    leaf = leaf_of()
    for given in (leaf.detach(), leaf):
        with torch.set_grad_enabled(given is not leaf):
            qkv, _ = rotated(given, True)
        assert torch.equal(qkv, given * 1.5) and qkv._version == 0


def test_what_norms_need_is_left_alone() -> None:
    weights = {"q_weight": torch.rand(D), "k_weight": torch.rand(D)}
    leaf = leaf_of()
    assert all(map(torch.equal, numbers(leaf, True, **weights), numbers(leaf, False, **weights)))
    qkv, _ = rotated(leaf, True, **weights)
    assert torch.equal(qkv, leaf * 1.5) and qkv._version == 0


def test_another_saved_use_raises(kernels_only: None) -> None:
    others: list[Tensor] = []

    def make(leaf: Tensor) -> Tensor:
        qkv = leaf * 1.5
        others.append(qkv.square())
        return qkv

    leaf = leaf_of()
    rotated(leaf, True, make)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(others[0].sum(), leaf)


def test_a_retained_graph_can_be_run_again() -> None:
    leaf = leaf_of()
    expected = numbers(leaf, False)[-1]
    _, out = rotated(leaf, True)
    torch.manual_seed(2)
    ups = [torch.randn_like(y.mT.contiguous()).mT for y in out]
    for retain in (True, True, False):
        (grad,) = torch.autograd.grad(out, leaf, ups, retain_graph=retain)
        assert torch.equal(grad, expected)
        grad.zero_()


def test_second_derivative_raises(kernels_only: None) -> None:
    leaf = leaf_of()
    _, out = rotated(leaf, True)
    with pytest.raises(RuntimeError, match="qk_norm_rope has no second derivative"):
        torch.autograd.grad(out[0].sum(), leaf, create_graph=True)


class Outputs(TorchDispatchMode):
    """Keeps what operators return, as selective checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.kept.append((x, x._version, x.clone()))
        return out


class Functions(TorchFunctionMode):
    """Keeps what functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, int, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == (B, T, ROW):
            self.kept.append((out, out._version, out.clone()))
        return out


@pytest.mark.parametrize("kind", [Outputs, Functions])
def test_modes_keep_what_they_saw(kind: Any) -> None:
    leaf = leaf_of()
    expected = numbers(leaf, False)
    with kind() as mode:
        found = numbers(leaf, True)
    assert mode.kept and all(map(torch.equal, found, expected))
    assert all(x._version == version for x, version, _ in mode.kept)
    assert all(torch.equal(x, before) for x, _, before in mode.kept)


def test_registered_op(path: str) -> None:
    if path == "triton":
        theta = torch.rand(1, T, D // 2)
        given = torch.randn(B, T, ROW), theta.cos(), theta.sin(), H, K, True
        torch.library.opcheck(_packed_rope.op, given)


def test_transforms_of_torch_func_see_no_change(path: str) -> None:
    leaf = leaf_of().detach()
    seen: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        seen.append(x * 1.5)
        return sum(y.sum() for y in rotated(x, True, lambda _: seen[-1])[1])  # type: ignore[return-value]

    if path == "reference":
        torch.func.grad(loss)(leaf)
        return
    with pytest.raises(RuntimeError, match="setup_context"):  # as without `overwrite`
        torch.func.grad(loss)(leaf)
