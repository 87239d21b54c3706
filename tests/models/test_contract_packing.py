"""Packed sequences are computed and counted as if each had come alone."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.support.contract import assert_same_gradients, gradients, mean, tokens
from tests.support.flash import played
from tigon.layers import KVCache
from tigon.models import Batch, CausalLM

__all__ = ["played"]
LENGTHS = (5, 1, 9, 4)
TOTAL = sum(LENGTHS)
ENDS = [0, 5, 6, 15, 19]
CU = torch.tensor(ENDS, dtype=torch.int32)
RESTARTS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
MAX = {"max_length_q": 9, "max_length_k": 9}
WAYS: dict[str, dict[str, Any]] = {
    "cu_seq_lens": {"cu_seq_lens": CU},
    "padded cu_seq_lens": {"cu_seq_lens": torch.tensor([*ENDS, 19, 19])},
    "position_ids": {"position_ids": RESTARTS},
    "1-D position_ids": {"position_ids": RESTARTS[0]},
    "both": {"cu_seq_lens": CU, "position_ids": RESTARTS},
    "transformers' four": {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, **MAX},
    "cu_seq_lens_k": {"cu_seq_lens_k": CU},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def packed() -> tuple[Tensor, Tensor]:
    """[1, 19] with a label on every first token, and ignored turns in the middle of sequences."""
    ids, labels = tokens(batch=1, length=TOTAL, ignored=0.0)
    labels[0, 8:11] = -100  # a masked turn inside the third sequence
    labels[0, [2, 17]] = -100
    return ids, labels


def alone(x: Tensor) -> list[Tensor]:
    return [x[:, a:b] for a, b in itertools.pairwise(ENDS)]


@ways
@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_logits_equal_those_of_the_sequences_alone(
    model: CausalLM, way: dict[str, Any], use_cache: bool | None, training: bool
) -> None:
    """And so do losses: of tokens, and the mean over sequences."""
    model.train(training)
    ids, labels = packed()
    each = [
        model(part, labels=target, loss_reduction="none", return_logits=True)
        for part, target in zip(alone(ids), alone(labels), strict=True)
    ]
    logits = model(ids, **way, use_cache=use_cache).logits
    expected = torch.cat([out.logits for out in each], 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(ids).logits, expected, atol=0.1)  # packing matters here

    batch = {"labels": labels, **way, "use_cache": use_cache}
    losses = torch.cat([out.loss for out in each], 1)
    per_token = model(ids, **batch, loss_reduction="none").loss
    torch.testing.assert_close(per_token, losses, rtol=1e-5, atol=1e-5)
    counted = int((losses != 0).sum())
    assert counted == TOTAL - len(LENGTHS) - 5  # ignored: three in one turn, and two
    assert model.num_items(**batch) == counted
    assert model(ids, **batch).loss.item() == pytest.approx(losses.sum().item() / counted, rel=1e-6)

    means = mean(out.loss.sum() / (out.loss != 0).sum() for out in each if out.loss.any())
    assert model.num_items(**batch, loss_reduction="sequence") == 3
    loss = model(ids, **batch, loss_reduction="sequence", return_logits=training).loss
    assert loss.item() == pytest.approx(means.item(), rel=1e-6)
    assert_same_gradients(gradients(loss, model), gradients(means, model))


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["fa4", "flash"])
@ways
def test_backends_without_a_mask_know_the_same_boundaries(
    model: CausalLM, way: dict[str, Any], backend: Any
) -> None:
    ids, labels = packed()
    expected = model(ids, labels=labels, **way, return_logits=True)
    model.attention = backend
    out = model(ids, labels=labels, **way, return_logits=True)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(out.loss, model), gradients(expected.loss, model))


def test_masked_turns_do_not_split_a_sequence(model: CausalLM) -> None:
    ids, labels = tokens(length=12, ignored=0.0)
    labels[:, 3:6], labels[0, 8], labels[1, 0] = -100, -100, -100
    once = model(ids, labels=labels).loss
    for way in ({"cu_seq_lens": torch.tensor([0, 12, 24])}, {"position_ids": torch.arange(12)}):
        assert torch.equal(model(ids, labels=labels, **way).loss, once)
        assert model.num_items(labels, **way, loss_reduction="sequence") == 2
    masked = model(ids, labels=labels, return_logits=True).logits
    assert torch.equal(masked, model(ids).logits)


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum", "none"])
def test_rows_pack_differently(model: CausalLM, reduction: str) -> None:
    ids, labels = tokens(length=10)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]])
    cu = torch.tensor([0, 4, 7, 10, 12, 20])
    by_position = model(ids, labels=labels, position_ids=positions, loss_reduction=reduction)
    by_bounds = model(ids, labels=labels, cu_seq_lens=cu, loss_reduction=reduction)
    flat = model(
        ids.view(1, -1), labels=labels.view(1, -1), cu_seq_lens=cu, loss_reduction=reduction
    )
    for out in (by_position, by_bounds):
        torch.testing.assert_close(out.loss.flatten(), flat.loss.flatten(), rtol=1e-5, atol=1e-5)


def test_positions_that_skip_do_not_split(model: CausalLM) -> None:
    ids, labels = tokens(length=6)
    positions = torch.tensor([[0, 1, 5, 6, 7, 20]]).expand(2, -1)
    assert model.num_items(labels, position_ids=positions, loss_reduction="sequence") == 2
    flat = model(ids, position_ids=torch.arange(6)[None]).logits
    skipped = model(ids, position_ids=positions).logits
    torch.testing.assert_close(skipped[:, :2], flat[:, :2])
    assert not torch.allclose(skipped[:, 2:], flat[:, 2:], atol=1e-3)


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [False, True], ids=["no positions", "positions"])
def test_padding_changes_nothing(model: CausalLM, side: str, positions: bool, backend: Any) -> None:
    model.attention = backend
    ids, labels = tokens(length=9)
    labels[:, 0] = -100  # else the last padding on the left would predict it
    padded = torch.full((2, 13), 7)
    mask = torch.zeros(2, 13, dtype=torch.long)
    targets = torch.full((2, 13), -100)
    for b, n in enumerate((9, 4)):
        where = slice(13 - n, 13) if side == "left" else slice(0, n)
        padded[b, where], mask[b, where] = ids[b, :n], 1
        targets[b, where] = labels[b, :n]
    extra = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {}
    full = model(padded, attention_mask=mask, **extra).logits
    losses = []
    for b, n in enumerate((9, 4)):
        part = model(ids[b : b + 1, :n], labels=labels[b : b + 1, :n], return_logits=True)
        torch.testing.assert_close(full[b, mask[b] == 1], part.logits[0], rtol=1e-5, atol=1e-5)
        losses.append(part.loss)
    batch = {"labels": targets, "attention_mask": mask, **extra}
    loss = model(padded, **batch, loss_reduction="sequence").loss
    assert loss.item() == pytest.approx(mean(losses).item(), rel=1e-6)
    assert_same_gradients(gradients(loss, model), gradients(mean(losses), model))
    assert model.num_items(**batch, loss_reduction="sequence") == 2


@pytest.mark.parametrize("cu", [[0, 4, 9, 13, 18], [0, 2, 4, 9, 13, 18]])
def test_padding_that_is_a_sequence_of_its_own(model: CausalLM, cu: list[int]) -> None:
    ids, labels = tokens(length=9)
    mask = torch.tensor([[1] * 4 + [0] * 5, [1] * 4 + [0] * 5])
    labels = torch.where(mask == 1, labels, -100)
    both = {"attention_mask": mask, "cu_seq_lens": torch.tensor(cu)}
    out = model(ids, labels=labels, **both, return_logits=True)
    again = model(ids, labels=labels, cu_seq_lens=torch.tensor(cu), return_logits=True)
    torch.testing.assert_close(out.loss, again.loss)
    torch.testing.assert_close(out.logits[mask == 1], again.logits[mask == 1])
    if len(cu) == 5:
        padded = model(ids, labels=labels, attention_mask=mask, return_logits=True)
        torch.testing.assert_close(out.logits[mask == 1], padded.logits[mask == 1])
        torch.testing.assert_close(out.loss, padded.loss)
    assert model.num_items(labels, **both) == model.num_items(
        labels, cu_seq_lens=both["cu_seq_lens"]
    )


def test_positions_restart_in_every_sequence(model: CausalLM) -> None:
    for way in (WAYS["cu_seq_lens"], WAYS["position_ids"], WAYS["padded cu_seq_lens"]):
        batch = Batch.of(model, packed()[0], **way)
        assert torch.equal(batch.position_ids, RESTARTS)
    rows = Batch.of(model, tokens(2, 5)[0], cu_seq_lens=torch.tensor([0, 2, 5, 10]))
    assert rows.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_masked_token_inside_a_sequence_does_not_split_it(model: CausalLM) -> None:
    ids, _ = tokens(batch=1, length=6)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 9, 3, 4]])  # padding's own position means nothing
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    real = mask[0] == 1
    torch.testing.assert_close(logits[:, real], model(ids[:, real]).logits)


def test_packed_sequences_with_padding_between(model: CausalLM) -> None:
    ids, _ = tokens(batch=1, length=11)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0]])
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    for part in (slice(1, 4), slice(6, 10)):
        torch.testing.assert_close(logits[:, part], model(ids[:, part]).logits)


def test_a_packed_batch_cannot_be_continued(model: CausalLM) -> None:
    ids, _ = packed()
    cache = model(ids, cu_seq_lens=CU, use_cache=True).past_key_values
    assert isinstance(cache, KVCache) and cache.length == TOTAL
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids[:, :1], past_key_values=cache)
    cache = model(ids, position_ids=torch.arange(TOTAL), use_cache=True).past_key_values
    continued = model(ids[:, :3], past_key_values=cache).logits
    whole = model(torch.cat((ids, ids[:, :3]), 1)).logits[:, -3:]
    torch.testing.assert_close(continued, whole)


def test_max_length_bounds_the_sequences(model: CausalLM) -> None:
    ids, _ = packed()
    expected = model(ids, cu_seq_lens=CU).logits
    for longest in (9, 40):
        assert torch.equal(model(ids, cu_seq_lens=CU, max_length_q=longest).logits, expected)


def test_a_backend_is_chosen_when_a_model_is_made(model: CausalLM, tmp_path: Path) -> None:
    assert model.attention == "auto"
    assert type(model).from_config(model.config, attention="flex").attention == "flex"
    model.save_pretrained(tmp_path / "out")
    assert type(model).from_pretrained(tmp_path / "out", attention="sdpa").attention == "sdpa"
    for make in (tigon.from_pretrained, type(model).from_pretrained):
        with pytest.raises(ValueError, match="attention='eager' is not one of auto, fa4, cudnn"):
            make(tmp_path / "out", attention="eager")


def test_an_unknown_backend(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="attention='flash2' is not one of auto, fa4, cudnn"):
        model.use_attention("flash2")
    model.use_attention("flash")
    with pytest.raises(ValueError, match="'flash' cannot do this: it runs on CUDA GPUs, not on c"):
        model(packed()[0])
