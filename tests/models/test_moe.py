"""Mixtures of experts: the loss that balances them, what they report, and both forms on disk."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.test_io import same, tensors
from tests.models.test_parity import gradients
from tests.models.tiny import CASES, edit_config, exact, load_reference, reference
from tests.support import contract
from tests.support.numbers import assert_as_near, float64
from tigon.layers import SparseMoE
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import ConfigError
from tigon.models.moe import MoEConfig

FAMILIES = [name for name, family in MODELS.items() if issubclass(family.config_class, MoEConfig)]
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
ROUTING = [
    ("mixtral", "plain"),
    ("mixtral", "two of many"),
    ("olmoe", "plain"),
    ("olmoe", "one of many"),
    ("qwen2_moe", "plain"),
    ("qwen2_moe", "normed, no bias"),
    ("qwen2_moe", "some dense"),
    ("qwen3_moe", "plain"),
    ("qwen3_moe", "every other"),
    ("qwen3_5_moe_text", "plain"),
    ("qwen3_next", "some dense"),
    ("gpt_oss", "plain"),
]
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
families = pytest.mark.parametrize("model_type", FAMILIES)
B, T = 3, 17
SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def batch(padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 211, (B, T), generator=generator)
    labels = ids.masked_fill(torch.rand(B, T, generator=generator) < 0.3, -100)
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[0, 11:] = mask[1, 5:] = 0
    ids = ids.masked_fill(mask == 0, 0)  # all alike, so that they would be seen in the balance
    return {"input_ids": ids, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}


def pair(model_type: str, case: str, directory: Path, **changes: Any) -> tuple[Any, CausalLM]:
    theirs = reference(model_type, CASES[model_type][case] | changes, directory)
    return theirs, from_pretrained(directory)


def tiny(model_type: str = "qwen2_moe", **changes: Any) -> CausalLM:
    """A random one, fp32."""
    sizes = {**CASES[model_type]["plain"], **SMALL, **changes}
    return MODELS[model_type].from_config(sizes, dtype=torch.float32)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(("model_type", "case"), ROUTING)
@pytest.mark.parametrize("padded", [False, True])
def test_loss_with_balance(model_type: str, case: str, padded: bool, tmp_path: Path) -> None:
    theirs, ours = pair(model_type, case, tmp_path, **BALANCED)
    twin, inputs = exact(theirs), batch(padded)
    out, peer = ours(**inputs), theirs(**inputs)
    with float64():
        truth = twin(**inputs)
    if padded:  # the pads would have counted
        everywhere = theirs(inputs["input_ids"], labels=inputs["labels"]).aux_loss
        assert abs(everywhere - peer.aux_loss) > 1e-3
    routers = [name for name, _ in theirs.named_parameters() if name.endswith(ROUTERS)]
    assert len(routers) == sum(isinstance(m, SparseMoE) for m in ours.modules())

    for which in ("aux_loss", "loss"):
        losses = [getattr(x, which) for x in (out, peer, truth)]
        assert_as_near(*losses)
        wanted = []
        for model, loss in zip((ours, theirs, twin), losses, strict=True):
            with float64() if model is twin else nullcontext():
                model.zero_grad()
                loss.backward(retain_graph=True)
            wanted.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert_as_near(gradients(ours, missing=which == "aux_loss"), *wanted[1:])


def loads(router_logits: list[Tensor], k: int, real: Tensor) -> Tensor:
    """[layers, E], by counting."""
    found = torch.zeros(len(router_logits), router_logits[0].shape[1])
    for layer, logits in enumerate(router_logits):
        for row in logits[real.flatten().bool()]:
            for expert in row.sort(descending=True).indices[:k].tolist():
                found[layer, expert] += 1
    return found / found.sum(1, keepdim=True)


@pytest.mark.parametrize(("model_type", "case"), ROUTING)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_metrics(model_type: str, case: str, padded: bool, balanced: bool, tmp_path: Path) -> None:
    theirs, ours = pair(model_type, case, tmp_path, output_router_logits=balanced)
    inputs, twin = batch(padded), exact(theirs)
    with torch.no_grad():
        expected = theirs(**inputs, output_router_logits=True)
        with float64():
            truth = twin(**inputs, output_router_logits=True).aux_loss
    out = ours(**inputs, metrics=("expert_load", "aux_loss", "accuracy"))
    assert out.metrics.keys() == {"expert_load", "aux_loss", "accuracy"}
    real = inputs.get("attention_mask", torch.ones(B, T))
    load = loads(expected.router_logits, theirs.config.num_experts_per_tok, real)
    torch.testing.assert_close(out.metrics["expert_load"], load)
    assert_as_near(out.metrics["aux_loss"], expected.aux_loss, truth)
    assert not out.metrics["aux_loss"].requires_grad
    assert not out.metrics["expert_load"].requires_grad
    # Asking changes nothing, and labels are not needed
    assert torch.equal(out.loss, ours(**inputs).loss)
    del inputs["labels"]
    again = ours(**inputs, metrics=("expert_load",))
    assert again.metrics.keys() == {"expert_load"} and again.loss is None
    assert torch.equal(again.metrics["expert_load"], out.metrics["expert_load"])


def test_metrics_without_experts() -> None:
    with pytest.raises(ValueError, match="metrics=\\('aux_loss',\\): no layer of this Llama has"):
        contract.tiny_llama()(torch.arange(8)[None], metrics=("aux_loss",))
    dense = tiny(mlp_only_layers=[0, 1, 2], output_router_logits=True)
    assert dense(**batch()).aux_loss is None
    with pytest.raises(ValueError, match="no layer of this Qwen2Moe has experts"):
        dense(**batch(), metrics=("expert_load",))
    with pytest.raises(ValueError, match="metrics=\\('nll',\\) without labels"):
        tiny()(batch()["input_ids"], metrics=("nll", "aux_loss"))


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_micro_batches_add_up(reduction: Any) -> None:
    """To the cross-entropy of all, and the coefficient times their mean balance, by items."""
    model, inputs = tiny(**BALANCED), batch()
    inputs["labels"][0, 3:] = -100
    rows = [{name: t[i : i + 1] for name, t in inputs.items()} for i in range(B)]
    weights = torch.stack([model.num_items(**row, loss_reduction=reduction) for row in rows])
    assert reduction == "sequence" or len(weights.unique()) > 1
    items = weights.sum()
    outs = [model(**row, loss_reduction=reduction, num_items_in_batch=items) for row in rows]
    aux = sum(w * out.aux_loss for w, out in zip(weights / items, outs, strict=True))
    plain = tiny()
    plain.load_state_dict(model.state_dict())
    expected = plain(**inputs, loss_reduction=reduction).loss + 0.7 * aux
    torch.testing.assert_close(sum(out.loss for out in outs), expected, rtol=1e-6, atol=0.0)
    alone = model(**rows[0], loss_reduction=reduction)
    same_alone = model(
        **rows[0], loss_reduction=reduction, num_items_in_batch=int(weights[0].item())
    )
    torch.testing.assert_close(alone.loss, same_alone.loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sums_and_single_losses_are_of_the_tokens_alone(reduction: Any) -> None:
    model, plain = tiny(**BALANCED), tiny()
    plain.load_state_dict(model.state_dict())
    out = model(**batch(), loss_reduction=reduction)
    assert torch.equal(out.loss, plain(**batch(), loss_reduction=reduction).loss)
    assert torch.equal(out.aux_loss, model(**batch()).aux_loss)
    assert out.aux_loss.requires_grad


def test_without_a_target_nothing_is_learned() -> None:
    model = tiny(**BALANCED)
    out = model(batch()["input_ids"], labels=torch.full((B, T), -100))
    assert out.loss == 0
    assert not any(grad.any() for grad in contract.gradients(out.loss, model).values())


@families
def test_recomputed_blocks_give_the_same(model_type: str) -> None:
    model, inputs = tiny(model_type, **BALANCED), batch(padded=True)
    passes: list[Any] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda *given: passes.append(given))
    out = model(**inputs, metrics=("expert_load",))
    expected = contract.gradients(out.loss, model)
    assert len(passes) == len(model.model.layers)
    passes.clear()
    model.activation_checkpointing = True
    again = model(**inputs, metrics=("expert_load",))
    assert torch.equal(again.loss, out.loss)
    assert torch.equal(again.metrics["expert_load"], out.metrics["expert_load"])
    found = contract.gradients(again.loss, model)
    assert len(passes) == 2 * len(model.model.layers)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@families
@pytest.mark.parametrize("normed", [False, True])
def test_routing_in_bf16(model_type: str, normed: bool, tmp_path: Path) -> None:
    """Experts and weights to the bit: rounding them would drown in the spread of the logits."""
    known = AutoConfig.for_model(model_type).to_dict()
    overrides = CASES[model_type]["plain"] | (
        {"norm_topk_prob": normed} if "norm_topk_prob" in known else {}
    )
    reference(model_type, overrides, tmp_path, dtype=torch.bfloat16)
    theirs, ours = load_reference(tmp_path), from_pretrained(tmp_path)
    x = torch.randn(1, 200, 96).bfloat16()
    seen: list[Any] = []
    moe = ours.model.layers[0].mlp
    moe.experts.register_forward_pre_hook(lambda _, given: seen.extend(given))
    with torch.no_grad():
        out = moe(x)
        mlp = theirs.model.layers[0].mlp
        router = mlp.router if hasattr(mlp, "router") else mlp.gate
        logits, weights, experts = router(x.flatten(0, 1))
    assert torch.equal(seen[1], experts) and torch.equal(out.experts, experts)
    assert seen[2].dtype == weights.dtype and torch.equal(seen[2], weights)
    assert torch.equal(out.probs, logits.float().softmax(-1))


STACKED_NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FORMS = [(name, True) for name in FAMILIES]
FORMS += [(name, False) for name in FAMILIES if MODELS[name].checkpoint_names.experts]


@pytest.mark.parametrize(("model_type", "stacked"), FORMS)
@pytest.mark.parametrize("size", ["5GB", "40KB"])
def test_both_forms_load_and_go_out_as_they_came(
    model_type: str, stacked: bool, size: str, tmp_path: Path
) -> None:
    theirs = reference(
        model_type,
        CASES[model_type]["plain"],
        tmp_path / "a",
        save_original_format=not stacked,
        max_shard_size=size,
    )
    names = tensors(tmp_path / "a")
    assert any(name.endswith(STACKED_NAMES) for name in names) == stacked
    ours = from_pretrained(tmp_path / "a")
    inputs = batch()["input_ids"]
    with torch.no_grad():
        expected = theirs(inputs).logits
        assert (ours(inputs).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    ours.save_pretrained(tmp_path / "b", max_shard_size=size)
    assert same(tensors(tmp_path / "b"), names)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values()), info
    assert same(again.state_dict(), theirs.state_dict())
    other = from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    assert same(other.state_dict(), ours.bfloat16().state_dict())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    reference("mixtral", CASES["mixtral"]["plain"], tmp_path)
    edit_config(tmp_path, num_local_experts=9)
    expert, gate = (
        r"layers\.0\.block_sparse_moe\." + n for n in ("experts.8.w1", "gate.weight is")
    )
    with pytest.raises(ValueError, match=rf"(?s)9 missing: .*{expert}.*3 of another shape.*{gate}"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_both_names_of_the_number_of_experts(model_type: str) -> None:
    config_class = MODELS[model_type].config_class
    for names in (("num_experts",), ("num_local_experts",), ("num_experts", "num_local_experts")):
        raw = {name: 16 for name in names}
        assert AutoConfig.for_model(model_type, **raw).num_experts == 16
        config = config_class.from_dict(raw)
        assert config.experts == 16  # type: ignore[attr-defined]
        written = config.to_dict()
        assert written["num_experts"] == written["num_local_experts"] == 16
        assert config_class.from_dict(written) == config
    with pytest.raises(ConfigError, match=r"=16 and num_.*=8 are names of the same number"):
        config_class.from_dict(dict(zip(config_class.experts_keys, (16, 8), strict=True)))  # type: ignore[attr-defined]
