"""Attention that rotates q and k in the memory of qkv: who sees what, and what a graph keeps."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tigon.kernels
from tigon.kernels import AttentionMask
from tigon.layers import Attention, BlockInputs, FusedLinear, KVCache, Linear, Rotation

CUDA = torch.cuda.is_available()
# What runs in backward's thread or is compiled does not see the default device
DEVICE = "cuda" if CUDA else "cpu"
B, T, C, H, K, D = 2, 5, 12, 4, 2, 6
ROW = (H + 2 * K) * D
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"bias": True},
    "glm4": {"interleaved": True},
    "qwen3": {"qk_norm_eps": 1e-2},
    "olmo2": {"qk_norm_eps": 1e-2, "flat_qk_norm": True},
}
IN_PLACE = ("llama", "qwen2", "glm4")
variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(autouse=True)
def triton() -> Iterator[None]:
    torch.set_default_device(DEVICE)
    with tigon.kernels.use("triton"):
        yield
    torch.set_default_device(None)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, q and k are rotated into memory of their own."""
    return lambda: monkeypatch.setattr(Attention, "_is_unobserved", lambda self: False)


def make(variant: str = "llama") -> Attention:
    torch.manual_seed(0)
    layer = Attention(C, H, K, D, **VARIANTS[variant])
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def rotation(turned: int = D, tokens: int = T) -> Rotation:
    theta = torch.linspace(0.1, 6, tokens * turned // 2, device=DEVICE)
    theta = theta.view(1, tokens, turned // 2)
    return Rotation(theta.cos(), theta.sin())


def inputs() -> Tensor:
    return torch.randn(B, T, C, requires_grad=True)


def run(layer: Attention, x: Tensor, turned: int = D) -> Tensor:
    context = BlockInputs(torch.arange(T, device=DEVICE)[None], AttentionMask(T))
    return layer(x, rotation(turned), None, context)


def numbers(layer: Attention, x: Tensor, call: Any = run, **options: Any) -> list[Tensor]:
    y, leaves = call(layer, x, **options), (x, *layer.parameters())
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    found = [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    for leaf in leaves:
        leaf.grad = None
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) >= 4
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("turned", [D, 4])
@variants
def test_no_bit_changes(variant: str, turned: int, copies: Callable[[], None]) -> None:
    layer, x = make(variant), inputs()
    found = numbers(layer, x, turned=turned)
    copies()
    assert_same(found, numbers(layer, x, turned=turned))


def kept(layer: Attention, x: Tensor) -> dict[int, int]:
    """Bytes that a graph of the layer keeps of q, k, v and qkv, by memory."""
    found: dict[int, Any] = {}
    own = {t.untyped_storage()._cdata for t in layer.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if t.shape[-1] in (D, ROW) and t.dim() in (3, 4) and storage._cdata not in own:
            found[storage._cdata] = storage
        return t

    def squares(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        """Keeps all three, as attention does."""
        return q.square() + (k.square() + v.square()).repeat_interleave(H // K, 2)

    with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(pack, lambda t: t):
        patch.setattr("tigon.layers.attention.attention", squares)
        run(layer, x)
    return {key: storage.nbytes() for key, storage in found.items()}


@variants
def test_bytes_that_a_layer_keeps(variant: str) -> None:
    """One memory for q, k and v; where norms need their input, q and k besides."""
    heads = [H + 2 * K] if variant in IN_PLACE else [K, H, H + 2 * K]
    expected = [4 * B * T * D * n for n in heads]
    assert sorted(kept(make(variant), inputs()).values()) == expected


def keeps(register: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
    """A hook's handle, and the outputs that it keeps as they are."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, given: Any, out: Tensor) -> None:
        if isinstance(module, FusedLinear):
            seen.append(out)
            handle.remove()  # a hook that goes away has seen it nevertheless

    handle = register(hook)
    return handle, seen


@variants
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_keeps_what_the_projection_returns(variant: str, everywhere: bool) -> None:
    layer, x = make(variant), inputs()
    expected = numbers(layer, x)
    register = layer.qkv_proj.register_forward_hook
    _, seen = keeps(register_module_forward_hook if everywhere else register)
    assert_same(numbers(layer, x), expected)
    (qkv,) = seen
    assert torch.equal(qkv, layer.qkv_proj(x)) and qkv._version == 0


class Keeping(FusedLinear):
    """A projection whose output others read: of a subclass's own, or of one it wraps."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


class Computing(FusedLinear):
    def product(self, x: Tensor) -> Tensor:
        self.seen = super().product(x)
        return self.seen


@pytest.mark.parametrize("how", ["forward", "product", "an attribute"])
def test_projections_of_others_keep_theirs(how: str) -> None:
    layer, x = make(), inputs()
    expected, proj = numbers(layer, x), layer.qkv_proj
    seen: list[Tensor] = []
    if how == "an attribute":
        product = proj.product
        proj.product = lambda x: seen.append(product(x)) or seen[-1]  # type: ignore
    else:
        proj.__class__ = {"forward": Keeping, "product": Computing}[how]
    assert_same(numbers(layer, x), expected)
    qkv: Any = seen[-1] if seen else proj.seen
    assert torch.equal(qkv, nn.functional.linear(x, proj.weight)) and qkv._version == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [(FusedLinear, "forward"), (Linear, "forward"), (Linear, "product"), (nn.Module, "__call__")],
)
def test_methods_that_others_put_into_our_classes(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(), inputs()
    expected, ours, seen = numbers(layer, x), getattr(owner, name), list[Tensor]()

    def keeping(self: nn.Module, *given: Any) -> Any:
        out = ours(self, *given)
        if self is layer.qkv_proj:
            seen.append(out)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, keeping)
        assert_same(numbers(layer, x), expected)
    (qkv,) = seen
    assert torch.equal(qkv, layer.qkv_proj(x)) and qkv._version == 0
    assert len(kept(layer, x)) == 1


class KeepingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = nn.functional.linear(x, weight)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).mT @ x.flatten(0, -2)


class OwnProduct(nn.Parameter):
    """A weight that computes its products, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                return KeepingProduct.apply(*args[:2])
            return func(*args, **(kwargs or {}))


def test_a_weight_may_keep_its_product() -> None:
    layer, x = make(), inputs()
    y, dx, *_ = numbers(layer, x)
    layer.qkv_proj.weight = OwnProduct(layer.qkv_proj.weight.detach())
    for found, expected in zip(numbers(layer, x)[:2], (y, dx), strict=True):
        torch.testing.assert_close(found, expected)


def recomputed(layer: Attention, x: Tensor, **more: Any) -> Tensor:
    return checkpoint(run, layer, x, use_reentrant=False, **more)  # type: ignore[return-value]


def reentrant(layer: Attention, x: Tensor) -> Tensor:
    return checkpoint(run, layer, x, use_reentrant=True)  # type: ignore[return-value]


def selective(layer: Attention, x: Tensor) -> Tensor:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
        save = op in products
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return recomputed(layer, x, context_fn=lambda: create_selective_checkpoint_contexts(policy))


def on_cpu(layer: Attention, x: Tensor) -> Tensor:
    with save_on_cpu():
        return run(layer, x)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("call", [recomputed, reentrant, selective, on_cpu])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_other_ways_to_keep_less(variant: str, call: Any) -> None:
    layer, x = make(variant), inputs()
    assert_same(numbers(layer, x, call), numbers(layer, x))


@variants
def test_without_gradients_and_with_a_cache(variant: str, copies: Callable[[], None]) -> None:
    layer, x = make(variant), inputs()
    found = []
    for _ in range(2):
        cache, steps = KVCache(), []
        for first, last in ((0, 3), (3, 4), (4, 5)):
            with torch.set_grad_enabled(first == 0):
                n = last - first
                mask = AttentionMask(n, past=cache.begin(B, n))
                (state,) = cache.open(lambda spec: [layer.make_state(spec)], x, mask)
                context = BlockInputs(torch.arange(first, last)[None], mask, append=cache.append)
                now = Rotation(*(t[:, first:last] for t in rotation()[:2]))
                steps.append(layer(x[:, first:last], now, state, context).detach())
                cache.end(mask)
        found.append(torch.cat(steps, 1))
        copies()
    assert torch.equal(*found)
    with torch.no_grad():
        torch.testing.assert_close(found[0], run(layer, x), rtol=1e-4, atol=1e-5)


def test_under_autocast(copies: Callable[[], None]) -> None:
    layer, x = make("qwen2"), inputs()
    found = []
    for _ in range(2):
        with torch.autocast(x.device.type, torch.float16):
            found.append(numbers(layer, x))
        copies()
    assert_same(*found)


@pytest.mark.slow(first=1)
@pytest.mark.traced
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_compiled_equals_eager(variant: str) -> None:
    layer, x = make(variant), inputs()
    expected = numbers(layer, x)
    torch._dynamo.reset()
    backend = "inductor" if CUDA else "aot_eager"
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for a, b in zip(numbers(layer, x, compiled), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
