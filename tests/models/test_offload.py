"""Blocks that are recomputed and activations that wait in host memory change no bit."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.contract import gradients, tokens
from tests.models.tiny import CASES, FIRST, SIZES
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


def test_what_was_copied_out_is_freed(model: CausalLM) -> None:
    """Only two blocks' tensors are on the device at a time."""
    alive: list[Any] = []
    init = activation_offload._OffloadedStorage.take

    def noted(stored: Any, x: Tensor) -> None:
        alive.append(weakref.ref(x.untyped_storage()))
        init(stored, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload._OffloadedStorage, "take", noted)
        torch.manual_seed(0)
        ids, labels = tokens()
        model.activation_offload = True
        loss = model(ids, labels=labels).loss
        assert alive and [ref for ref in alive if ref() is not None] == []
        loss.backward()


class Copies:
    """Bytes that were stored, by what the block saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[int] = []
        self.fetched = 0
        take, fetch = (
            activation_offload._OffloadedStorage.take,
            activation_offload._OffloadedStorage.fetch,
        )

        def counted(stored: Any, x: Tensor) -> None:
            self.taken.append(stored.size)
            take(stored, x)

        def again(stored: Any) -> None:
            self.fetched += stored.size
            fetch(stored)

        monkeypatch.setattr(activation_offload._OffloadedStorage, "take", counted)
        monkeypatch.setattr(activation_offload._OffloadedStorage, "fetch", again)


def test_all_is_fetched_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(model, 0, False)
    copies = Copies(monkeypatch)
    assert same(run(model, 0, True), expected)
    assert copies.taken and copies.fetched == sum(copies.taken)


def test_recomputed_blocks_keep_their_inputs_alone(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch)
    run(model, 0, True)
    whole = sum(copies.taken)
    copies.taken.clear()
    run(model, True, True)
    ids, _ = tokens()
    branch = ids.numel() * model.config.hidden_size * model.dtype.itemsize
    # The branch and the stream, and the positions, which the pass shares
    most = (2 * branch + 8 * ids.numel()) * (model.config.num_hidden_layers - 1)
    assert 0 < sum(copies.taken) <= most < whole
