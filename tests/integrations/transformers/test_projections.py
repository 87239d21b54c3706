"""Projections under transformers' names: its modules, order and shapes in every family, the numbers
of the native model, and what others wrap, replace or hook."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models.tiny import CASES, load_case
from tigon.integrations.transformers import as_transformers
from tigon.integrations.transformers.projections import split_projections
from tigon.layers import Attention, GatedDeltaNet, GatedMLP
from tigon.models import CausalLM, LoraConfig, from_pretrained

FAMILIES = [family for family in CASES if family != "muse_glimmer_text"]
IDS = torch.arange(3, 21).view(2, 9) * 7 % 200
LINEAR = nn.Linear, nn.Embedding, nn.Conv1d


def make_split(model_type: str, directory: Path) -> tuple[CausalLM, CausalLM, nn.Module]:
    """A native model, the same one split, and transformers' without weights."""
    native = load_case(model_type, next(iter(CASES[model_type])), directory)
    with torch.device("meta"):
        cls = getattr(transformers, native.config.transformers_class)
        reference = cls(AutoConfig.from_pretrained(directory))
    split = copy.deepcopy(native)
    split_projections(split, reference)
    return native, split, reference


def gradients(model: CausalLM) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a training pass, and the gradients by the names of checkpoints."""
    out = model.train()(IDS, labels=IDS, return_logits=True)
    assert out.loss is not None and out.logits is not None
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    stored: dict[str, Tensor] = {}
    for name, slices in model.layout(stacked_experts=True).items():
        for part in slices:
            if (grad := grads.get(name)) is not None:
                rows = grad.reshape(-1, *grad.shape[1:]) if grad.dim() < 3 else grad.flatten(0, 1)
                size = sum(n for _, _, n in part.rows)
                whole = stored.setdefault(part.name, torch.zeros(size, *rows.shape[1:]))
                for source, target, n in part.rows:
                    whole[source : source + n] = rows[target : target + n]
    return out.logits.detach(), stored


@pytest.mark.parametrize("model_type", FAMILIES)
def test_split_model_is_the_native_one(model_type: str, tmp_path: Path) -> None:
    native, split, reference = make_split(model_type, tmp_path)
    expected = [(name, p.shape) for name, p in reference.named_parameters()]
    assert [(name, p.shape) for name, p in split.named_parameters()] == expected
    assert split.state_dict().keys() == reference.state_dict().keys()
    kinds = [{n for n, m in x.named_modules() if isinstance(m, LINEAR)} for x in (split, reference)]
    if model_type == "llama4_text":  # whose router is an nn.Linear that returns two tensors
        kinds[1] -= {name for name in kinds[1] if name.endswith(".router")}
    assert kinds[0] == kinds[1]
    memory = [p.untyped_storage().data_ptr() for p in split.parameters()]
    assert len({*memory}) == len(memory)
    (logits, grads), (native_logits, native_grads) = gradients(split), gradients(native)
    assert torch.equal(logits, native_logits)
    assert grads.keys() == native_grads.keys()
    for name, grad in native_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=2e-6, msg=name)
    split.eval()
    native.eval()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(split)))
    assert torch.equal(twin(IDS).logits, split(IDS).logits)
    assert torch.equal(twin.generate(IDS, max_new_tokens=3), native.generate(IDS, max_new_tokens=3))
    split.save_pretrained(tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert all(map(torch.equal, again.parameters(), native.parameters()))


class Doubled(nn.Module):
    """A module in place of another, that doubles its output."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


# Of a layer, with the parameters that are doubled for the same effect
REPLACED = {
    "qwen2": ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"],
    "qwen3": ["self_attn.k_norm", "mlp.gate_proj", "mlp.down_proj"],
    "phi3": ["self_attn.qkv_proj", "mlp.gate_up_proj"],
    "gemma3_text": ["post_attention_layernorm", "self_attn.q_norm"],
    "lfm2": ["feed_forward.w1", "feed_forward.w2"],
    "qwen3_next": ["linear_attn.in_proj_ba", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"],
    "deepseek_v3": ["self_attn.q_a_proj", "self_attn.kv_b_proj"],
    "gemma4_text": ["self_attn.q_proj", "per_layer_projection"],
}


@pytest.mark.parametrize("model_type", REPLACED)
def test_replaced_modules_are_called(model_type: str, tmp_path: Path) -> None:
    """Doubling outputs of modules of the first layer is doubling their parameters."""
    _, split, _ = make_split(model_type, tmp_path)
    doubled = copy.deepcopy(split)
    layer = doubled.get_submodule("model.layers.0")
    for name in REPLACED[model_type]:
        parent, _, leaf = name.rpartition(".")
        owner = layer.get_submodule(parent)
        setattr(owner, leaf, Doubled(getattr(owner, leaf)))
        for p in split.get_submodule(f"model.layers.0.{name}").parameters():
            offset = getattr(split.get_submodule(f"model.layers.0.{name}"), "offset", 0.0)
            p.data = 2 * (p.data + offset) - offset
    assert_same_passes(doubled, split)


def assert_same_passes(a: CausalLM, b: CausalLM) -> None:
    """Both models have the same loss and logits, and write the same text step by step."""
    for training in (True, False):
        a.train(training)
        b.train(training)
        ours, theirs = (m(IDS, labels=IDS, return_logits=True) for m in (a, b))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.loss, theirs.loss)
    assert torch.equal(a.generate(IDS, max_new_tokens=4), b.generate(IDS, max_new_tokens=4))


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj", "self_attn.o_proj"])
def test_hooks_see_outputs_that_nobody_overwrites(name: str, tmp_path: Path) -> None:
    _, split, _ = make_split("llama", tmp_path)
    layer = split.get_submodule(f"model.layers.1.{name}")
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    out = split.train()(IDS, labels=IDS)
    assert out.loss is not None
    out.loss.backward()
    ((x, y),) = seen
    assert isinstance(layer, nn.Linear)
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    handle.remove()
    split(IDS)
    assert len(seen) == 1


def test_one_projection_alone_is_not_overwritten(tmp_path: Path) -> None:
    """Queries that read another layer's keys come out of one module, whose output is not ours."""
    _, split, _ = make_split("gemma4_text", tmp_path)
    attention = next(m for m in split.modules() if getattr(m, "values_from", "") == "layer")
    assert isinstance(attention, Attention) and attention._is_unobserved()
    attention.q_proj.register_forward_hook(lambda module, args, y: None)  # type: ignore[union-attr, operator]
    assert not attention._is_unobserved()


def test_head_may_be_wrapped_or_replaced(tmp_path: Path) -> None:
    """The criteria are of the logits that a head of others computes."""
    _, split, _ = make_split("gemma2", tmp_path)  # whose logits have a softcap
    hidden = torch.randn(2, 3, split.config.hidden_size)
    head: Any = split.lm_head
    assert isinstance(head, nn.Linear)
    assert (head.in_features, head.out_features) == head.weight.shape[::-1]
    assert torch.equal(head(hidden), nn.functional.linear(hidden, head.weight))
    other = copy.deepcopy(split)
    other.lm_head = Doubled(nn.Linear(head.in_features, head.out_features, bias=False))  # type: ignore[assignment]
    other.lm_head.inner.weight.data = head.weight.detach() / 2
    assert_same_passes(other, split)
    at, metrics = torch.tensor([1, 5]), ("entropy", "accuracy")
    ours, theirs = (m(IDS, labels=IDS, logits_at=at, metrics=metrics) for m in (other, split))
    torch.testing.assert_close(ours.logits_at, theirs.logits_at)
    torch.testing.assert_close(ours.metrics, theirs.metrics)
    other = copy.deepcopy(split)  # TRL replaces the method alone
    weight = other.lm_head.weight
    other.lm_head.forward = lambda x: nn.functional.linear(x.double(), weight.double()).float()  # type: ignore[method-assign]
    assert_same_passes(other, split)


def test_classifier_has_score(tmp_path: Path) -> None:
    load_case("llama", "grouped", tmp_path)
    native = from_pretrained(tmp_path, labels=2)
    model = as_transformers(native)
    assert [name for name, _ in model.named_children()] == ["model", "score"]
    assert native.lm_head is model.score


def test_native_attributes_stand_for_renamed_modules(tmp_path: Path) -> None:
    _, split, _ = make_split("lfm2", tmp_path)
    block: Any = next(b for b in split.model.layers if isinstance(b.mixer, Attention))
    assert block.mlp is block.feed_forward and isinstance(block.mlp, GatedMLP)
    assert block.mixer.o_proj is block.mixer.out_proj
    block.feed_forward = Doubled(block.feed_forward)
    assert block.mlp is block.feed_forward


def test_native_attributes_are_set_and_deleted(tmp_path: Path) -> None:
    """Under either name there is one module, which the model calls."""
    _, split, _ = make_split("gpt_oss", tmp_path)
    names = [name for name, _ in split.named_parameters()]
    for model in (split, copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        moe = model.model.layers[0].mlp
        before, router = model(IDS).logits, copy.deepcopy(moe.gate)
        with torch.no_grad():
            router.weight.neg_()
        moe.gate = router
        assert moe.gate is moe.router is router is moe._modules.get("gate")
        assert [name for name, _ in model.named_parameters()] == names
        assert not torch.equal(model(IDS).logits, before)
        del moe.gate
        assert not hasattr(moe, "gate") and not hasattr(moe, "router")
        assert moe._modules.get("gate", 3) == 3
        moe.gate = router
        assert moe.router is router
    _, split, _ = make_split("qwen3_next", tmp_path / "delta")
    mixer = next(m for m in split.modules() if isinstance(m, GatedDeltaNet))
    count, zeros = len([*split.parameters()]), nn.Parameter(torch.zeros_like(mixer.decay.A_log))
    mixer.decay.A_log = zeros
    assert mixer.A_log is mixer.decay.A_log is zeros
    assert len([*split.parameters()]) == count


def test_models_that_cannot_be_split(tmp_path: Path) -> None:
    native = load_case("llama", "grouped", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    adapted = copy.deepcopy(native)
    adapted.add_adapter(LoraConfig(rank=2))
    with pytest.raises(ValueError, match=r"has the adapters \['default'\]: merge or delete them"):
        as_transformers(adapted)
    few_bits = from_pretrained(tmp_path, quantize="nf4")
    with pytest.raises(ValueError, match=r"q.*is quantized \(nf4\): load .* quantize=None"):
        as_transformers(few_bits)
    config.num_hidden_layers += 1
    config.layer_types = None
    with torch.device("meta"):
        larger = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"has model\.layers\.3\..*, which Llama has not"):
        split_projections(native, larger)
    assert "model.layers.0.self_attn.qkv_proj.weight" in dict(native.named_parameters())
