import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tigon
from tests.models.tiny import CASES, reference
from tests.support.small import write_model, write_tokenizer
from tigon.eval import Parity, parity, report
from tigon.eval.parity import _count_equal_tokens

TEXT = "the model reads some of these words and says a few others back to whoever asked it"
GOOD = Parity(105, 40.0, 1e-4, 3.5, 1e-6, greedy_equal=64, greedy_tokens=64, bf16_error=1.25,
              transformers_bf16_error=0.9)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("parity") / "model", num_hidden_layers=4)


def test_same_model(directory: Path) -> None:
    result = parity(str(directory), text=TEXT, new_tokens=12)
    assert result.failures == []
    assert (result.greedy_equal, result.greedy_tokens) == (12, 12)

    ids = torch.tensor([tigon.Tokenizer.from_pretrained(directory).encode(TEXT)])
    with torch.no_grad():
        ours = tigon.from_pretrained(str(directory), dtype=torch.bfloat16)(ids).logits
        theirs, half = (
            AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, attn_implementation="eager"
            )(ids, labels=ids)
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert result.tokens == ids.shape[1]
    assert result.loss == theirs.loss.item()
    assert result.largest_logit == theirs.logits.abs().max().item()
    for error, logits in ((result.bf16_error, ours), (result.transformers_bf16_error, half.logits)):
        by_token = (logits - theirs.logits).square().mean(-1).sqrt()
        assert error == by_token.median().item() > 0


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "granite_swa", "qwen3_5_moe_text"])
def test_families_that_sdpa_tells_little_of(family: str, tmp_path: Path) -> None:
    """transformers has no sdpa of theirs, or in a quarter of the layers alone."""
    values = next(iter(CASES[family].values())) | {"vocab_size": 300}
    reference(family, values, tmp_path)
    write_tokenizer(tmp_path)
    result = parity(str(tmp_path), text=TEXT, new_tokens=12)
    assert result.failures == []
    assert min(result.bf16_error, result.transformers_bf16_error) > 0


def test_altered_weights_fail_every_check(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(path: str, **options: Any) -> tigon.CausalLM:
        model = tigon.from_pretrained(path, **options)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.001)
            model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
        return model

    monkeypatch.setattr(sys.modules["tigon.eval.parity"], "from_pretrained", altered)
    result = parity(str(directory), text=TEXT, new_tokens=12)
    assert result.failures == ["fp32 logits", "fp32 loss", "greedy tokens", "bf16 logits"]


@pytest.mark.parametrize(
    ("worse", "failures"),
    [
        ({}, []),
        ({"logits_error": 3.9e-4, "loss_error": 3.4e-5, "bf16_error": 1.8}, []),
        ({"logits_error": 4.1e-4}, ["fp32 logits"]),
        ({"loss_error": 3.6e-5}, ["fp32 loss"]),
        ({"greedy_equal": 63}, ["greedy tokens"]),
        ({"bf16_error": 1.81}, ["bf16 logits"]),
        ({"logits_error": float("nan")}, ["fp32 logits"]),
    ],
)
def test_tolerances(worse: dict[str, float], failures: list[str]) -> None:
    assert replace(GOOD, **worse).failures == failures


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ([5, 6, 7, 8], [5, 9, 7, 8], 1),
        ([5, 2], [5, 2], 4),  # both ended
        ([5, 2], [5, 2, 7, 8], 2),  # one went on
    ],
)
def test_equal_tokens_are_counted(a: list[int], b: list[int], equal: int) -> None:
    ids = torch.tensor([[1, 1, 1]])
    ours, theirs = (
        SimpleNamespace(generate=lambda ids, new=new, **_: torch.cat([ids, torch.tensor([new])], 1))
        for new in (a, b)
    )
    assert _count_equal_tokens(ours, theirs, ids, new_tokens=4) == equal  # type: ignore[arg-type]


def test_report() -> None:
    assert report(replace(GOOD, greedy_equal=63)) == (
        "105 tokens, loss 3.500000 (perplexity 33.1155), largest logit 40.000\n"
        "                            measured     allowed\n"
        "fp32 logits, max error        0.0001      0.0004\n"
        "fp32 loss, error               1e-06     3.5e-05\n"
        "greedy tokens equal               63          64\n"
        "bf16 logits, median             1.25         1.8\n"
        "parity with transformers: differs in greedy tokens"
    )
    assert report(GOOD).endswith("\nparity with transformers: holds")
