"""Every family: generation past its window, packing, and the kernels' path, on tiny models."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tigon.kernels
from tests.models.tiny import CASES, EVERY, FIRST, load_case, random_ids, reference
from tigon.kernels.loss.logits import Options
from tigon.models import from_pretrained
from tigon.models.moe import aux_loss_coef

PROMPT, NEW = 11, 24  # past the window of 7, and past max_position_embeddings of 24


def prompts() -> torch.Tensor:
    return random_ids(2, PROMPT, seed=2)


BOTH_SIDES = [(m, case) for m, case in EVERY if "use_bidirectional_attention" in CASES[m][case]]
CAUSAL = [row for row in EVERY if row not in BOTH_SIDES]


@pytest.mark.parametrize(("model_type", "case"), CAUSAL)
def test_greedy_text_is_that_of_transformers(model_type: str, case: str, tmp_path: Path) -> None:
    theirs = reference(model_type, CASES[model_type][case], tmp_path)
    ours = from_pretrained(tmp_path)
    ids = prompts()
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected = theirs.generate(
        ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **settings
    )
    assert torch.equal(ours.generate(ids, eos_token_id=[], **settings), expected)


@pytest.mark.parametrize(("model_type", "case"), CAUSAL)
def test_a_cache_changes_nothing(model_type: str, case: str, tmp_path: Path) -> None:
    rope = CASES[model_type][case].get("rope_parameters", {})
    if rope.get("rope_type") in ("dynamic", "longrope") and not rope.get("alpha"):
        pytest.skip("the frequencies follow the longest position of a call")
    model = load_case(model_type, case, tmp_path)
    ids = torch.cat((prompts(), prompts().flip(1)), dim=1)
    with torch.no_grad():
        whole = model(ids).logits
        out = model(ids[:, :5], use_cache=True)
        parts = [out.logits]
        for start, end in ((5, 6), (6, 14), (14, 15), (15, 22)):
            out = model(ids[:, start:end], past_key_values=out.past_key_values)
            parts.append(out.logits)
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize(("model_type", "case"), BOTH_SIDES)
def test_attention_to_both_sides_cannot_continue(
    model_type: str, case: str, tmp_path: Path
) -> None:
    model = load_case(model_type, case, tmp_path)
    with pytest.raises(ValueError, match="can neither use a cache nor generate"):
        model(prompts(), use_cache=True)
    with pytest.raises(ValueError, match="can neither use a cache nor generate"):
        model.generate(prompts(), max_new_tokens=1)


@pytest.mark.parametrize(("model_type", "case"), FIRST + BOTH_SIDES)
def test_packed_sequences_are_as_if_alone(model_type: str, case: str, tmp_path: Path) -> None:
    model = load_case(model_type, case, tmp_path)
    first, second = prompts()[0], prompts()[1, :9]
    packed = torch.cat((first, second))[None]
    positions = torch.cat((torch.arange(PROMPT), torch.arange(9)))[None]
    with torch.no_grad():
        logits = model(packed, position_ids=positions).logits
        alone = torch.cat((model(first[None]).logits, model(second[None]).logits), dim=1)
    assert (logits - alone).abs().max() <= 1e-5 * alone.abs().max()


def two_layers(model_type: str, case: str) -> dict[str, Any]:
    """A case in as many, where it does not say what each layer is."""
    sizes = CASES[model_type][case]
    listed = {"layer_types", "layer_rope_theta"} & sizes.keys()
    return sizes if listed else sizes | {"num_hidden_layers": 2}


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_kernels_compute_what_plain_torch_does(model_type: str, case: str, tmp_path: Path) -> None:
    """On a GPU compiled, elsewhere under Triton's interpreter: slowly, so the model is smaller."""
    reference(model_type, two_layers(model_type, case), tmp_path)
    model = from_pretrained(tmp_path, device="cuda" if torch.cuda.is_available() else "cpu")
    ids = prompts()[:1, :8].to(model.device)  # past the window

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model(ids, labels=ids).loss
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return loss.detach(), found

    with tigon.kernels.use("reference"):
        expected, gradients = run()
    with tigon.kernels.use("triton"):
        loss, found = run()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert found.keys() == gradients.keys() == dict(model.named_parameters()).keys()
    for name, grad in gradients.items():
        assert (found[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name


# tests/test_traced.py traces every family on the path of a GPU
KINDS = ("llama", "gemma3n_text", "qwen3_next", "lfm2_moe", "gpt_oss", "deepseek_v3", "llama4_text")


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("model_type", "case"), [*(row for row in FIRST if row[0] in KINDS), *BOTH_SIDES]
)
def test_one_graph_when_compiled(model_type: str, case: str, tmp_path: Path) -> None:
    reference(model_type, two_layers(model_type, case), tmp_path)
    model = from_pretrained(tmp_path)
    ids = prompts()
    # The loss of a plain head is in test_contract_compile.py
    plain = model.lm_head.options == Options() and aux_loss_coef(model.config) is None
    labels = None if plain else ids
    expected = model(ids, labels=labels)
    torch.compiler.reset()
    found = torch.compile(model, fullgraph=True, backend="eager")(ids, labels=labels)
    part = "logits" if plain else "loss"
    torch.testing.assert_close(found[part], expected[part], rtol=1e-5, atol=1e-5 * plain)
