"""Every family against transformers, on the same tiny random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import CASES, EVERY, FIRST, IN_BF16, exact, load_reference, reference
from tests.support.numbers import assert_as_near, float64
from tigon.layers import AddRMSNorm, RMSNorm, RotaryEmbedding
from tigon.models import MODELS, CausalLM, from_pretrained

B, T = 2, 40  # longer than max_position_embeddings
# Where transformers has no second implementation of what rounds most
NO_SDPA = ("gemma2", "gpt_oss", "granite_swa", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# A token's position matters, not only its distance to others
ABSOLUTE = ("hunyuan_v1_dense", "llama4_text", "ministral3", "mistral4")


def tokens(vocab: int = 211) -> Tensor:
    ids = torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(1))
    ids[:, ::7] = 3  # also the pad token's row
    return ids


def test_every_registered_family_has_cases() -> None:
    assert CASES.keys() == MODELS.keys()


def gradients(model: CausalLM, *, missing: bool = False) -> dict[str, Tensor]:
    """Gradients under the names that parameters have in transformers."""
    layout, found = model.layout(stacked_experts=True), {}
    for name, p in model.named_parameters():
        for part in layout[name]:
            grad = p.grad
            if grad is None:
                assert missing, name
                continue
            runs = [(source, grad.narrow(0, start, rows)) for source, start, rows in part.rows]
            found[part.name] = torch.cat([x for _, x in sorted(runs, key=lambda run: run[0])])
    return found


@pytest.mark.parametrize(("model_type", "case"), EVERY)
def test_logits_loss_and_gradients(model_type: str, case: str, tmp_path: Path) -> None:
    theirs = reference(model_type, CASES[model_type][case], tmp_path)
    ours = from_pretrained(tmp_path)
    assert type(ours) is MODELS[model_type]
    assert ours.dtype == torch.float32
    assert not ours.training
    ids = tokens()
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)

    twin = exact(theirs)
    with float64():
        truth = twin(ids, labels=labels)
        truth.loss.backward()
    peer = theirs(ids, labels=labels)
    peer.loss.backward()
    assert truth.logits.abs().max() > 1
    assert_as_near(ours(ids).logits, peer.logits, truth.logits)

    loss = ours(ids, labels=labels).loss
    assert_as_near(loss, peer.loss, truth.loss)
    loss.backward()
    assert_as_near(
        gradients(ours),
        *({name: p.grad for name, p in m.named_parameters()} for m in (theirs, twin)),
    )


@pytest.mark.parametrize(("model_type", "case"), EVERY)
def test_bf16_is_as_near_as_two_ways_of_transformers(
    model_type: str, case: str, tmp_path: Path
) -> None:
    overrides = CASES[model_type][case] | IN_BF16.get(model_type, {})
    reference(model_type, overrides, tmp_path, dtype=torch.bfloat16)
    ids = tokens()
    with torch.no_grad():
        eager = load_reference(tmp_path, "eager")(ids).logits
        if model_type in NO_SDPA:  # the second way is the same in fp32
            other = load_reference(tmp_path, "eager", torch.float32)(ids).logits
        else:
            other = load_reference(tmp_path, "sdpa")(ids).logits
            assert other.dtype == torch.bfloat16
        ours = from_pretrained(tmp_path)(ids).logits
    assert eager.dtype == ours.dtype == torch.bfloat16
    spread = (eager.float() - other.float()).abs()
    for theirs in (eager, other):
        error = (ours.float() - theirs.float()).abs()
        assert error.max() <= 2 * spread.max()
        assert error.square().mean().sqrt() <= 1.3 * spread.square().mean().sqrt()


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_bf16_is_rounded_where_transformers_rounds(
    model_type: str, case: str, tmp_path: Path
) -> None:
    """Part by part: the spread of whole logits would hide it."""
    reference(model_type, CASES[model_type][case], tmp_path, dtype=torch.bfloat16)
    theirs, ours = load_reference(tmp_path), from_pretrained(tmp_path)
    calls: dict[tuple[str, bool], Any] = {}  # of the block, ours or theirs
    for name in (f"model.layers.{i}" for i in range(len(ours.model.layers))):
        for model in (theirs, ours):
            stored = name if model is ours else ours.checkpoint_names.stored_name(name)
            model.get_submodule(stored).register_forward_pre_hook(
                lambda _, *given, key=(name, model is ours): calls.__setitem__(key, given),
                with_kwargs=True,
            )
    with torch.no_grad():
        theirs(tokens()), ours(tokens())
        for name, module in ours.named_modules():
            if isinstance(module, RMSNorm) and module.learned:
                x = torch.randn(99, len(module.weight)).bfloat16()
                stored = ours.checkpoint_names.stored_name(f"{name}.weight")
                peer = theirs.get_submodule(stored.removesuffix(".weight"))
                gate = [torch.randn_like(x)] if "Gated" in type(peer).__name__ else []
                y = module(x, None)[0] if isinstance(module, AddRMSNorm) else module(x, *gate)
                different = y != peer(x, *gate)
                assert different.float().mean() < 0.01, name  # 0.2 where it is the other order
    for i, rope in enumerate(block.rope_index for block in ours.model.layers):
        (x, _, rotation, *_), _ = calls[f"model.layers.{i}", True]
        (expected, *more), given = calls[f"model.layers.{i}", False]
        if i == 0:
            assert torch.equal(x, expected)  # the embedding and its scale
        if isinstance(ours.model.rotary_embs[rope], RotaryEmbedding):
            tables = given["position_embeddings"] if "position_embeddings" in given else more[0]
            slack = 0.0
            if isinstance(tables, Tensor):  # complex numbers, from another function
                tables, slack = (tables.real, tables.imag), 1e-6
            for mine, table in zip(rotation, tables, strict=False):
                assert mine.dtype == table.dtype
                table = table[..., : mine.shape[-1]]
                assert (mine.expand_as(table) - table).abs().max() <= slack


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_given_embeddings(model_type: str, case: str, tmp_path: Path) -> None:
    """Gemma scales those of its own tokens alone, Granite all."""
    theirs = reference(model_type, CASES[model_type][case], tmp_path)
    ours, twin = from_pretrained(tmp_path), exact(theirs)
    x = torch.randn(B, T, ours.config.hidden_size)
    if ours.model.needs_ids:
        with pytest.raises(
            ValueError, match=r"inputs_embeds .* needs the ids of tokens .* input_ids"
        ):
            ours(inputs_embeds=x)
        return
    with torch.no_grad():
        logits, peer = (model(inputs_embeds=x).logits for model in (ours, theirs))
        with float64():
            truth = twin(inputs_embeds=x.double()).logits
    assert_as_near(logits, peer, truth)


@pytest.mark.parametrize(("model_type", "case"), [*FIRST, ("gemma3_text", "both sides")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model_type: str, case: str, side: str, tmp_path: Path) -> None:
    theirs: Any = reference(model_type, CASES[model_type][case], tmp_path)
    ours, twin = from_pretrained(tmp_path), exact(theirs)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, slice(11) if side == "left" else slice(T - 11, T)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if side == "left":
        labels[0, 11] = -100  # transformers lets the last pad predict it
    real, first = mask.bool(), mask[0].bool()
    with torch.no_grad():
        peer = theirs(ids, attention_mask=mask, labels=labels)
        with float64():
            truth = twin(ids, attention_mask=mask, labels=labels)
        logits = ours(ids, attention_mask=mask).logits
        loss = ours(ids, attention_mask=mask, labels=labels).loss
        at = torch.arange(T)[first] if model_type in ABSOLUTE else None
        unpadded = ours(ids[:1, first], position_ids=at).logits
    assert_as_near(logits[real], peer.logits[real], truth.logits[real])
    assert_as_near(unpadded, peer.logits[:1, first], truth.logits[:1, first])
    assert_as_near(loss, peer.loss, truth.loss)
