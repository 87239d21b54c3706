"""torch.compile makes one graph of what runs on a GPU, looked at without one."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import CASES, FP8, KINDS, MORE_KINDS
from tests.models import tiny
from tests.support.fake_gpu import GPU, fake_gpu
from tigon.models import MODELS, CausalLM
from tigon.train.compile_step import allocate

__all__ = ["fake_gpu"]
pytestmark = [
    pytest.mark.usefixtures("fake_gpu"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="traced for the real one elsewhere"),
]
LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
ONE = {"num_hidden_layers": 1}
TWO = {"num_hidden_layers": 2}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": ONE,
    "qwen3_moe": ONE,
    "gpt_oss": ONE,
    "muse_glimmer_text": ONE,
    "qwen3_5_text": {"layer_types": [LINEAR, FULL], **TWO},
    "gemma4_text": {"layer_types": [SLIDING, FULL], "num_kv_shared_layers": 0, **TWO},
}
LISTED = {"layer_types", "layer_rope_theta"}
FAMILIES = [*LAYERS, *(family for family in MODELS if family not in LAYERS)]


def make_model(family: str) -> CausalLM:
    """The first tiny model of a family, with heads that FlashAttention takes."""
    sizes = next(iter(tiny.CASES[family].values()))
    layers = LAYERS.get(family, {} if LISTED & sizes.keys() else ONE)
    config = tiny.their_config(family, **tiny.SIZES | sizes | {"head_dim": 16} | layers)
    text = MODELS[family].config_class.from_dict(config.get_text_config().to_dict())
    model = MODELS[family].from_config(text, dtype=torch.bfloat16, device="meta")
    allocate(model, torch.device(GPU))
    return model


@pytest.mark.slow(first=len(LAYERS))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_training(family: str) -> None:
    model = make_model(family)
    ids, mask = torch.zeros(2, 2, 40, dtype=torch.long, device=GPU)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(ids, labels=ids, attention_mask=mask).loss.requires_grad


@pytest.mark.parametrize("family", LAYERS)
def test_models_that_generate(family: str) -> None:
    model = make_model(family)
    ids = torch.zeros(2, 40, dtype=torch.long, device=GPU)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = compiled(ids, use_cache=True).past_key_values
        assert compiled(ids[:, :1], past_key_values=cache).logits.shape[1] == 1


@pytest.mark.parametrize("name", [*KINDS, *MORE_KINDS, "fp8_linear"])
def test_operators(name: str) -> None:
    case = (CASES | FP8)[name]
    with torch.device(GPU):
        inputs = case.make()
    case.run(inputs, torch.compile(case.operator, fullgraph=True, backend="eager"))
