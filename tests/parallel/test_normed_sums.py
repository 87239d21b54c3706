"""Decoding: norms that are computed in the kernel of the sum over ranks before them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tests.support.small import LLAMA
from tigon.distributed.collectives import Ranks
from tigon.kernels.norm.rms_norm import rms_norm
from tigon.models import CausalLM
from tigon.parallel import tensor_modules
from tigon.parallel.tensor_modules import TensorPass
from tigon.parallel.tensor_parallel import install_modules

IDS = torch.arange(5, 9)[None]


class Two(Ranks):
    """Two ranks that have the same."""

    def sum(self, x: Tensor) -> Tensor:
        return 2 * x


def hook(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[CausalLM], Any]:
    def register(model: CausalLM) -> None:
        module = model.model.layers[1].get_submodule(name)
        module.register_forward_hook(lambda *args: change(args[2]))

    return register


def scale_branches(model: CausalLM) -> None:
    for block in model.model.layers:
        block.branch_scale = 0.5


def wrap_norm(model: CausalLM) -> None:
    block = model.model.layers[1]
    own = block.post_attention_layernorm.forward
    block.post_attention_layernorm.forward = lambda x, residual: own(x * 3, residual)


# What is done to a model, and how many of its four sums norms use then
CHANGES: dict[str, tuple[Callable[[CausalLM], Any], int]] = {
    "nothing": (lambda _: None, 4),
    "a hook that reads": (hook("self_attn", lambda y: None), 4),
    "a hook that replaces": (hook("self_attn", lambda y: y * 3), 3),
    "a hook that writes": (hook("self_attn.o_proj", lambda y: y.mul_(3)), 3),
    "a hook on an MLP": (hook("mlp.down_proj", lambda y: y * 3), 3),
    "another norm": (wrap_norm, 3),
    "scaled branches": (scale_branches, 0),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the kernel, in whose place torch computes."""
    made: list[int] = []

    def fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: Any, **options: Any):
        with torch.inference_mode(False):
            total = torch.empty_like(x)
        total.copy_(2 * x)
        made.append(1)
        return total, *rms_norm(total, weight, eps, residual=residual, **options)

    monkeypatch.setattr(tensor_modules, "all_reduce_small_norm", fused)
    return made


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_norms_use_what_is_still_true(name, mode, calls, monkeypatch):
    torch.manual_seed(0)
    model = tigon.Llama.from_config(LLAMA).eval()
    for p in model.parameters():
        nn.init.normal_(p.data, std=0.1)
    install_modules(model, TensorPass(Two("none", 0, 2)))
    change, used = CHANGES[name]
    change(model)
    taken: list[bool] = []
    own = TensorPass.take_norm

    def take(*args: Any) -> Any:
        output = own(*args)
        taken.append(output is not None)
        return output

    def logits() -> list[Tensor]:
        with mode():
            cache = model.static_cache(1, 16)
            return [model(part, past_key_values=cache).logits for part in (IDS[:, :3], IDS[:, 3:])]

    monkeypatch.setattr(TensorPass, "take_norm", take)
    found = logits()
    assert sum(taken) == 2 * used and len(calls) == 8
    monkeypatch.setattr(tensor_modules, "all_reduce_small_norm", lambda *_, **__: None)
    for a, b in zip(found, logits(), strict=True):
        assert torch.equal(a, b)
    assert sum(taken) == 2 * used


def test_passes_with_gradients_sum_alone(calls):
    model = tigon.Llama.from_config(LLAMA)
    tensor = TensorPass(Two("none", 0, 2))
    install_modules(model, tensor)
    with torch.enable_grad():
        tensor.expect_sum(1, torch.zeros(1))
    assert torch.equal(tensor.reduce(torch.ones(2)), torch.full((2,), 2.0))
    assert not calls
