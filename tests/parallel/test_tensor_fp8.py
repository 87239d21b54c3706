"""Products of 8-bit floats in models cut over ranks, against whole ones and float64."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import batches, random_model
from tests.support.numbers import assert_as_near
from tests.support.recompute import recompute_above
from tigon.kernels.linear.fp8_mlp import fp8_mlp
from tigon.layers import mlp
from tigon.models import CausalLM
from tigon.parallel import shard_model
from tigon.train import load
from tigon.train.model import apply_model_settings, named_projections

# Biases that ranks add up; 4 ranks have a kv head in twos, and units that they share unevenly
SIZES = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16, "num_key_value_heads": 2}
BIASES = {"attention_bias": True, "attention_out_bias": True}


def trained(model: CausalLM, least: float) -> dict[str, Tensor]:
    """The loss, what the first product gives, and gradients, of which a rank has its own part."""
    seen: list[Tensor] = []
    first = model.model.layers[0].mixer.qkv_proj
    hook = first.register_forward_hook(lambda _, __, y: seen.append(y.detach()))
    with recompute_above(least):
        loss = model(**batches()[0]).loss
        loss.backward()
    hook.remove()
    if model.tensor_parallel is not None:
        model.tensor_parallel.sum_gradients(model)
    found = {"loss": loss.detach(), "qkv": seen[0]}
    found |= {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def of_rank(cut: CausalLM, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of gradients and of the first product."""
    own = {
        name: cut.shard_specs[name].take(g) if name in cut.shard_specs else g
        for name, g in whole.items()
    }
    pieces = cut.shard_specs["model.layers.0.self_attn.qkv_proj.weight"].pieces
    parts = [whole["qkv"].narrow(-1, rows.source, rows.length) for rows, _ in pieces]
    return own | {"qkv": torch.cat(parts, -1)}


def compare(count: int) -> dict[str, Any]:
    gated: list[Any] = []  # MLPs as one operator
    mlp.fp8_mlp = lambda *given: (gated.append(1), fp8_mlp(*given))[1]
    mesh = init_device_mesh("cpu", (count,))
    config = load(None, ["run_dir=x", "data=x", "model=x", "fp8=true", "dtype=bfloat16"])
    one = apply_model_settings(random_model("seed_oss", SIZES | BIASES).bfloat16(), config)
    cut = copy.deepcopy(one)
    shard_model(cut, mesh)
    apply_model_settings(cut, config)
    exact = apply_model_settings(
        copy.deepcopy(one).double(), load(None, ["run_dir=x", "data=x", "model=x"])
    )
    found = {"fp8": sum(layer.fp8 for _, layer in named_projections(cut))}
    found |= {"cut": trained(cut, math.inf), "again": trained(cut, 0)}
    found["gated"] = len(gated)
    for name, model in (("one", one), ("exact", exact)):
        found[name] = of_rank(cut, trained(model, math.inf))
    return found


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("count", [2, 4])
def test_parts_are_as_near_to_the_truth_as_the_whole(count):
    for found in run_on_ranks(count, compare, count):
        assert found["fp8"] == 8 and found["gated"] == 2 * 2
        exact = {name: value.double() for name, value in found["exact"].items()}
        losses = [found[name].pop("loss") for name in ("cut", "again", "one")]
        assert losses[0] == losses[1] == pytest.approx(losses[2].item(), rel=5e-3)
        del exact["loss"]
        # Rows of the weight, of tokens that all ranks have, with the scales of the whole one
        assert torch.equal(found["cut"]["qkv"], found["one"]["qkv"])
        assert any(not torch.equal(g, found["one"][n]) for n, g in found["cut"].items())
        assert_as_near(found["cut"], found["one"], exact)
        for name, gradient in found["cut"].items():
            assert torch.equal(found["again"][name], gradient), name
