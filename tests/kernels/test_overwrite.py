"""Operators that may write over their input: the bits of copies, and whose memory is left alone.

In forward `qk_norm_rope` writes q and k over qkv, and `cross_entropy` the gradient over the logits;
in backward `gated_act` writes the gradient over gate_up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.definitions import losses
from tests.kernels.loss_cases import LOSSES
from tests.support.recompute import recompute_above
from tigon.kernels import cross_entropy, gated_act, qk_norm_rope, rms_norm
from tigon.kernels.linear.linear import linear
from tigon.kernels.loss.logits import Options

B, T, H, K, D = 2, 3, 5, 2, 14
ROW = (H + 2 * K) * D
Make = Callable[[Tensor], Tensor]
CHANGED = "modified by an inplace operation"


def scaled(leaf: Tensor) -> Tensor:
    return leaf * 1.5


def activate(x: Tensor, overwrite: bool, act: Any = "silu") -> tuple[Tensor]:
    return (gated_act(x, act, overwrite=overwrite),)


def turn(qkv: Tensor, overwrite: bool, turned: int = D, **options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    theta = 6 * torch.rand(1, qkv.shape[1], turned // 2)
    angles = theta.cos().to(qkv.dtype), theta.sin().to(qkv.dtype)
    return qk_norm_rope(qkv, *angles, overwrite=overwrite, **{"heads": H, "kv_heads": K} | options)


@dataclass
class Pass:
    """A leaf, what an operator reads, and its outputs."""

    run: Callable[..., tuple[Tensor, ...]]
    leaf: Tensor
    overwrite: bool
    make: Make = scaled

    def __post_init__(self) -> None:
        self.given = self.make(self.leaf)
        self.before, self.version = self.given.detach().clone(), self.given._version
        self.arrived: list[Tensor] = []
        if self.given.requires_grad:
            self.given.register_hook(self.arrived.append)
        self.out = self.run(self.given, self.overwrite)
        torch.manual_seed(2)  # upstreams as attention gives them
        self.ups = [torch.randn_like(y.mT.contiguous()).mT for y in self.out]

    def gradient(self, retain: bool = False) -> Tensor:
        return torch.autograd.grad(self.out, self.leaf, self.ups, retain_graph=retain)[0]

    def numbers(self) -> list[Tensor]:
        return [*(y.detach().clone() for y in self.out), self.gradient()]

    def is_unchanged(self) -> bool:
        return torch.equal(self.given, self.before) and self.given._version == self.version

    def reuses(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() == self.given.untyped_storage().data_ptr()


def leaf_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def turned(overwrite: bool, make: Make = scaled, leaf: Tensor | None = None, **how: Any) -> Pass:
    return Pass(partial(turn, **how), leaf_of(B, T, ROW) if leaf is None else leaf, overwrite, make)


def activated(overwrite: bool, make: Make = scaled, leaf: Tensor | None = None, **how: Any) -> Pass:
    leaf = leaf_of(B, T, 48) if leaf is None else leaf
    return Pass(partial(activate, **how), leaf, overwrite, make)


OPERATORS = {"gated_act": activated, "qk_norm_rope": turned}
operators = pytest.mark.parametrize("run", OPERATORS.values(), ids=OPERATORS)


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
def test_rotation_in_place_has_the_same_bits(
    sizes: tuple[int, ...], dtype: torch.dtype, interleaved: bool, path: str
) -> None:
    b, t, h, k, d, r = sizes
    leaf = leaf_of(b, t, (h + 2 * k) * d, dtype=dtype)
    how = {"turned": r, "heads": h, "kv_heads": k, "interleaved": interleaved}
    own, plain = (turned(overwrite, leaf=leaf, **how) for overwrite in (True, False))
    assert all(own.reuses(y) for y in own.out) == (path == "triton")
    assert [y.shape for y in own.out] == [(b, t, n, d) for n in (h, k, k)]
    assert all(map(torch.equal, own.numbers(), plain.numbers()))


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gradient_takes_the_memory_once(act: str, path: str) -> None:
    leaf = leaf_of(B, T, 48)
    plain, own = (activated(overwrite, leaf=leaf, act=act) for overwrite in (False, True))
    assert torch.equal(own.gradient(), plain.gradient()) and plain.is_unchanged()
    assert not plain.reuses(plain.arrived[-1])
    assert own.reuses(own.arrived[-1]) == (path == "triton")
    if path == "triton":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            own.gradient()


@operators
def test_a_retained_graph_can_be_run_again(run: Any, path: str) -> None:
    own = run(True)
    expected = run(False, leaf=own.leaf).gradient()
    for retain in (True, True, False):
        found = own.gradient(retain)
        assert torch.equal(found, expected)
        if run is activated:
            assert own.reuses(own.arrived[-1]) == (path == "triton" and not retain)
        else:
            found.zero_()


NOT_ALONE: dict[str, Make] = {
    "leaf": lambda leaf: leaf,
    "view of a leaf": lambda leaf: leaf.view(leaf.shape),
    "rows": lambda leaf: scaled(leaf)[:1],
    "end of a tensor": lambda leaf: scaled(leaf)[1:],
    "columns": lambda leaf: torch.cat((scaled(leaf), leaf), -1)[..., : leaf.shape[-1]],
    "transposed": lambda leaf: scaled(leaf.mT.contiguous()).mT,
    "expanded": lambda leaf: scaled(leaf[:1]).expand(leaf.shape),
}


@operators
@pytest.mark.parametrize("case", NOT_ALONE)
def test_memory_of_others_is_left_alone(run: Any, case: str) -> None:
    own = run(True, NOT_ALONE[case])
    plain = run(False, NOT_ALONE[case], own.leaf)
    assert all(map(torch.equal, own.numbers(), plain.numbers())) and own.is_unchanged()


def test_what_no_graph_keeps_is_left_alone() -> None:
    leaf = leaf_of(B, T, ROW)
    assert turned(True, leaf=leaf.detach()).is_unchanged()
    with torch.no_grad():
        assert turned(True, leaf=leaf).is_unchanged()


def test_what_norms_need_is_left_alone() -> None:
    weights = {"q_weight": torch.rand(D), "k_weight": torch.rand(D)}
    own = turned(True, **weights)
    plain = turned(False, leaf=own.leaf, **weights)
    assert all(map(torch.equal, own.numbers(), plain.numbers())) and own.is_unchanged()


@operators
def test_another_saved_use_raises(run: Any, kernels_only: None) -> None:
    others: list[Tensor] = []

    def make(leaf: Tensor) -> Tensor:
        given = scaled(leaf)
        others.append(given.square())
        return given

    own = run(True, make)
    own.gradient()
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.grad(others[0].sum(), own.leaf)


def test_hooks_on_saved_tensors(path: str) -> None:
    """Autograd compares no versions of what a hook packed."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        own = activated(True)
    first = own.gradient(retain=True)
    assert torch.equal(first, activated(False, leaf=own.leaf).gradient())
    assert torch.equal(first, own.gradient())
    if path == "triton":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            own.gradient()
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(first, activated(True, leaf=own.leaf).gradient())


def test_bytes_that_a_rotation_keeps(path: str) -> None:
    """Of q, k and v where all three are kept, and nothing for the rotation's own gradient."""
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        for y in turned(True, lambda x: x + 1).out:
            y.square()
    most = 2 * ROW * B * T if path == "reference" else ROW * B * T + T * D
    assert sum(s.nbytes() for s in kept.values()) <= 4 * most


@pytest.mark.parametrize("run", [activate, turn])
def test_a_projection_with_a_bias_is_overwritten(run: Any, kernels_only: None) -> None:
    """It is a view of a sum that has no gradient, where a node of ours returns it."""
    weight, bias = nn.Parameter(torch.randn(ROW, 8)), nn.Parameter(torch.randn(ROW))
    with recompute_above(0):
        given = linear(rms_norm(leaf_of(B, T, 8), None, 1e-6), weight, bias)
    assert given._base is not None and given._base.is_leaf
    found: list[Tensor] = []
    given.register_hook(found.append)
    out, *_ = run(given, True)
    out.sum().backward()
    memory = given.untyped_storage().data_ptr()
    assert any(x.untyped_storage().data_ptr() == memory for x in (out, *found))


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
    plain = turned(False)
    with kind() as mode:
        found = turned(True, leaf=plain.leaf).numbers()
    assert mode.kept and all(map(torch.equal, found, plain.numbers()))
    assert all(x._version == version for x, version, _ in mode.kept)
    assert all(torch.equal(x, before) for x, _, before in mode.kept)


# Losses


N, V = 37, 211


def logits() -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, V, (N,))
    targets[::5] = -100
    return (2 * torch.randn(N, V)).requires_grad_(), targets


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_overwritten_logits_give_the_loss_and_gradients(options: Options) -> None:
    leaf, targets = logits()
    w, d, up = torch.randn(N, requires_grad=True), torch.tensor(7), torch.tensor(3.0)
    how: dict[str, Any] = {"token_weights": w, "denominator": d, "options": options}
    loss, _ = cross_entropy(leaf * 1, targets, **how, overwrite=True)
    expected = (losses(leaf, targets, options) * w).sum() / 7
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(loss, (leaf, w), up)
    for a, b in zip(found, torch.autograd.grad(expected, (leaf, w), up.double()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_overwritten_logits_cannot_be_used_again(kernels_only: None) -> None:
    leaf, targets = logits()
    given = leaf * 1
    squared = given.square()
    loss, _ = cross_entropy(given, targets, overwrite=True)
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.grad(squared.sum() + loss, leaf)


def test_a_second_backward_pass_of_overwritten_logits() -> None:
    """Where the first gradient was written to."""
    leaf, targets = logits()
    total, _ = cross_entropy(leaf * 1, targets, overwrite=True)
    first = torch.autograd.grad(total * 3, leaf, retain_graph=True)[0]
    kept = first.clone()
    first.zero_()
    assert torch.equal(torch.autograd.grad(total * 3, leaf)[0], kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total * 3, leaf)


@pytest.mark.parametrize("layout", ["columns", "expanded", "rows", "padded"])
def test_overwriting_strided_logits(layout: str) -> None:
    targets, plain = torch.randint(0, V, (N,)), torch.randn(N, V)
    given = {
        "columns": torch.stack((plain, plain), -1)[..., 0],
        "expanded": plain[:1].expand(N, V),
        "rows": plain.T.contiguous().T,
        "padded": F.pad(plain, (0, 5))[:, :V],
    }[layout]
    z = given.detach().clone().requires_grad_()
    expected = F.cross_entropy(z, targets, reduction="sum")
    leaf = given.detach().requires_grad_()
    loss, _ = cross_entropy(leaf.view_as(leaf), targets, overwrite=True)
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(y, x)[0] for y, x in ((loss, leaf), (expected, z)))
    torch.testing.assert_close(*grads)
