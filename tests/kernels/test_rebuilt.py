"""Products that compute their input again: the bits of those that keep it, and when they must."""

import copy
import importlib
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tests.support.recompute import recompute_above
from tigon.kernels import (
    fp8_linear,
    gated_act,
    grouped_mlp,
    lora_linear,
    rms_norm,
    rms_norm_add,
    sandwich_norm,
)
from tigon.kernels.linear.dropout import Dropout
from tigon.kernels.linear.linear import linear
from tigon.kernels.linear.lora import LoRATerm
from tigon.kernels.mlp.gated_act import _forward, gradient_and_product
from tigon.kernels.norm.rms_norm import recompute_norm, recompute_sandwich
from tigon.kernels.recompute import find_recompute
from tigon.layers import GatedMLP, Linear

# What opcheck asks of ops without gradients of their own
CHECKS = ("test_schema", "test_faketensor")
C, K = 32, 16  # columns of what is kept, and of the products


@pytest.fixture(autouse=True)
def _everything(path: str) -> Any:
    """However small it is."""
    with recompute_above(0):
        yield


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def summed(x: Tensor, z: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The stream behind two branches."""
    normed, total = sandwich_norm(x, z, v, w, 1e-6)
    return rms_norm_add(normed, total, v, 1e-6)


Given = dict[str, Tensor]
INPUTS: dict[str, Callable[[Given], Tensor]] = {
    "norm": lambda t: rms_norm(t["x"], t["w"], 1e-6),
    "Gemma's norm": lambda t: rms_norm(t["x"], t["w"], 1e-6, offset=1.0, cast="after_weight"),
    "no weight": lambda t: rms_norm(t["x"], None, 1e-6),
    "residual": lambda t: rms_norm(t["x"], t["w"], 1e-6, residual=t["z"])[0],
    "gate": lambda t: rms_norm(t["x"], t["w"], 1e-6, gate=t["z"]),
    "strided": lambda t: rms_norm(t["x"].mT.contiguous().mT, t["w"], 1e-6),
    "sandwich": lambda t: sandwich_norm(t["x"], t["z"], t["v"], t["w"], 1e-6)[0],
    "sandwich's sum": lambda t: sandwich_norm(t["x"], t["z"], t["v"], t["w"], 1e-6)[1],
    "sum": lambda t: rms_norm_add(t["x"], t["z"], t["w"], 1e-6),
    "sum of a sum": lambda t: summed(t["x"], t["z"], t["v"], t["w"]),
    "activation": lambda t: gated_act(torch.cat((t["x"], t["z"]), -1) * 1.0, "gelu_tanh"),
}


def step(make: Callable[[Given], Tensor], given: Given, weight: Any, bias: Any) -> list[Tensor]:
    """The product and all gradients."""
    y = linear(make(given), weight, bias)
    wanted = [t for t in (*given.values(), weight, bias) if t is not None]
    torch.manual_seed(3)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, wanted, upstream, allow_unused=True)
    return [y, *(g for g in found if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", INPUTS)
def test_same_bits(name: str, dtype: torch.dtype, path: str) -> None:
    given = {k: leaf(2, 3, C, dtype=dtype) for k in "xz"} | {k: leaf(C, dtype=dtype) for k in "wv"}
    bias = nn.Parameter(torch.randn(K).to(dtype)) if name != "gate" else None
    weight = nn.Parameter(torch.randn(K, C).to(dtype))
    assert (find_recompute(INPUTS[name](given)) is not None) == (path == "triton")
    found = step(INPUTS[name], given, weight, bias)
    with recompute_above(math.inf):
        expected = step(INPUTS[name], given, weight, bias)
    assert len(found) == len(expected) >= 4
    assert all(map(torch.equal, found, expected))


READERS = ("heads", "fp8_linear", "LoRA", "LoRA, dropout")


def reader(name: str) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """A product of [..., C], and what learns in it."""
    weight = nn.Parameter(torch.randn(K, C))
    if name == "fp8_linear":
        half = nn.Parameter(weight.detach().bfloat16())
        return lambda y: fp8_linear(y.view(3, 2, C), half), [half]
    if name == "heads":  # a view with other columns, which it takes one by one
        half = nn.Parameter(torch.randn(K, C // 2))
        return lambda y: linear(y.unflatten(-1, (2, -1)), half), [half]
    a, b = nn.Parameter(torch.randn(4, C) / 7), nn.Parameter(torch.randn(K, 4))
    keys = torch.arange(6).view(2, 3) * 2**55
    dropout = Dropout(keys, -5, 0.4) if "dropout" in name else None
    added = [LoRATerm(0, b, 0.5)]
    weight.requires_grad_(False)
    return lambda y: lora_linear(y, weight, None, a, added, dropout=dropout), [a, b]


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("made", ["norm", "activation"])
def test_readers_have_the_same_bits(made: str, name: str, again: bool, path: str) -> None:
    """In a block that is computed again, whose last product is not, too."""
    dtype = torch.bfloat16 if name == "fp8_linear" else torch.float32
    given = {k: leaf(2, 3, C, dtype=dtype) for k in "xz"} | {"w": leaf(C, dtype=dtype)}
    product, learned = reader(name)

    def block(x: Tensor) -> Tensor:
        return product(INPUTS[made](given | {"x": x}))

    def run(least: float, again: bool) -> list[Tensor]:
        with recompute_above(least):
            y = checkpoint(block, given["x"], use_reentrant=False) if again else block(given["x"])
        torch.manual_seed(3)
        return [y, *torch.autograd.grad(y, [given["x"], *learned], torch.randn_like(y))]

    assert all(map(torch.equal, run(0, again), run(math.inf, False)))


def kept(run: Callable[[], Any], *own: Tensor) -> list[int]:
    """Numbers that a graph keeps of its 6 rows: for each memory of a row, how many; without `own`,
    the weights."""
    sizes: dict[int, int] = {t.untyped_storage()._cdata: 0 for t in own}
    alive: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(storage)
        sizes.setdefault(storage._cdata, storage.nbytes() // x.element_size() // 6)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = run()
    assert result is not None
    return sorted(size for size in sizes.values() if size >= C)


def test_what_is_kept(kernels_only: None) -> None:
    x, w, weight = leaf(2, 3, C), leaf(C), nn.Parameter(torch.randn(K, C))

    def one() -> Tensor:
        return linear(rms_norm(x, w, 1e-6), weight)

    assert kept(one, weight) == [C]
    for least in (math.inf, 4 * x.numel() + 1):  # what is smaller is kept
        with recompute_above(least):
            assert kept(one, weight) == [C, C]
    mlp = GatedMLP(C, 40, "silu")
    assert kept(lambda: mlp(rms_norm(x, w, 1e-6)), *mlp.parameters()) == [C, 80]
    with recompute_above(math.inf):
        assert kept(lambda: mlp(rms_norm(x, w, 1e-6)), *mlp.parameters()) == [C, C, 40, 80]
    # Several readers, one of them of a view
    weights = [nn.Parameter(torch.randn(K, C)) for _ in range(2)]

    def two() -> list[Tensor]:
        y = rms_norm(x, w, 1e-6)
        return [linear(y, weights[0]), linear(y.flatten(0, 1), weights[1])]

    assert kept(two, *weights) == [C]
    # Nothing is kept for weights that do not learn
    weight.requires_grad_(False)
    mlp.requires_grad_(False)
    assert kept(one, weight) == [C]
    assert kept(lambda: mlp(rms_norm(x, w, 1e-6)), *mlp.parameters()) == [C, 80]


class Quantized(Tensor):
    """With products of its own."""


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Modes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def uses(y: Tensor) -> str:
    return type(y.grad_fn).__name__


def test_who_has_a_product_of_its_own(kernels_only: None) -> None:
    x, own, recomputes = leaf(2, 3, C), Linear(C, K), "_LinearBackward"
    y = rms_norm(x, leaf(C), 1e-6)
    assert uses(own(y)) == recomputes != uses(F.linear(y, own.weight))
    quantized = nn.Parameter(torch.randn(K, C).as_subclass(Quantized))
    for given, weight in (
        (y.detach(), own.weight),
        (y[..., :2, :], own.weight),
        (y.as_subclass(Quantized), own.weight),
        (y, own.weight[:4]),
        (y, nn.Parameter(torch.randn(C, K).T)),
        (y, quantized),
    ):
        assert uses(linear(given, weight)) != recomputes
    parametrised = nn.utils.parametrize.register_parametrization(Linear(C, K), "weight", Doubled())
    assert uses(parametrised(y)) != recomputes
    with torch.autocast(x.device.type, torch.bfloat16):
        assert linear(y, own.weight).dtype == torch.bfloat16
    with Modes():
        assert uses(linear(y, own.weight)) != recomputes
    with torch.no_grad():
        assert linear(y, own.weight).grad_fn is None


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["input", "stream", "weight"])
def test_changes_in_place_are_seen(what: str, after: bool, kernels_only: None) -> None:
    """Before the product, it keeps its input; after it, autograd raises, or x is not needed."""
    x, z, w, weight = leaf(2, 3, C), leaf(2, 3, C), leaf(C), nn.Parameter(torch.randn(K, C))
    upstream = torch.randn(2, 3, K)
    y, total = rms_norm(x, w, 1e-6, residual=z)
    changed = {"input": y, "stream": total, "weight": w}[what].detach()
    if not after:
        changed.mul_(3)
    values, out = y.detach().clone(), linear(y, weight)
    if after:
        changed.mul_(3)
    if after and what != "input":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, weight, upstream)
    else:
        (found,) = torch.autograd.grad(out, weight, upstream)
        assert torch.equal(found, upstream.view(-1, K).T @ values.view(-1, C))


def test_other_memory_of_the_same_tensor(path: str) -> None:
    """No version tells of it."""
    y, weight = rms_norm(leaf(2, 3, C), leaf(C), 1e-6), nn.Parameter(torch.randn(K, C))
    y.data = torch.randn(2, 3, C)
    (found,) = torch.autograd.grad(linear(y, weight).sum(), weight)
    assert torch.equal(found, torch.ones(K, 6) @ y.detach().view(6, C))


def test_weights_that_are_sharded_again(kernels_only: None) -> None:
    """As by fully_shard(norm), whose weight is empty outside."""
    x, w, weight = leaf(2, 3, C), nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(K, C))
    y = rms_norm(x, w, 1e-6)
    out = linear(y, weight)
    w.untyped_storage().resize_(0)
    assert uses(linear(y, weight)) != "_LinearBackward"
    with pytest.raises(RuntimeError, match="shard both as one group"):
        out.sum().backward()


def test_a_graph_that_is_used_again(path: str) -> None:
    mlp, w = GatedMLP(C, 40, "silu"), leaf(C)
    x = leaf(2, 3, C)

    def gradients(least: float) -> list[Tensor]:
        with recompute_above(least):
            y = mlp(rms_norm(x, w, 1e-6))
        leaves = [x, w, *mlp.parameters()]
        some = torch.autograd.grad(y.sum(), x, retain_graph=True)
        first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(y.sum(), leaves)
        return [*some, *first, *second]

    assert all(map(torch.equal, gradients(0), gradients(math.inf)))


def test_second_derivatives_raise(kernels_only: None) -> None:
    mlp, x, w = GatedMLP(C, 40, "silu"), leaf(2, 3, C), leaf(C)
    y = rms_norm(x, w, 1e-6)
    for out, weight in ((linear(y, w2 := nn.Parameter(torch.randn(K, C))), w2), (mlp(y), x)):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(out.sum(), weight, create_graph=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("hook", ["none", "input", "output", "gradient", "two readers", "override"])
def test_who_sees_the_gated_product(hook: str, bias: bool, path: str) -> None:
    """A hook gets it and its gradient; without one, down_proj is differentiated to gate_up."""

    def run(least: float) -> list[Tensor]:
        torch.manual_seed(2)
        mlp = GatedMLP(C, 40, "gelu", bias=bias)
        x, w = leaf(2, 3, C), leaf(C)
        seen: list[Tensor] = []

        def see(_: Any, given: Any, *out: Any) -> None:
            seen.append(given[0])
            given[0].retain_grad()

        if hook == "input":
            mlp.down_proj.register_forward_hook(see)
        if hook == "output":
            mlp.gate_up_proj.register_forward_hook(lambda m, _, y: see(m, (y,)))
        if hook == "gradient":
            mlp.down_proj.register_full_backward_hook(lambda m, d, _: seen.append(d[0]))
        if hook == "override":
            mlp.down_proj.forward = lambda y: seen.append(y) or F.linear(2 * y, y.new_ones(C, 40))
        with recompute_above(least):
            if hook == "two readers":  # as LoRA beside the product has
                y = mlp.gate_up_proj(rms_norm(x, w, 1e-6))
                out = mlp.down_proj(y) + linear(y, more := nn.Parameter(torch.ones(C, 40)))
                seen.extend(torch.autograd.grad(out.sum(), [more, x], retain_graph=True))
            else:
                out = mlp(rms_norm(x, w, 1e-6))
            if path == "triton" and least == 0:
                assert (uses(out) == "_GatedLinearBackward") == (hook == "none")
        torch.manual_seed(4)
        out.backward(torch.randn_like(out))
        grads = [p.grad for p in (x, w, *mlp.parameters()) if p.grad is not None]
        if hook in ("input", "output"):
            grads.append(seen[0].grad)
        assert bool(seen) == (hook != "none")
        return [out, *seen, *grads]

    found, expected = run(0), run(math.inf)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_recomputed_block_has_no_last_product(
    fp8: bool, bias: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads what a checkpointed block returns when it is computed again."""
    dtype = torch.bfloat16 if fp8 else torch.float32
    mlp = GatedMLP(32, 48, "silu", bias=bias).to(dtype)
    mlp.gate_up_proj.fp8 = mlp.down_proj.fp8 = fp8
    x, w = leaf(2, 3, 32, dtype=dtype), leaf(32, dtype=dtype)
    made: list[Tensor] = []
    one, whole = (importlib.import_module(f"tigon.kernels.linear.{n}") for n in ("fp8", "fp8_mlp"))
    products = [(one, "cast_product"), (whole, "cast_product"), (whole, "_down_product")]
    for module, name in products if fp8 else [(F, "linear")]:
        product = getattr(module, name)
        noted = lambda *args, of=product: made.append(args[1]) or of(*args)  # noqa: E731
        monkeypatch.setattr(module, name, noted)

    def run(again: bool) -> list[Tensor]:
        made.clear()
        block: Callable[[Tensor], Tensor] = lambda x: mlp(rms_norm(x, w, 1e-6))  # noqa: E731
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        torch.manual_seed(4)
        return [y, *torch.autograd.grad(y, [x, w, *mlp.parameters()], torch.randn_like(y))]

    expected = run(False)
    assert len(made) == 2
    assert all(map(torch.equal, run(True), expected))
    weights = [mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.gate_up_proj.weight]
    if fp8 or path == "triton":  # F.linear itself keeps its tensors before it computes
        assert [id(w) for w in made] == [id(w) for w in weights]


def test_readers_that_are_differentiated_apart(path: str) -> None:
    """The first must not write over what the second computes its input from."""
    x = leaf(2, 3, 2 * C)
    weights = [nn.Parameter(torch.randn(K, C)) for _ in range(2)]
    results = []
    for least in (0, math.inf):
        with recompute_above(least), saved_tensors_hooks(lambda t: t, lambda t: t):  # no versions
            y = gated_act(x * 1.0, "silu", overwrite=True)
            a, b = (linear(y, weight) for weight in weights)
        first = torch.autograd.grad(a.sum(), [x, weights[0]])
        results.append([*first, *torch.autograd.grad(b.sum(), weights[1])])
    assert all(map(torch.equal, *results))


def test_experts_that_are_differentiated_apart(path: str) -> None:
    x, experts, weights = leaf(6, 2 * C), torch.tensor([[0, 2]] * 6), torch.rand(6, 2)
    up, down = leaf(4, 20, C), leaf(4, C, 10)
    results = []
    for least in (0, math.inf):
        with recompute_above(least), saved_tensors_hooks(lambda t: t, lambda t: t):  # no versions
            y = gated_act(x * 1.0, "silu", overwrite=True)
            a = linear(y, torch.ones(K, C))
            b = grouped_mlp(y, up, down, experts, weights, "silu")
        first = torch.autograd.grad(a.sum(), x)
        results.append([*first, *torch.autograd.grad(b.sum(), up)])
    assert all(map(torch.equal, *results))


def test_experts_keep_the_stream(kernels_only: None) -> None:
    x, w = leaf(2, 3, C), leaf(C)
    up, down = leaf(4, 20, C), leaf(4, C, 10)
    experts, weights = torch.tensor([[0, 2]] * 6), leaf(6, 2)

    def mixed() -> Tensor:
        rows = rms_norm(x, w, 1e-6).flatten(0, 1)
        return grouped_mlp(rows, up, down, experts, weights, "silu")

    def run(learns: bool) -> tuple[Tensor, ...]:
        up.requires_grad_(learns)
        y = mixed()
        leaves = [t for t in (x, w, up, down, weights) if t.requires_grad]
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    for learns in (True, False):
        with recompute_above(math.inf):
            expected = run(learns)
        assert all(map(torch.equal, run(learns), expected))
    up.requires_grad_()
    # Of x, and of gate and up of two slots a token
    assert kept(mixed, up, down) == [C, 2 * 20]
    with recompute_above(math.inf):
        assert kept(mixed, up, down) == [C, C, 2 * 20]


def test_files_and_copies_have_the_values_alone(path: str) -> None:
    y = rms_norm(leaf(2, 3, C), leaf(C), 1e-6)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    for other in (read, copy.copy(y)):
        assert torch.equal(other, y) and find_recompute(other) is None


def test_registered_ops(kernels_only: None) -> None:
    x, w, rstd = torch.randn(3, C), torch.randn(C), torch.rand(3)
    torch.library.opcheck(recompute_norm.op, (x, rstd, x, w, 1.0, True), test_utils=CHECKS)
    given = x, x, rstd, w, None, 1.0, True
    torch.library.opcheck(recompute_sandwich.op, given, test_utils=CHECKS)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gradient_and_product_of_one_pass(act: Any, kernels_only: None) -> None:
    d, x = torch.randn(3, C), torch.randn(3, 2 * C)
    gradient, product = gradient_and_product(d.clone(), x, act, False)
    assert torch.equal(product, _forward(x, act))
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(gated_act(leaf, act), leaf, d)
    assert torch.equal(gradient, expected)
