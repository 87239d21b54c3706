"""What tests of adapters share: PEFT's adapter of a tiny model, and comparisons with it."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as TheirConfig
from peft import PeftModel, get_peft_model
from torch import Tensor

from tests.models import test_parity as parity
from tests.models.test_parity import tokens
from tests.models.tiny import CASES, reference
from tigon import LoraConfig, from_pretrained
from tigon.models import CausalLM


def randomise(parameters: dict[str, Any]) -> None:
    """Of both of an adapter's factors, so that it changes something."""
    generator = torch.Generator().manual_seed(3)
    for name in sorted(parameters):
        with torch.no_grad():
            parameters[name].copy_(torch.randn(parameters[name].shape, generator=generator) * 0.1)


def trained(model: Any) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def adapted(model: CausalLM, name: str = "default", **options: Any) -> CausalLM:
    """The model with an adapter of rank 4, which is random."""
    model.add_adapter(LoraConfig(rank=4, **options), name)
    randomise(trained(model))
    return model


def theirs_of(directory: Path, model_type: str, case: str, **options: Any) -> Any:
    base = reference(model_type, CASES[model_type][case], directory)
    options = {"r": 4, "lora_alpha": 10, "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(base, TheirConfig(**options)).eval()
    randomise(trained(model))
    return model


def gradients(model: CausalLM) -> dict[str, Tensor]:
    """Under PEFT's names."""
    found = parity.gradients(model, missing=True)
    return {f"base_model.model.{name}": grad for name, grad in found.items()}


def near(ours: Tensor, theirs: Tensor, name: str = "", *, within: float = 1e-5) -> None:
    scale = theirs.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=within, msg=name)


def check_same(ours: CausalLM, theirs: Any, **options: Any) -> None:
    """Logits and the gradients of all that is trained; `options` are those of our passes."""
    ids = tokens()
    near(ours(ids, **options).logits, theirs(ids).logits)
    ours(ids, labels=ids, **options).loss.backward()
    theirs(input_ids=ids, labels=ids).loss.backward()
    found = gradients(ours)
    expected = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        # PEFT's own are up to 3e-5 off those in float64: of queries and keys they nearly cancel
        near(grad, expected[name], name, within=6e-5)


def check_theirs_here(theirs: Any, root: Path) -> CausalLM:
    """PEFT's adapter of `root`/base computes the same here, trained, disabled, merged, exported."""
    theirs.save_pretrained(root / "adapter")
    ours = from_pretrained(root / "base")
    plain = ours(tokens()).logits
    ours.load_adapter(root / "adapter", trainable=True)
    assert not torch.allclose(ours(tokens()).logits, plain, atol=1e-2)
    check_same(ours, theirs)
    check_removal(ours, plain, root)
    return ours


def check_removal(ours: CausalLM, plain: Tensor, root: Path) -> None:
    """Without its adapter the model is `plain`; merged and exported it stays what it is."""
    with ours.adapters_disabled():
        assert torch.equal(ours(tokens()).logits, plain)
    adapted = ours(tokens()).logits
    ours.merge_adapter()
    near(ours(tokens()).logits, adapted, within=3e-5)  # as weights are rounded
    ours.save_pretrained(root / "merged")
    near(from_pretrained(root / "merged")(tokens()).logits, adapted, within=3e-5)


def check_ours_there(base: Any, config: LoraConfig, root: Path) -> tuple[CausalLM, Any]:
    """An adapter that changes nothing at first, and computes the same in PEFT from its files."""
    ours = from_pretrained(root / "base")
    plain = ours(tokens()).logits
    ours.add_adapter(config)
    if config.dora:  # lengths are computed in another way than rows are
        near(ours(tokens()).logits, plain)
    else:
        assert torch.equal(ours(tokens()).logits, plain)  # B is zero
    randomise(trained(ours))
    ours.save_adapter(root / "adapter")
    theirs = PeftModel.from_pretrained(base, str(root / "adapter"), is_trainable=True).eval()
    check_same(ours, theirs)
    return ours, theirs


def check_reloaded(ours: CausalLM, root: Path, name: str = "adapter") -> CausalLM:
    """The base with the adapter of that directory, which computes what `ours` does."""
    again = from_pretrained(root / "base")
    again.load_adapter(root / name)
    assert torch.equal(again(tokens()).logits, ours(tokens()).logits)
    return again


def check_generation(model: CausalLM, merged: CausalLM) -> None:
    for kind in ("dynamic", "static"):
        how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        how["cache_implementation"] = kind
        ids = tokens()[:, :9]
        assert torch.equal(model.generate(ids, **how), merged.generate(ids, **how))
