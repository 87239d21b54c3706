"""Hooks and replaced modules of a model that ranks share see what they would in one process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
EVERYWHERE = (GatedMLP, SparseMoE, Embedding, RMSNorm, AddRMSNorm)
IDS = torch.randint(4, 200, (2, 9), generator=torch.Generator().manual_seed(2))


class Doubled(nn.Module):
    def __init__(self, inner: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        return 2 * self.inner(*inputs)


class DoubledEmbedding(Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def changed(module: nn.Module, inputs: object, y: object) -> object:
    """No linear function, nor 0 of 0: it has to see sums."""
    if isinstance(y, tuple):
        first = changed(module, inputs, y[0])
        return type(y)(*(first, *y[1:])) if hasattr(y, "_fields") else (first, *y[1:])
    return (y + 0.05).relu() if isinstance(y, Tensor) else y


@contextmanager
def hook(name: str, model: CausalLM) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_hook(changed)
    yield
    handle.remove()


@contextmanager
def hook_everywhere(model: CausalLM) -> Iterator[None]:
    def change(module: nn.Module, inputs: object, y: object) -> object:
        return changed(module, inputs, y) if isinstance(module, EVERYWHERE) else y

    handle = register_module_forward_hook(change)
    yield
    handle.remove()


@contextmanager
def wrap(name: str, model: CausalLM) -> Iterator[None]:
    model.set_submodule(name, Doubled(model.get_submodule(name)))
    yield


@contextmanager
def patch(name: str, model: CausalLM) -> Iterator[None]:
    module = model.get_submodule(name)
    module.forward = Doubled(module.forward).forward
    yield


@contextmanager
def patch_embedding(model: CausalLM) -> Iterator[None]:
    model.model.embed_tokens.__class__ = DoubledEmbedding
    yield


Change = Callable[[CausalLM], Any]
ALWAYS: dict[str, Change] = {
    name: partial(hook, f"model.{name}")
    for name in ("embed_tokens", "layers.1", "layers.0.self_attn", "layers.1.mlp", "norm")
} | {"o_proj": partial(hook, "model.layers.1.self_attn.o_proj")}
CHANGES: dict[str, dict[str, Change]] = {
    family: ALWAYS | {"all": hook_everywhere, "own embedding": patch_embedding}
    for family in FAMILIES
}
CHANGES["llama"] |= {
    "down_proj": partial(hook, "model.layers.1.mlp.down_proj"),
    "own MLP": partial(wrap, "model.layers.1.mlp"),
    "own o_proj": partial(wrap, "model.layers.1.self_attn.o_proj"),
    "patched down_proj": partial(patch, "model.layers.1.mlp.down_proj"),
}
COUNT = sum(map(len, CHANGES.values()))


def logits(model: CausalLM) -> list[Tensor]:
    """Of a pass that may be differentiated, and of cached ones: a prompt and a token."""
    found = [model(IDS).logits]
    with torch.no_grad():
        cache = model.static_cache(2, 16)
        found += [model(part, past_key_values=cache).logits for part in (IDS[:, :8], IDS[:, 8:])]
    return found


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
        for name, change in CHANGES[family].items():
            results = []
            for model in copy.deepcopy(one), copy.deepcopy(cut):
                with change(model):
                    results.append(logits(model))
            found[f"{family}, {name}"] = distances(*results, plain)
    return found


def compare_under_fsdp() -> dict[str, list[float]]:
    """FSDP2 has hooks of its own on blocks and on the embedding, of groups of one rank too."""
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tensor")), {}
    one = random_model("llama", {}).eval()
    cut = copy.deepcopy(one)
    shard_model(cut, mesh["tensor"])
    shard_blocks(cut, mesh["fsdp"], compute=torch.float32, keeps_ends=False)
    plain = one(IDS).logits
    for name, change in ALWAYS.items():
        with change(one), change(cut):
            found[name] = distances([one(IDS).logits], [cut(IDS).logits], [plain])
    return found


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("function", "count"), [(compare_under_fsdp, len(ALWAYS)), (compare, COUNT)]
)
def test_hooks_see_and_change_sums(function: Callable[..., Any], count: int) -> None:
    found = run_on_ranks(2, function)[0]
    assert len(found) == count
    for name, (apart, acted) in found.items():
        assert apart < 2e-5, name
        assert acted > 1e-2, name  # a hook changes something
