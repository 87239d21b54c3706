"""Adapters that combine others, beside PEFT's add_weighted_adapter; several loaded and switched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import PeftModel, get_peft_model
from torch import Tensor

from tests.models.adapters import randomise
from tests.models.tiny import load_reference, reference
from tigon import LoraConfig, from_pretrained
from tigon.models import CausalLM
from tigon.models.adapters.adapters import adapter_parameters

IDS = torch.arange(24).view(2, 12)
ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj"]},
    "b": {"r": 4, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj", "embed_tokens"]},
    "c": {"r": 6, "lora_alpha": 6, "target_modules": ["v_proj", "gate_proj", "lm_head"]},
}
COMBINATIONS = {
    "linear": (["a", "b"], [0.7, -0.4], {}),
    "linear, one": (["b"], [1.5], {}),
    "cat": (["a", "b", "c"], [0.5, -2.0, 1.0], {}),
    "cat, equal names": (["a", "b"], [1.0, 1.0], {}),
    "svd": (["a", "b", "c"], [0.5, -2.0, 1.0], {}),
    "svd, few": (["a", "c"], [1.0, 0.3], {"svd_rank": 2}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEFT's adapters of a tiny model, in directories of their names beside its `base`."""
    root = tmp_path_factory.mktemp("weighted")
    for name, options in ADAPTERS.items():
        base = reference("llama", {"num_hidden_layers": 2}, root / "base")
        model = get_peft_model(base, TheirConfig(task_type="CAUSAL_LM", **options))
        randomise({n: p for n, p in model.named_parameters() if p.requires_grad})
        model.save_pretrained(root / name)
    return root


def load_both(root: Path) -> tuple[CausalLM, Any]:
    """The base with all adapters, here and in PEFT."""
    ours, theirs = from_pretrained(root / "base"), None
    for name in ADAPTERS:
        ours.load_adapter(root / name, name)
        if theirs is None:
            theirs = PeftModel.from_pretrained(load_reference(root / "base"), root / name, name)
        else:
            theirs.load_adapter(root / name, name)
    return ours, theirs


@torch.no_grad()
def distance(model: Any, expected: Tensor) -> float:
    """Of logits, beside the largest."""
    return ((model(IDS).logits - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize("case", COMBINATIONS)
def test_as_peft_combines(case: str, trained: Path, tmp_path: Path) -> None:
    names, weights, options = COMBINATIONS[case]
    ours, theirs = load_both(trained)
    kind: Any = case.split(",")[0]
    theirs.add_weighted_adapter(names, weights, "mix", kind, **options)
    ours.add_weighted_adapter(names, weights, "mix", kind, **options)
    assert ours.active_adapter == "c"  # as before
    theirs.set_adapter("mix")
    ours.set_adapter("mix")
    expected = theirs(IDS).logits
    assert distance(ours, expected) < 1e-5
    ours.set_adapter(None)
    assert distance(ours, expected) > 1e-3
    # Its file, in PEFT and here
    ours.save_adapter(tmp_path / "mix", "mix")
    again = PeftModel.from_pretrained(load_reference(trained / "base"), tmp_path / "mix")
    assert distance(again, expected) < 1e-5
    ours.merge_adapter("mix")
    ours.set_adapter(None)
    assert distance(ours, expected) < 1e-5


@torch.no_grad()
def test_several_are_loaded_and_switched(trained: Path) -> None:
    """Each gives what it gives alone; two combinations of combinations, too."""
    ours, _ = load_both(trained)
    alone = {}
    for name in ADAPTERS:
        one = from_pretrained(trained / "base")
        alone[None] = one(IDS).logits
        one.load_adapter(trained / name)
        alone[name] = one(IDS).logits
    ours.add_weighted_adapter(["a", "b"], [1.0, 1.0], "ab", "cat")
    ours.add_weighted_adapter(["ab", "c"], [1.0, 1.0], "abc", "cat")
    assert ours.adapter_names == ["a", "b", "c", "ab", "abc"]
    for name in ("a", None, "c", "b", None, "c"):
        ours.set_adapter(name)
        assert torch.equal(ours(IDS).logits, alone[name])
    ours.set_adapter("abc")
    total = ours(IDS).logits
    for name in ("a", "b", "ab"):
        ours.delete_adapter(name)
    assert torch.equal(ours(IDS).logits, total) and ours.active_adapter == "abc"
    assert not any(p.requires_grad for p in ours.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["cat", "svd", "linear"])
def test_experts(kind: Any, tmp_path: Path) -> None:
    """Of which PEFT combines none: beside one with the same factors and the sum of the scales."""
    reference("mixtral", {"num_hidden_layers": 1}, tmp_path)
    model = from_pretrained(tmp_path)
    targets = ("experts.gate_up_proj", "experts.down_proj", "o_proj")
    for name, alpha in (("a", 8.0), ("b", 2.0), ("sum", 6.0)):
        model.add_adapter(LoraConfig(rank=2, alpha=alpha, targets=targets, rslora=True), name)
        randomise({n.replace(name, "x"): p for n, p in adapter_parameters(model, name).items()})
    expected = model(IDS).logits
    names, weights = (["a"], [0.75]) if kind == "linear" else (["a", "b"], [0.5, 1.0])
    model.add_weighted_adapter(names, weights, "mix", kind)
    model.set_adapter("mix")
    assert distance(model, expected) < 1e-5


@torch.no_grad()
def test_the_rank_of_one_adapter(trained: Path) -> None:
    """Is what is asked for, where PEFT adds the factors as they are: the nearest matrices."""
    model = from_pretrained(trained / "base")
    model.load_adapter(trained / "a", "a")
    model.add_weighted_adapter(["a"], [0.7], "one", "svd", svd_rank=1)
    assert model.adapters["one"].rank == 1
    model.set_adapter("one")
    logits = model(IDS).logits
    model.load_adapter(trained / "a", "b")
    model.add_weighted_adapter(["a", "b"], [0.35, 0.35], "two", "svd", svd_rank=1)  # by two halves
    model.set_adapter("two")
    assert distance(model, logits) < 1e-5


def test_half_precision(trained: Path) -> None:
    """Sums are in fp32, and the factors in the adapters' dtype."""
    model = from_pretrained(trained / "base", dtype=torch.bfloat16)
    for name in "ab":
        model.load_adapter(trained / name, name)
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "mix", "svd")
    assert {p.dtype for p in adapter_parameters(model, "mix").values()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in adapter_parameters(model, "mix").values())


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no adapter": ((["a", "x"], [1, 1], "m"), "there is no adapter 'x'; there are a, b, c"),
    "a name": (("a", [1], "m"), "adapters='a' must be a list of names of the model's adapters"),
    "weights": ((["a", "b"], [1], "m"), r"weights=\[1\]: give each adapter a weight"),
    "none": (([], [], "m"), r"adapters=\[\] must be a list of names of the model's adapters"),
    "twice": ((["a", "a"], [1, 1], "m"), "names one twice: add its weights"),
    "taken": ((["a", "b"], [1, 1], "c"), "there is an adapter 'c'"),
    "kind": ((["a", "b"], [1, 1], "m", "ties"), "combination_type='ties' is not one of svd, lin"),
    "weight": ((["a", "b"], [1, float("nan")], "m"), "the weight nan of adapter 'b' is no finite"),
    "rank": ((["a", "b"], [1, 1], "m", "cat", 3), "svd_rank=3 has no effect with combination_ty"),
    "no rank": ((["a", "b"], [1, 1], "m", "svd", 0), "svd_rank=0 must be at least 1"),
    "ranks": ((["b", "c"], [1, 1], "m", "linear"), "v_proj has rank 6 in adapter 'c' and 4 in"),
    "dora": ((["a", "dora"], [1, 1], "m"), "adapter 'dora' has DoRA, which cannot be added"),
    "saved": ((["a", "saved"], [1, 1], "m"), r"'saved' has modules_to_save=\('lm_head',\), which"),
}


@pytest.fixture(scope="module")
def crowded(trained: Path) -> CausalLM:
    model, _ = load_both(trained)
    model.add_adapter(LoraConfig(rank=2, targets=("q_proj",), dora=True), "dora")
    saved = LoraConfig(rank=2, targets=("q_proj",), modules_to_save=("lm_head",))
    model.add_adapter(saved, "saved")
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, crowded: CausalLM) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        crowded.add_weighted_adapter(*arguments)
    assert "\n" not in str(error.value)
    assert crowded.adapter_names == [*ADAPTERS, "dora", "saved"]
