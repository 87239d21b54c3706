"""The fused head under autograd: values stay values, nothing is mutated, nothing silently wrong."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.contract import Outputs, V, assert_same_gradients, gradients, mean_loss, tokens
from tigon.kernels import use
from tigon.kernels.loss.logits import METRICS
from tigon.kernels.runtime import Mode
from tigon.models import CausalLM

T = 13


def storage(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


@pytest.mark.parametrize("labeled", [True, False])
def test_no_logits_tensor_exists(model: CausalLM, labeled: bool) -> None:
    model.lm_head.logits_bytes = 16 * V * 30  # 30 rows at a time
    ids, labels = tokens(batch=16, ignored=0.0)
    metrics = METRICS if labeled else ("predicted_tokens", "entropy", "max_logit", "z")
    with Outputs() as fused:
        out = model(ids, labels=labels if labeled else None, metrics=metrics)
        if labeled:
            out.loss.backward()
    with Outputs() as plain:
        model(ids, labels=labels, return_logits=True)
    assert [s for s in fused.shapes if s[-1:] == (V,) and s.numel() > 56 * V] == []
    assert [s for s in plain.shapes if s[-1:] == (V,) and s.numel() == 16 * T * V] != []


def test_logits_are_computed_once(model: CausalLM) -> None:
    ids, labels = tokens()
    for arguments in ({}, {"return_logits": True}, {"return_logits": True, "metrics": METRICS}):
        with Outputs() as seen:
            model(ids, labels=labels, **arguments)
        rows = [s.numel() // V for s in seen.products if s[-1] == V]
        targets = int((labels[:, 1:] != -100).sum())
        assert rows == [2 * T if arguments else targets]  # ignored rows cost nothing here


def test_evaluation_computes_no_gradient(model: CausalLM) -> None:
    ids, labels = tokens()
    with torch.no_grad(), Outputs() as seen:
        model(ids, labels=labels)
    assert [s for s in seen.products if s == model.lm_head.weight.shape] == []


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum", "none"])
def test_returned_logits_are_values_that_survive_the_backward(
    model: CausalLM, reduction: str
) -> None:
    ids, labels = tokens()
    clean = storage(model(ids).logits)
    alone = model(ids, labels=labels, loss_reduction=reduction).loss
    out = model(ids, labels=labels, loss_reduction=reduction, return_logits=True)
    assert storage(out.logits) == clean
    torch.testing.assert_close(out.loss, alone, rtol=1e-6, atol=1e-6)
    assert_same_gradients(
        gradients(out.loss.sum(), model, retain_graph=True), gradients(alone.sum(), model)
    )
    assert storage(out.logits) == clean and out.logits._version == 0


def test_returned_logits_are_differentiable_beside_the_loss(model: CausalLM) -> None:
    ids, labels = tokens()
    plain = model(ids).logits
    expected = mean_loss(plain, labels) + plain.logsumexp(-1).square().mean()
    out = model(ids, labels=labels, return_logits=True)
    total = out.loss + out.logits.logsumexp(-1).square().mean()
    assert_same_gradients(gradients(total, model), gradients(expected, model))


@pytest.mark.parametrize("frozen", ["model", "lm_head"])
def test_frozen_body_or_head(model: CausalLM, frozen: str) -> None:
    ids, labels = tokens()
    expected = gradients(mean_loss(model(ids).logits, labels), model)
    expected = {name: g for name, g in expected.items() if not name.startswith(f"{frozen}.")}
    model.get_submodule(frozen).requires_grad_(False)
    for reduction in ("token", "none"):
        with Outputs() as seen:
            loss = model(ids, labels=labels, loss_reduction=reduction).loss.sum()
            found = gradients(
                loss / (1 if reduction == "token" else model.num_items(labels)), model
            )
        assert_same_gradients(found, expected)
        # No gradient of a frozen head is made and thrown away
        assert (model.lm_head.weight.shape in seen.products) == (frozen == "model")


def test_activation_checkpointing_changes_no_gradient(model: CausalLM) -> None:
    ids, labels = tokens()
    expected = gradients(model(ids, labels=labels).loss, model)
    model.activation_checkpointing = True
    for use_cache in (None, True):
        found = gradients(model(ids, labels=labels, use_cache=use_cache).loss, model)
        assert_same_gradients(found, expected, rel=1e-6)
    with Outputs() as seen:
        loss = model(ids, labels=labels).loss
        before = len(seen.products)
        loss.backward()
    model.activation_checkpointing = False
    with Outputs() as plain:
        loss = model(ids, labels=labels).loss
        assert len(plain.products) == before
        loss.backward()
    assert len(seen.products) > len(plain.products)  # blocks were computed again


@pytest.mark.parametrize("reduction", ["token", "none"])
@pytest.mark.parametrize("return_logits", [False, True])
def test_second_backward_is_equal_or_raises(
    model: CausalLM, reduction: str, return_logits: bool
) -> None:
    ids, labels = tokens()
    out = model(ids, labels=labels, loss_reduction=reduction, return_logits=return_logits)
    loss = 3 * out.loss.sum()  # an upstream gradient that is not 1
    first = gradients(loss, model, retain_graph=True)
    kept = {name: g.clone() for name, g in first.items()}
    for g in first.values():
        g.zero_()  # what a caller does with gradients is no concern of the graph
    second = gradients(loss, model)
    assert [name for name in kept if not torch.equal(kept[name], second[name])] == []
    with pytest.raises(RuntimeError, match="second time"):
        gradients(loss, model)


@pytest.mark.parametrize("reduction", ["token", "none"])
def test_second_derivatives_raise_or_are_right(model: CausalLM, reduction: str) -> None:
    ids, labels = tokens()
    loss = model(ids, labels=labels, loss_reduction=reduction).loss.sum()
    with pytest.raises(RuntimeError, match="create_graph=True: linear_cross_entropy has no second"):
        gradients(loss, model, create_graph=True)

    def penalty(loss: Tensor) -> dict[str, Tensor]:
        (grad,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
        return gradients(loss + grad.square().sum(), model)

    expected = mean_loss(model(ids).logits, labels)
    out = model(ids, labels=labels, return_logits=True)
    assert_same_gradients(penalty(out.loss), penalty(expected))


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum", "none"])
@pytest.mark.parametrize("return_logits", [False, True])
def test_no_input_is_written_to(model: CausalLM, reduction: str, return_logits: bool) -> None:
    _, labels = tokens(batch=1)
    batch = {
        "inputs_embeds": torch.randn(1, T, 56, requires_grad=True),
        "labels": labels,
        "loss_weights": torch.rand(1, T, requires_grad=True),
        "position_ids": torch.cat((torch.arange(6), torch.arange(7)))[None],
        "attention_mask": torch.tensor([[0] + [1] * 12]),
        "cu_seq_lens": torch.tensor([0, 1, 6, 13]),
        "logits_to_keep": torch.tensor([-1, 0, 3, 4, 5, 9]),
    }
    if reduction in ("token", "sequence"):
        batch["num_items_in_batch"] = torch.tensor(3)
    watched = {**batch, **dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (storage(x), x._version) for name, x in watched.items()}
    out = model(**batch, loss_reduction=reduction, return_logits=return_logits, metrics=METRICS)
    out.loss.sum().backward()
    after = {name: (storage(x), x._version) for name, x in watched.items()}
    assert [name for name in before if before[name] != after[name]] == []
    shifted = {**batch, "shift_labels": labels, "labels": None}
    model(**shifted, loss_reduction=reduction)
    assert storage(labels) == before["labels"][0]


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize(
    "asked", [{}, {"metrics": ("accuracy",)}, {"loss_reduction": "none"}, {"return_logits": True}]
)
def test_a_step_leaves_no_tensor_to_the_garbage_collector(
    model: CausalLM, asked: dict[str, Any], mode: Mode
) -> None:
    """A reference cycle keeps activations until the collector runs, some steps later."""
    if torch.cuda.is_available():
        model.cuda()
    elif mode == "triton":
        asked = asked | {"logits_to_keep": 2}  # the interpreter is slow
    ids = torch.arange(13, device=model.device)[None]

    def step() -> None:
        model(ids, labels=ids, **asked).loss.sum().backward()
        model.zero_grad()

    def left() -> list[Tensor]:
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step()
            gc.collect()
            return [x for x in gc.garbage if isinstance(x, Tensor)]
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()

    with use(mode):
        step()
        # A cycle of the step's own comes back each time; what tests before it compiled does not
        assert not all(left() for _ in range(3))
