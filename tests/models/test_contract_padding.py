"""Padding that is left out of the blocks: nothing of a real token changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.support.contract import assert_same_gradients, gradients, tiny, tiny_llama, tokens
from tigon.models import Batch, CausalLM

B, T = 3, 16
CUDA = torch.cuda.is_available()
LENGTHS = (9, 3, 16)
AT = torch.arange(T)
MASKS: dict[str, Tensor] = {
    "right": torch.stack([n > AT for n in LENGTHS]),
    "left": torch.stack([T - n <= AT for n in LENGTHS]),
    "both": torch.stack([(AT >= 2) & (AT < 9), AT < 4, AT >= 1]),
    "a row of nothing": torch.stack([AT < 9, AT < 0, AT < 16]),
}
# The first row holds two sequences
RESTARTING = torch.stack([torch.cat([torch.arange(5), torch.arange(T - 5)]), AT, AT])


# Each with the keys of its config that matter here
FAMILIES: dict[str, tuple[type[CausalLM], dict[str, Any]]] = {
    "llama": (tigon.Llama, {}),
    "gemma3": (
        tigon.Gemma3,
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": (
        tigon.Qwen3Moe,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
}


def dropping() -> CausalLM:
    model = tiny_llama()
    model.drop_padding = True
    return model


class Rows(list[tuple[int, ...]]):
    """Shapes of what the blocks were given."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        layer = model.model.layers[0]
        layer.register_forward_pre_hook(lambda _, given: self.append(given[0].shape[:2]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_real_tokens_are_as_before(family: str, mask: Tensor, packed: bool) -> None:
    cls, changes = FAMILIES[family]
    model = tiny(cls, **changes)
    model.drop_padding = True
    ids, _ = tokens(B, T)
    labels = ids.masked_fill(~mask, -100)
    labels[:, 1:][~mask[:, :-1]] = -100  # what padding says of a first token means nothing
    batch: dict[str, Any] = {"attention_mask": mask.long()}
    batch |= {"position_ids": RESTARTING} if packed else {}
    metrics = ["nll", "entropy"] + (["expert_load", "aux_loss"] if family == "qwen3_moe" else [])
    rows = Rows(model)
    out = model(ids, labels=labels, return_logits=True, metrics=metrics, **batch)
    found = gradients(out.loss, model)
    assert rows == [(1, int(mask.sum()))]
    model.drop_padding = False
    plain = model(ids, labels=labels, return_logits=True, metrics=metrics, **batch)
    assert rows[1] == (B, T)
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.logits[mask], plain.logits[mask], rtol=1e-4, atol=1e-5)
    for name in metrics:
        torch.testing.assert_close(out.metrics[name], plain.metrics[name], rtol=1e-4, atol=1e-5)
    assert_same_gradients(found, gradients(plain.loss, model), 2e-5)


def test_positions_given_for_padded_rows() -> None:
    model, mask = dropping(), MASKS["left"]
    ids, _ = tokens(B, T)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    rows = Rows(model)
    logits = model(ids, **given).logits
    assert rows == [(1, int(mask.sum()))]
    for row, n in enumerate(LENGTHS):
        alone = model(ids[row : row + 1, -n:]).logits[0]
        torch.testing.assert_close(logits[row, -n:], alone, rtol=1e-4, atol=1e-5)


def test_recomputed_blocks() -> None:
    model, mask = dropping(), MASKS["right"]
    ids, _ = tokens(B, T)
    labels = ids.masked_fill(~mask, -100)
    rows = Rows(model)
    expected = gradients(model(ids, labels=labels, attention_mask=mask).loss, model)
    assert rows == [(1, int(mask.sum()))]
    model.activation_checkpointing = True
    found = gradients(model(ids, labels=labels, attention_mask=mask).loss, model)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize(
    "mask",
    [
        torch.stack([AT < T, AT < T, T - 5 > AT]),  # less than an eighth
        torch.stack([(AT < 3) | (AT > 9), AT < 3, AT < 16]),  # holes
        torch.zeros(B, T, dtype=torch.bool),
    ],
    ids=["little", "holes", "nothing"],
)
def test_padding_that_stays(mask: Tensor) -> None:
    model = dropping()
    rows = Rows(model)
    model(tokens(B, T)[0], attention_mask=mask)
    assert rows[0] == (B, T)


def test_bounds_that_make_sequences_of_padding() -> None:
    model = dropping()
    rows = Rows(model)
    cu = torch.tensor([0, 9, T, T + 3, 2 * T, 3 * T])
    model(tokens(B, T)[0], attention_mask=MASKS["right"], cu_seq_lens=cu)
    assert rows[0] == (B, T)


def drops(model: CausalLM, x: Tensor) -> bool:
    """Whether a half-empty batch is computed without its padding."""
    mask = torch.tensor([[1, 0], [1, 1]], device=x.device)
    batch = Batch.of(model, mask, attention_mask=mask)
    return batch.drop_padding(x.expand(2, 2, -1))[3] is not None


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def test_where_it_is_done() -> None:
    """Not where attention would spell out a mask over the longer row, or RoPE turns."""
    model, x = tiny_llama(), torch.zeros(1, 1, 56)
    assert not drops(model, x)
    assert not drops(model, x.bfloat16())
    if CUDA:
        assert not drops(model, x.cuda())
        assert not drops(model, x.double().cuda())
        assert drops(model, x.bfloat16().cuda())
        assert not drops(model.use_attention("sdpa"), x.bfloat16().cuda())
        assert not drops(tiny_llama(rope_parameters=ROPE), x.bfloat16().cuda())


def test_the_switch() -> None:
    model, x = dropping(), torch.zeros(1, 1, 56)
    assert drops(model, x)
    cached = Batch.of(model, torch.zeros(2, 2).long(), attention_mask=torch.eye(2), use_cache=True)
    assert cached.drop_padding(x.expand(2, 2, -1))[3] is None
    model.drop_padding = False
    assert not drops(model, x)
    turning = tiny_llama(rope_parameters=ROPE)
    turning.drop_padding = True
    assert not drops(turning, x)
