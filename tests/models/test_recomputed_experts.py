"""activation_checkpointing="experts": gate_up of experts is computed again, with the same bits."""

import math
from typing import Any

import pytest

from tests.models.adapters import randomise, trained
from tests.models.test_rebuilt import assert_same, interpreted, make, step
from tests.support.saved import saved_storages
from tigon import LoraConfig
from tigon.layers import Experts, activation_offload
from tigon.models import CausalLM

OF_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
# Of gpt-oss biased, clamped and transposed, of DeepSeek after a dense block, of Gemma beside an MLP
MODELS: list[tuple[str, str, Any]] = [
    *(("qwen3_moe", "plain", targets) for targets in (None, ("o_proj",), OF_EXPERTS)),
    *(("gpt_oss", "plain", targets) for targets in (None, ("o_proj",), OF_EXPERTS)),
    ("deepseek_v3", "plain", None),
    ("gemma4_text", "experts", None),
]


def experts_of(model: CausalLM) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def kept(model: CausalLM, least: float, recompute: Any, away: bool) -> tuple[int, Any]:
    """Bytes that autograd saves in a step, and the loss with its gradients."""
    with saved_storages() as saved:
        found = step(model, least, recompute, away)
    return sum(storage.nbytes() for storage in saved.values()), found


@interpreted
@pytest.mark.kernel
@pytest.mark.parametrize("least", [0, math.inf], ids=["inputs again", "inputs kept"])
@pytest.mark.parametrize(("model_type", "case", "targets"), MODELS)
def test_no_bit_changes(model_type: str, case: str, targets: Any, least: float) -> None:
    """Gate and up of three tokens are not kept, and everything else is; also where adapters are
    trained elsewhere and where they are of experts."""
    model = make(model_type, case, num_hidden_layers=2)
    if targets:
        model.add_adapter(LoraConfig(rank=2, targets=targets))
        randomise(trained(model))
    before, expected = kept(model, least, False, False)
    assert expected[1] and all(grad.isfinite().all() for grad in expected[1].values())
    after, found = kept(model, least, "experts", False)
    assert_same(found, expected)
    c: Any = model.config
    per_token = getattr(c, "num_experts_per_tok", None) or c.top_k_experts
    numbers = [2 * 3 * per_token * e.matrix_shape("down_proj")[1] for e in experts_of(model)]
    assert before - after == 4 * sum(numbers) > 0


@interpreted
@pytest.mark.kernel
def test_offloaded_and_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    model = make("qwen3_moe", "plain", num_hidden_layers=2)
    before, expected = kept(model, 0, False, False)
    assert_same(step(model, 0, "experts", True), expected)  # type: ignore[arg-type]
    after, found = kept(model, 0, False, False)
    assert after == before
    assert_same(found, expected)


def test_model_without_experts() -> None:
    for model_type, name, changes in (
        ("llama", "plain", {}),
        ("deepseek_v3", "plain", {"num_hidden_layers": 1}),  # the first layer has none
    ):
        model = make(model_type, name, **changes)
        message = "=experts, but .*ForCausalLM has no experts: give true for all blocks, or N for"
        with pytest.raises(ValueError, match=message):
            model.activation_checkpointing = "experts"
        assert model.activation_checkpointing is False


@pytest.mark.parametrize("setting", ["auto", "", None, -1, 0.5, iter([0])])
def test_other_values(setting: Any) -> None:
    """Of which some end the forward pass, far from here, and others recompute nothing."""
    model = make("llama", "plain")
    with pytest.raises(ValueError, match=r"^activation_checkpointing=.* is not True, False, N for"):
        model.activation_checkpointing = setting
    assert model.activation_checkpointing is False
    for allowed in (True, 2, [0], {1}, range(2), frozenset()):
        model.activation_checkpointing = allowed
        assert model.activation_checkpointing == allowed
