"""Hooks of a model that ranks share: they see and change what they would in one process."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.module import register_module_forward_hook

from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import MOE, random_model
from tigon.layers import AddRMSNorm, Embedding, GatedMLP, RMSNorm, SparseMoE
from tigon.models import CausalLM
from tigon.parallel import shard_blocks, shard_model

FAMILIES = {"llama": {}, "qwen3_moe": MOE, "olmo2": {}}
WHOLE = ("model.embed_tokens", "layers.1", "layers.0.self_attn", "layers.1.mlp", "model.norm")
EVERYWHERE = (GatedMLP, SparseMoE, Embedding, RMSNorm, AddRMSNorm)
IDS = torch.randint(4, 200, (2, 9), generator=torch.Generator().manual_seed(2))


class Doubled(nn.Module):
    """Around a module, or a method of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class DoubledEmbedding(Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def changed(_module: nn.Module, _given: object, y: object) -> object:
    """No linear function, nor 0 of 0: it has to see sums."""
    if isinstance(y, tuple):
        first = changed(_module, _given, y[0])
        return type(y)(*(first, *y[1:])) if hasattr(y, "_fields") else (first, *y[1:])
    return (y + 0.05).relu() if isinstance(y, Tensor) else y


def logits(model: CausalLM) -> list[Tensor]:
    """Of a pass that may be differentiated, and of cached ones: a prompt and a token."""
    found = [model(IDS).logits]
    with torch.no_grad():
        cache = model.static_cache(2, 16)
        found += [model(part, past_key_values=cache).logits for part in (IDS[:, :8], IDS[:, 8:])]
    return found


def named(model: nn.Module, end: str) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith(end))


@contextmanager
def changing(*modules: nn.Module | None) -> Iterator[None]:
    """Their hooks change what they return; None: MLPs, embeddings and norms, by a hook for all."""

    def hook(module: nn.Module, given: object, y: object) -> object:
        return changed(module, given, y) if isinstance(module, EVERYWHERE) else y

    handles = [
        register_module_forward_hook(hook) if m is None else m.register_forward_hook(changed)
        for m in modules
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    for handle in handles:
        handle.remove()


def distances(one: list[Tensor], cut: list[Tensor], plain: list[Tensor]) -> list[float]:
    """The largest of the two from each other, and the least of the first from the last."""
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(one, cut, strict=True))
    acted = min(float((a - c).detach().abs().max()) for a, c in zip(one, plain, strict=True))
    return [apart, acted]


def compare() -> dict[str, list[float]]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for family, sizes in FAMILIES.items():
        one = random_model(family, sizes).eval()
        cut = copy.deepcopy(one)
        shard_model(cut, mesh)
        plain = logits(one)
        for end in WHOLE:
            with changing(named(one, end), named(cut, end)):
                found[f"{family}, {end}"] = distances(logits(one), logits(cut), plain)
        with changing(None):  # what is a sum in a block
            found[f"{family}, all modules"] = distances(logits(one), logits(cut), plain)
        for model in one, cut:
            model.model.embed_tokens.__class__ = DoubledEmbedding
        found[f"{family}, another embedding"] = distances(logits(one), logits(cut), plain)
    return found


def compare_under_fsdp() -> dict[str, list[float]]:
    """FSDP2 has hooks of its own on blocks and on the embedding, of groups of one rank too."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tensor"))
    one = random_model("llama", {}).eval()
    cut = copy.deepcopy(one)
    shard_model(cut, mesh["tensor"])
    shard_blocks(cut, mesh["fsdp"], compute=torch.float32, keeps_ends=False)
    plain, found = one(IDS).logits, {}
    apart = float((cut(IDS).logits - plain).detach().abs().max())
    _, summands = cut.model.embed(IDS)
    found["no hook"] = [apart, float(summands)]
    for end in WHOLE:
        with changing(named(one, end), named(cut, end)):
            found[end] = distances([one(IDS).logits], [cut(IDS).logits], [plain])
    return found


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("function", "count"),
    [(compare_under_fsdp, len(WHOLE) + 1), (compare, len(FAMILIES) * (len(WHOLE) + 2))],
)
def test_hooks_see_and_change_sums(function: Callable[..., Any], count: int) -> None:
    found = run_on_ranks(2, function)[0]
    assert len(found) == count
    for name, (apart, acted) in found.items():
        assert apart < 2e-5, name
        assert acted > 1e-2, name  # a hook changes something; without one, embeddings are sums


def hook_o_proj(block: nn.Module) -> None:
    block.self_attn.o_proj.register_forward_hook(changed)


def hook_down_proj(block: nn.Module) -> None:
    block.mlp.down_proj.register_forward_hook(changed)


def hook_experts(block: nn.Module) -> None:
    block.mlp.experts.register_forward_hook(changed)


def wrap_mlp(block: nn.Module) -> None:
    block.mlp = Doubled(block.mlp)


def patch_mlp(block: nn.Module) -> None:
    block.mlp.forward = Doubled(copy.copy(block.mlp)).forward


def wrap_o_proj(block: nn.Module) -> None:
    block.self_attn.o_proj = Doubled(block.self_attn.o_proj)


def patch_down_proj(block: nn.Module) -> None:
    product = block.mlp.down_proj
    product.forward = Doubled(copy.copy(product)).forward


def patch_experts(block: nn.Module) -> None:
    experts = block.mlp.experts
    before = experts.forward
    experts.forward = lambda *given: 2 * before(*given)


PARTS: dict[Callable[[nn.Module], None], tuple[str, str]] = {
    hook_o_proj: ("llama", "self_attn.o_proj: a hook on it"),
    hook_down_proj: ("llama", "mlp.down_proj: a hook on it"),
    hook_experts: ("qwen3_moe", "mlp.experts: a hook on it"),
    wrap_o_proj: ("llama", "self_attn.o_proj: a patched module"),
    patch_down_proj: ("llama", "mlp.down_proj: a patched module"),
    patch_experts: ("qwen3_moe", "mlp.experts: a patched module"),
    wrap_mlp: ("llama", "mlp: a patched MLP"),
    patch_mlp: ("llama", "mlp: a patched MLP"),
}


def warn() -> dict[str, list[str]]:
    mesh, said = init_device_mesh("cpu", (2,)), {}
    for change, (family, _) in PARTS.items():
        model = random_model(family, FAMILIES[family]).eval()
        shard_model(model, mesh)
        change(model.model.layers[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(IDS)
        said[change.__name__] = [str(warning.message) for warning in caught]
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    return run_on_ranks(2, warn)[0]


@pytest.mark.parametrize("change", PARTS)
def test_what_gets_parts_of_sums_is_named(
    said: dict[str, list[str]], change: Callable[[nn.Module], None]
) -> None:
    (text,) = said[change.__name__]
    assert text.startswith(f"model.layers.1.{PARTS[change][1]} sees a partial sum")
