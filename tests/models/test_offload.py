"""Blocks that are recomputed and activations that wait in host memory change no bit."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST
from tests.support.contract import gradients, tokens
from tigon.layers import activation_offload
from tigon.models import MODELS, CausalLM

WAYS = [(0, True), (2, False), (True, True)]


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small it is."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 0)
    yield


def tiny(model_type: str, case: str) -> CausalLM:
    values = {"model_type": model_type} | SIZES | CASES[model_type][case]
    return MODELS[model_type].from_config(values).train()


def run(model: CausalLM, recompute: int, away: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.activation_checkpointing, model.activation_offload = recompute, away
    torch.manual_seed(0)
    ids, labels = tokens()
    loss = model(ids, labels=labels).loss
    return loss.detach(), gradients(loss, model)


def same(found: Any, expected: Any) -> bool:
    different = [n for n, g in expected[1].items() if not torch.equal(g, found[1][n])]
    return torch.equal(found[0], expected[0]) and not different


@pytest.mark.parametrize(("model_type", "case"), FIRST)
def test_loss_and_gradients_are_the_same_bits(model_type: str, case: str) -> None:
    model = tiny(model_type, case)
    expected = run(model, 0, False)
    assert [way for way in WAYS if not same(run(model, *way), expected)] == []


def test_saved_tensors_leave_and_return_once(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only two blocks' are on the device at a time; a recomputed block saves its inputs alone."""
    expected = run(model, 0, False)
    stored, taken, fetched = activation_offload._OffloadedStorage, [], []
    take, fetch = stored.take, stored.fetch

    def note_taken(self: Any, x: Tensor) -> None:
        taken.append((self.size, weakref.ref(x.untyped_storage())))
        take(self, x)

    def note_fetched(self: Any) -> None:
        assert fetched or [ref for _, ref in taken if ref() is not None] == []
        fetched.append(self.size)
        fetch(self)

    monkeypatch.setattr(stored, "take", note_taken)
    monkeypatch.setattr(stored, "fetch", note_fetched)
    assert same(run(model, 0, True), expected)
    whole = sum(size for size, _ in taken)
    assert whole == sum(fetched) > 0
    taken.clear()
    run(model, True, True)
    ids, _ = tokens()
    branch = ids.numel() * model.config.hidden_size * model.dtype.itemsize
    # The branch and the stream, and the positions, which the pass shares
    most = (2 * branch + 8 * ids.numel()) * (model.config.num_hidden_layers - 1)
    assert 0 < sum(size for size, _ in taken) <= most < whole
