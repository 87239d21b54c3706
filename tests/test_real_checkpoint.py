"""SmolLM2-135M-Instruct against transformers: the same logits, perplexity and files."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tigon

SHORT = 64  # tokens that go through bf16, which a CPU is slow at
PASSAGE = """The tiger (Panthera tigris) is a large cat and a member of the genus Panthera native to
Asia. It has a powerful, muscular body with a large head and paws, a long tail and orange fur with
black, mostly vertical stripes. It is traditionally classified into nine recent subspecies, though
some recognise only two: mainland Asian tigers and the island tigers of the Sunda Islands.

Throughout the tiger's range, it inhabits mainly forests, from coniferous and temperate broadleaf
and mixed forests in the Russian Far East and Northeast China to tropical and subtropical moist
broadleaf forests on the Indian subcontinent and Southeast Asia. The tiger is an apex predator and
preys mainly on ungulates, which it takes by ambush. It lives a mostly solitary life and occupies
home ranges, defending these from individuals of the same sex.

def stripes(tigers: list[int]) -> float:
    return sum(tigers) / max(1, len(tigers))  # 3.14159, 2,718 and 1e-6 are numbers too
"""


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> Tensor:
    ids = AutoTokenizer.from_pretrained(smollm2)(PASSAGE, return_tensors="pt").input_ids
    assert 200 < ids.shape[1] < 400
    return ids


@pytest.fixture(scope="module")
def bf16(smollm2: Path, ids: Tensor) -> dict[str, Tensor]:
    """transformers' logits of the passage's beginning, by attention implementation."""
    return {
        attention: theirs(smollm2, torch.bfloat16, attention, ids[:, :SHORT])[0]
        for attention in ("eager", "sdpa")
    }


@torch.no_grad()
def theirs(path: Path, dtype: torch.dtype, attention: str, ids: Tensor) -> tuple[Tensor, float]:
    """transformers' logits and loss."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    assert not any(info.values())  # keys missing, unexpected, mismatched
    out = model.eval()(ids, labels=ids)
    return out.logits.float(), out.loss.item()


@torch.no_grad()
def test_fp32_logits_and_perplexity(smollm2: Path, ids: Tensor) -> None:
    logits, loss = theirs(smollm2, torch.float32, "eager", ids)
    out = tigon.from_pretrained(smollm2, dtype=torch.float32)(ids, labels=ids, return_logits=True)
    assert (out.logits - logits).abs().max() <= 1e-5 * logits.abs().max()
    assert math.exp(out.loss.item()) == pytest.approx(math.exp(loss), rel=1e-5)
    assert 5 < math.exp(loss) < 30


@pytest.mark.slow
@torch.no_grad()
def test_bf16_is_as_near_as_two_ways_of_transformers(smollm2, ids, bf16):
    logits = tigon.from_pretrained(smollm2)(ids[:, :SHORT]).logits
    assert logits.dtype == torch.bfloat16
    spread = (bf16["eager"] - bf16["sdpa"]).abs()
    for reference in bf16.values():
        error = (logits.float() - reference).abs()
        assert error.max() <= 2 * spread.max()
        assert error.mean() <= 2 * spread.mean()


@pytest.mark.slow
def test_load_then_export(smollm2, ids, bf16, tmp_path):
    tigon.from_pretrained(smollm2).save_pretrained(tmp_path / "out")
    source = load_file(smollm2 / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == source.keys()
    for name, tensor in source.items():
        assert written[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(written[name].view(torch.int16), tensor.view(torch.int16)), name
    logits, _ = theirs(tmp_path / "out", torch.bfloat16, "eager", ids[:, :SHORT])
    assert torch.equal(logits, bf16["eager"])
