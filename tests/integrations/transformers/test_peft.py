"""PEFT's methods on Tigon's models, by task_type: numbers and files are those of transformers'."""

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

import tigon
from tests.integrations.transformers.peers import checkpoint, pair, score_pair

IDS = torch.arange(3, 21).view(2, 9) * 7 % 200
LORA = partial(peft.LoraConfig, task_type="CAUSAL_LM", r=4, lora_alpha=7)
SHADOW = partial(peft.ShadowConfig, task_type="CAUSAL_LM", shadow_alpha=1.0, shadow_dropout=0.0)
LN = ["input_layernorm", "q_norm", "post_attention_layernorm", "pre_feedforward_layernorm", "norm"]
# Family, and case of it -> the config of each method
METHODS: dict[str, tuple[str, str, partial[peft.PeftConfig]]] = {
    "default": ("llama", "mlp_bias", LORA),
    "every name": ("qwen3", "tied", partial(LORA, target_modules="all-linear")),
    "regex": (
        "qwen3",
        "tied",
        partial(LORA, target_modules=r".*\.[02]\..*(k_proj|up_proj|down_proj)"),
    ),
    "dora": ("llama", "mlp_bias", partial(LORA, target_modules="all-linear", use_dora=True)),
    "rslora": (
        "gemma3_text",
        "two ropes",
        partial(LORA, target_modules=["o_proj"], use_rslora=True),
    ),
    "lm_head": ("gemma2", "small caps", partial(LORA, target_modules=["q_proj", "lm_head"])),
    "embed_tokens": (
        *("gemma3_text", "two ropes"),
        partial(LORA, target_modules=["gate_proj", "embed_tokens"]),
    ),
    "inputs of layers": (
        *("gemma4_text", "shared"),
        partial(LORA, target_modules=["embed_tokens_per_layer", "per_layer_projection"]),
    ),
    "modules_to_save": (
        *("llama", "grouped"),
        partial(LORA, target_modules=["v_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    ),
    "rank_pattern": (
        *("qwen3", "tied"),
        partial(
            LORA,
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"v_proj": 2},
            alpha_pattern={r"layers\.1\.self_attn\.q_proj": 3},
        ),
    ),
    "fused as published": ("phi3", "plain", partial(LORA, target_modules="all-linear")),
    "latent attention": ("deepseek_v3", "plain", partial(LORA, target_modules="all-linear")),
    "delta": ("qwen3_next", "plain", partial(LORA, target_modules="all-linear")),
    "convolutions": ("lfm2", "plain", partial(LORA, target_modules="all-linear")),
    "experts beside the MLP": (
        *("gemma4_text", "experts"),
        partial(LORA, target_modules="all-linear"),
    ),
    "experts": (
        *("qwen3_moe", "normed, biases"),
        partial(
            LORA,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
    "transposed experts": (
        *("gpt_oss", "plain"),
        partial(LORA, target_modules=["o_proj"], target_parameters=["experts.gate_up_proj"]),
    ),
    "ia3": (
        *("qwen3", "tied"),
        partial(
            peft.IA3Config,
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        ),
    ),
    "loha": (
        *("llama", "mlp_bias"),
        partial(peft.LoHaConfig, task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"]),
    ),
    "norms": (
        *("gemma3_text", "two ropes"),
        partial(peft.LNTuningConfig, task_type="CAUSAL_LM", target_modules=LN),
    ),
    "tokens": (
        *("gemma3_text", "two ropes"),
        partial(peft.TrainableTokensConfig, task_type="CAUSAL_LM", token_indices=[3, 10]),
    ),
    "prefix": (
        *("qwen3", "tied"),
        partial(peft.PrefixTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=4),
    ),
    "prompt": (
        *("llama", "grouped"),
        partial(peft.PromptTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=4),
    ),
    "shadow": ("llama", "mlp_bias", partial(SHADOW, share_embeddings=False)),
    "shadow of some layers": (
        *("gemma3_text", "two ropes"),
        partial(SHADOW, layers_to_transform=[1, 2], layers_pattern="layers", shadow_hidden_size=48),
    ),
}
# What the native `load_adapter` does not read: other methods, routers as parts of "all-linear", and
# tables that layers read
NOT_NATIVE = {
    "inputs of layers",
    "ia3",
    "loha",
    "norms",
    "tokens",
    "prompt",
    "prefix",
    "latent attention",
    "delta",
    "shadow",
    "shadow of some layers",
}
UNMERGED = {"tokens", "shadow", "shadow of some layers"}


def adapt(model: Any, config: peft.PeftConfig) -> Any:
    """PEFT's model in training mode, with random values that depend on their names alone."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, config).train()
    torch.manual_seed(0)
    for name, p in sorted(adapted.named_parameters()):
        if p.requires_grad:
            if "shadow_" in name:  # each library draws in an order of its own
                p.data.zero_()
            p.data.add_(torch.randn(p.shape) * 0.1)
    return adapted


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients, after a step's backward pass."""
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits [B, T, V], with those of virtual tokens where there are any."""
    return model.eval()(input_ids=IDS).logits


@torch.no_grad()
def continued(model: Any, tokens: int) -> Tensor:
    """Greedy text from whole passes: PEFT 0.21 loses the prompt in transformers' own cache."""
    text = IDS
    for _ in range(tokens):
        text = torch.cat((text, model(input_ids=text).logits[:, -1:].argmax(-1)), 1)
    return text


def assert_near(ours: Tensor, theirs: Tensor, name: str = "") -> None:
    """Asserts that they differ by no more than 2e-5 of the largest value."""
    assert ours.shape == theirs.shape, name
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max(), name


@pytest.mark.parametrize("method", METHODS)
def test_method(method: str, tmp_path: Path) -> None:
    family, case, make = METHODS[method]
    theirs, ours = (adapt(model, make()) for model in pair(family, case))
    (loss, grads), (their_loss, their_grads) = gradients(ours), gradients(theirs)
    assert abs(loss - their_loss) <= 2e-6 and [*grads] == [*their_grads]
    for name, grad in their_grads.items():
        assert_near(grads[name], grad, name)
    expected = logits(theirs)
    assert_near(logits(ours), expected)
    if hasattr(ours, "disable_adapter"):
        with ours.disable_adapter(), theirs.disable_adapter():
            assert_near(logits(ours), without := logits(theirs))
            assert expected.shape != without.shape or (expected - without).abs().max() > 1e-3
    text = ours.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(text, continued(theirs, 3))
    check_files(ours, theirs, tmp_path, family, case)
    if method not in NOT_NATIVE:
        native = tigon.from_pretrained(checkpoint(family, case))
        native.load_adapter(tmp_path / "ours")
        with torch.no_grad():
            assert_near(native(IDS).logits, expected)
    if hasattr(ours, "merge_and_unload") and method not in UNMERGED:
        merged, their_merged = ours.merge_and_unload(), theirs.merge_and_unload()
        assert type(merged).__name__ == type(their_merged).__name__
        assert_near(logits(merged), logits(their_merged))


def check_files(ours: Any, theirs: Any, directory: Path, family: str, case: str) -> None:
    """Files are equal, and both libraries' models read those of the other."""
    expected, values = get_peft_model_state_dict(theirs), get_peft_model_state_dict(ours)
    assert [*values] == [*expected]
    assert all(torch.equal(values[name], t) for name, t in expected.items())
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        model.save_pretrained(directory / name)
    files = [load_file(directory / n / "adapter_model.safetensors") for n in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    their_base, base = pair(family, case)
    after = logits(theirs)
    assert_near(logits(PeftModel.from_pretrained(base, directory / "theirs")), after)
    assert_near(logits(PeftModel.from_pretrained(their_base, directory / "ours")), after)


def test_unload_and_several_adapters() -> None:
    """Adapters are added, chosen, combined and removed as on transformers' model; what is left is
    the model before."""
    theirs, ours = pair("llama", "mlp_bias")
    before = logits(ours)
    adapted = [adapt(model, LORA()) for model in (theirs, ours)]
    for model in adapted:
        torch.manual_seed(1)
        model.add_adapter("second", LORA(target_modules=["down_proj", "gate_proj"]))
        torch.manual_seed(1)
        for name, p in sorted(model.named_parameters()):
            if ".second." in name:
                p.data.add_(torch.randn(p.shape) * 0.1)
        model.set_adapter("second")
    assert_near(logits(adapted[1]), logits(adapted[0]))
    for model in adapted:
        model.base_model.set_adapter(["default", "second"])
    assert_near(logits(adapted[1]), logits(adapted[0]))
    unloaded = adapted[1].unload()
    assert unloaded is ours and torch.equal(logits(ours), before)


@pytest.mark.parametrize(
    "options",
    [{}, {"alora_invocation_tokens": [int(IDS[0, 4])]}, {"lora_dropout": 0.5}],
    ids=["lora", "alora", "dropout"],
)
def test_gradient_checkpointing_with_frozen_weights(options: dict[str, Any]) -> None:
    """Blocks are recomputed although no parameter before the first adapter is trained, with the
    hooks by which aLoRA begins at a token, and with the same dropout."""
    _, plain = pair("llama", "mlp_bias")
    _, recomputed = pair("llama", "mlp_bias")
    recomputed.gradient_checkpointing_enable()
    config = LORA(**options)
    results = [gradients(adapt(model, config)) for model in (plain, recomputed)]
    assert any(grad.any() for grad in results[0][1].values())
    assert results[0][1].keys() == results[1][1].keys()
    for name, grad in results[0][1].items():
        assert_near(results[1][1][name], grad, name)


def test_prefixes_are_refused_with_checkpointing() -> None:
    """PEFT asks modules for `gradient_checkpointing`: no keys would be cached for prefixes."""
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for model in pair("llama"):
        model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="does not work with gradient checkpointing"):
            get_peft_model(model, config)


@torch.no_grad()
def test_shadow_goes_on_with_its_cache() -> None:
    """Which holds one of the model and one of the second decoder: in beams, and in calls of one's
    own; also with that decoder alone."""
    theirs, ours = (adapt(model, SHADOW()).eval() for model in pair("llama"))
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    for beams in (1, 3):
        expected = theirs.generate(input_ids=IDS, num_beams=beams, use_cache=False, **options)
        assert torch.equal(ours.generate(input_ids=IDS, num_beams=beams, **options), expected)
    past = ours(input_ids=IDS[:, :5]).past_key_values
    assert_near(ours(input_ids=IDS[:, 5:], past_key_values=past).logits, logits(theirs)[:, 5:])
    with pytest.raises(TypeError, match="the cache is a ShadowCache: Tigon's models take over a"):
        ours.generate(input_ids=IDS, past_key_values=past, **options)
    alone, their_alone = (model.base_model.unload_shadow(copy=True) for model in (ours, theirs))
    assert_near(alone(input_ids=IDS).logits, their_alone(input_ids=IDS).logits)
    expected = their_alone.generate(IDS, **options)
    assert torch.equal(alone.generate(IDS, **options), expected)


def test_shadow_of_a_classifier() -> None:
    """The second decoder has no head, whatever the model's is."""
    config = SHADOW(task_type="SEQ_CLS")
    theirs, ours = (adapt(model, config) for model in score_pair("qwen3", 2))
    losses = [model(input_ids=IDS, labels=torch.tensor([0, 1])).loss for model in (theirs, ours)]
    assert abs(losses[0] - losses[1]) <= 1e-6


def test_classifier_trains_its_score() -> None:
    """PEFT saves the head of a sequence classifier by itself, and adapts the rest."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear")
    theirs, ours = (adapt(model, config) for model in score_pair("qwen3", 2))
    labels = torch.tensor([0, 1])
    losses = [m(input_ids=IDS, labels=labels).loss for m in (ours, theirs)]
    assert abs(losses[0] - losses[1]) <= 1e-6
    for loss in losses:
        loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, p in ours.named_parameters():
        if p.requires_grad:
            assert_near(p.grad, expected.pop(name), name)
    assert not expected
