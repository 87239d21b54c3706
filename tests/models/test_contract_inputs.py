"""Bad input is an error that names the value."""

import math
from typing import Any

import pytest
import torch

from tests.models.contract import assert_same_gradients, gradients, tokens
from tigon.kernels import CrossEntropy, LogProbs
from tigon.layers import KVCache
from tigon.models import CausalLM
from tigon.models.inputs import check_prefixes

IDS, LABELS = torch.arange(26).view(2, 13), torch.arange(26).view(2, 13) + 40


ROWS = torch.tensor([0, 13, 26])
THREE = torch.tensor([0, 13, 20, 26])
COEFFICIENT = torch.ones((), requires_grad=True)
RESTARTS = torch.tensor([[*range(13)], [*range(8), *range(5)]])


def changed(position: tuple[int, int], value: int) -> torch.Tensor:
    labels = LABELS.clone()
    labels[position] = value
    return labels


Rows = list[tuple[dict[str, Any], str]]
KEEPS: Rows = [
    (labels | {"logits_to_keep": keep}, message)
    for labels in ({}, {"labels": LABELS})
    for keep, message in (
        (-1, "logits_to_keep=-1 is negative"),
        (torch.tensor([0, 13]), r"index outside \[-13, 13\): \[13\]"),
        (torch.tensor([13], dtype=torch.uint8), r"index outside \[-13, 13\): \[13\]"),
        (torch.tensor([-14]), r"index outside \[-13, 13\): \[-14\]"),
        (torch.tensor([[0], [13]]), r"index outside \[-13, 13\)"),
        (torch.ones(2, 13).bool(), r"bool tensor \(2, 13\); it must be \[13\]"),
        (torch.ones(12).bool(), r"bool tensor \(12,\); it must be \[13\]"),
        (torch.zeros(3, 1).long(), "has 3 rows, but the batch has 2"),
        (torch.tensor(3), r"is not an index \[n\] or \[batch, n\]"),
        (torch.ones(2), "float32"),
        (torch.zeros(2, 1, 1).long(), r"\(2, 1, 1\)"),
    )
]
LOGITS_AT: Rows = [
    ({"labels": LABELS, "logits_at": at}, message)
    for at, message in (
        (torch.tensor([0, 26]), r"logits_at has an index outside \[0, 26\): \[26\]"),
        (torch.tensor([-1]), r"\[-1\]"),
        (torch.ones(13, dtype=torch.bool), r"\(13,\) is not \[batch, tokens\]"),
        (torch.zeros(1, 2, dtype=torch.int64), r"\(1, 2\) is not an index \[n\]"),
    )
]
CRITERIA: Rows = [
    ({"criteria": (LogProbs(),)}, "LogProbs without labels: give labels, or targets="),
    ({"criteria": (CrossEntropy(),)}, "CrossEntropy without labels"),
    (
        {"criteria": (LogProbs(targets=torch.zeros(2, 4).long()),), "logits_to_keep": 4},
        r"targets \(2, 4\) of LogProbs is not \[batch, tokens, ...\] = \[2, 13\]",
    ),
    ({"labels": LABELS, "label_smoothing": 1.5}, r"=1.5 is not in \[0, 1\)"),
    ({"labels": LABELS, "z_loss": -1.0}, "z_loss=-1.0 is not a finite number"),
    ({"labels": LABELS, "class_weights": torch.ones(5)}, r"class_weights \(5,\) is not \[V\] = "),
    ({"label_smoothing": 0.1}, "label_smoothing without a cross-entropy"),
    (
        {"labels": LABELS, "z_loss": 0.1, "criteria": (LogProbs(),)},
        "z_loss without a cross-entropy",
    ),
    (
        {
            "labels": LABELS,
            "label_smoothing": 0.1,
            "criteria": (CrossEntropy(label_smoothing=0.5),),
        },
        "label_smoothing is given twice",
    ),
    ({"labels": LABELS, "criteria": (CrossEntropy(z_loss=-5.0),)}, "z_loss=-5.0 is negative"),
    (
        {"labels": LABELS, "criteria": (CrossEntropy(coefficient=COEFFICIENT),)},
        "coefficient requires a gradient",
    ),
]
WRONG_TYPES: Rows = [
    ({"logits_to_keep": True}, "not True"),
    ({"logits_to_keep": 2.0}, r"not 2\.0"),
    ({"logits_to_keep": [1, 2]}, r"not \[1, 2\]"),
    ({"logits_at": torch.zeros(3)}, "integers or truth values, not torch.float32"),
    ({"logits_at": 3}, "integers or truth values, not int"),
    ({"criteria": ("kl",)}, "criteria has 'kl': give CrossEntropy, LogProbs or KL"),
    ({"labels": LABELS, "criteria": CrossEntropy()}, "give a tuple of criteria"),
    ({"labels": LABELS, "class_weights": [1.0]}, "class_weights must be a tensor"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_TYPES)
def test_wrong_types(model: CausalLM, arguments: dict[str, Any], message: str) -> None:
    for given in (arguments, {"labels": LABELS, **arguments}):
        with pytest.raises(TypeError, match=message):
            model(IDS, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *KEEPS,
        *LOGITS_AT,
        *CRITERIA,
        ({"labels": LABELS[:, :-1]}, r"labels \(2, 12\) is not \[batch, tokens\] = \[2, 13\]"),
        ({"labels": LABELS.flatten()}, r"labels \(26,\) is not \[batch, tokens\]"),
        ({"shift_labels": LABELS[:1]}, r"shift_labels \(1, 13\) is not \[batch, tokens\]"),
        (
            {"labels": LABELS, "loss_weights": torch.ones(2, 12)},
            r"loss_weights \(2, 12\) is not \[batch, tokens\]",
        ),
        ({"loss_weights": torch.ones(2, 13)}, "loss_weights without labels"),
        ({"metrics": ("entropy", "nll")}, r"metrics=\('nll',\) without labels"),
        ({"metrics": "accuracy"}, r"metrics=\('accuracy',\) without labels"),
        ({"labels": changed((1, 5), 97)}, r"label 97 at .* neither -100 nor in \[0, 97\)"),
        ({"labels": changed((0, 12), -1)}, r"label -1 at .* neither -100 nor in \[0, 97\)"),
        ({"shift_labels": changed((0, 0), -101)}, r"label -101 at .* neither -100 nor"),
        ({"labels": LABELS, "loss_reduction": "mean"}, "loss_reduction='mean' is not one of"),
        (
            {"labels": LABELS, "num_items_in_batch": -3},
            "num_items_in_batch=-3 is no number of items",
        ),
        (
            {"labels": LABELS, "num_items_in_batch": torch.tensor([3, 4])},
            r"num_items_in_batch \(2,\) is not one number",
        ),
        (
            {"labels": LABELS, "num_items_in_batch": 3, "loss_reduction": "sum"},
            "num_items_in_batch=3 has no meaning with loss_reduction='sum'",
        ),
        (
            {"labels": LABELS, "num_items_in_batch": 3, "loss_reduction": "none"},
            "num_items_in_batch=3 has no meaning with loss_reduction='none'",
        ),
        (
            {"prefixes": torch.tensor([[0, 0], [0, 4]])},
            r"prefixes \(2, 2\) on cpu must be \[None, 2\] on the CPU, for the sequences",
        ),
        (
            {"cu_seq_lens": ROWS, "prefixes": torch.tensor([[0, 4]])},
            r"prefixes \(1, 2\) on cpu must be \[2, 2\]",
        ),
        (
            {"cu_seq_lens": ROWS, "prefixes": torch.tensor([[0, 0], [0, 4]])},
            r"each of prefixes must be .* in the row of its sequence and before it",
        ),
        (
            {"cu_seq_lens": THREE, "prefixes": torch.tensor([[0, 0], [0, 0], [14, 23]])},
            r"each of prefixes must be .*\[14, 23\]",
        ),
        (
            {"cu_seq_lens": THREE, "prefixes": torch.tensor([[0, 0], [0, 0], [16, 14]])},
            r"each of prefixes must be .*\[16, 14\]",
        ),
        (
            {"cu_seq_lens": THREE, "prefixes": torch.tensor([[0, 0], [0, 0], [13, 16]])},
            "prefixes without position_ids",
        ),
        ({"attention_mask": torch.ones(2, 12)}, r"attention_mask \(2, 12\) is not .* \[2, 13\]"),
        ({"attention_mask": torch.ones(2, 1, 13, 13)}, r"attention_mask \(2, 1, 13, 13\) is not"),
        ({"position_ids": torch.arange(12)}, r"position_ids \(1, 12\) is not \[1 or 2, 13\]"),
        ({"position_ids": IDS[:, :3]}, r"position_ids \(2, 3\) is not \[1 or 2, 13\]"),
        (
            {"cu_seq_lens_q": ROWS, "cu_seq_lens_k": torch.tensor([0, 12, 26])},
            r"cu_seq_lens_q and cu_seq_lens_k differ: \[0, 13, 26\] and \[0, 12, 26\]",
        ),
        (
            {"cu_seq_lens": ROWS, "cu_seq_lens_k": torch.tensor([0, 26])},
            r"cu_seq_lens and cu_seq_lens_k differ: \[0, 13, 26\] and \[0, 26\]",
        ),
        (
            {"cu_seq_lens": ROWS, "position_ids": torch.tensor([*range(9), *range(4)])},
            "position_ids restart inside a .*: token 9 of row 0 has position 0 after 8; give one",
        ),
        (
            {"cu_seq_lens": torch.tensor([0, 13, 20, 26]), "position_ids": RESTARTS},
            "position_ids restart inside a .*: token 8 of row 1 has position 0 after 7; give one",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("return_logits", [False, True])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_error_names_the_value(
    model: CausalLM, arguments: dict[str, Any], message: str, return_logits: bool, training: bool
) -> None:
    model.train(training)
    with pytest.raises(ValueError, match=message):
        model(IDS, **arguments, return_logits=return_logits)


@pytest.mark.traced
def test_prefixes_inside_torch_compile() -> None:
    compiled = torch.compile(check_prefixes, backend="eager")
    places = torch.tensor([[0, 0], [0, 0], [13, 16]])
    with pytest.raises(ValueError, match=r"make the batch with Batch\.of outside of it"):
        compiled(places, THREE, 13)
    assert check_prefixes(places, THREE, 13) is not None


def test_labels_that_are_nobodys_target_are_not_judged(model: CausalLM) -> None:
    strange = changed((0, 0), 5000)  # the first label of a row is never predicted
    assert torch.equal(model(IDS, labels=strange).loss, model(IDS, labels=LABELS).loss)


def test_ids_or_embeddings(model: CausalLM) -> None:
    embeddings = model.model.embed_tokens(IDS)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds, one of them"):
        model(IDS, inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds, one of them"):
        model(labels=LABELS)
    with pytest.raises(ValueError, match=r"input_ids \(13,\) is not \[batch, tokens\]"):
        model(IDS[0])


@pytest.mark.parametrize("shape", [(2, 0), (0, 13), (0, 0)])
def test_no_tokens(model: CausalLM, shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape).long()
    for given in ({"input_ids": ids}, {"inputs_embeds": model.model.embed_tokens(ids)}):
        (name,) = given
        with pytest.raises(ValueError, match=rf"{name} \({shape[0]}, {shape[1]}\) has no tokens"):
            model(**given)


@pytest.mark.parametrize("wrong", [97, -1])
def test_ids_outside_of_the_vocabulary(model: CausalLM, wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"input_ids has token {wrong}, outside of \[0, 97\)"):
        model(IDS.index_fill(1, torch.tensor(4), wrong))


def test_positions_that_agree_with_the_bounds(model: CausalLM) -> None:
    """Those that run on past a boundary do too, and those of padding mean nothing."""
    cu, expected = torch.tensor([0, 13, 21, 26]), model(IDS, position_ids=RESTARTS).logits
    for positions in (RESTARTS, torch.arange(13)):
        out = model(IDS, cu_seq_lens=cu, position_ids=positions).logits
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    real = torch.ones(2, 13).index_put((torch.tensor(1), torch.arange(8, 13)), torch.tensor(0.0))
    positions = RESTARTS * real.long()
    out = model(IDS, cu_seq_lens=cu, position_ids=positions, attention_mask=real).logits
    torch.testing.assert_close(out[real.bool()], expected[real.bool()], rtol=1e-5, atol=1e-5)


def test_num_items_needs_labels(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="items need labels or shift_labels"):
        model.num_items(input_ids=IDS, attention_mask=torch.ones(2, 13))
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model.num_items(LABELS, cu_seq_lens_q=ROWS, cu_seq_lens_k=ROWS[:2])


def test_attention_mask_covers_the_cache(model: CausalLM) -> None:
    ids, _ = tokens()
    cache = KVCache()
    model(ids[:, :9], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask \(2, 4\) is not .* = \[2, 13\]"):
        model(ids[:, 9:], past_key_values=cache, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="cu_seq_lens with a cache that already holds 9 tokens"):
        model(ids[:, 9:], past_key_values=cache, cu_seq_lens=torch.tensor([0, 4, 8]))
    continued = model(ids[:, 9:], past_key_values=cache, attention_mask=torch.ones(2, 13))
    torch.testing.assert_close(continued.logits, model(ids).logits[:, 9:])


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
PATHS: dict[str, dict[str, Any]] = {
    "fused": {},
    "with logits": {"return_logits": True},
    "metrics": {"metrics": ("accuracy", "nll")},
    "none": {"loss_reduction": "none"},
    "sequence": {"loss_reduction": "sequence", "loss_weights": torch.rand(2, 13)},
    "kept": {"logits_to_keep": 5},
    "packed": {"cu_seq_lens": torch.tensor([0, 4, 13, 26])},
}


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_labels_of_every_dtype(model: CausalLM, name: str, path: dict[str, Any]) -> None:
    for dtype in WHOLE:
        labels = LABELS if dtype == torch.uint8 else changed((1, 5), -100)
        given, exact = {name: labels.to(dtype)}, {name: labels}
        assert torch.equal(model(IDS, **given, **path).loss, model(IDS, **exact, **path).loss)
        assert torch.equal(model.num_items(**given, **path), model.num_items(**exact, **path))
    for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.complex64):
        message = f"{name} is {dtype}: labels are integers, -100 is ignored"
        given = {name: LABELS.to(dtype), **path}
        with pytest.raises(TypeError, match=message):
            model(IDS, **given)
        with pytest.raises(TypeError, match=message):
            model.num_items(**given)
    for wrong in (LABELS.tolist(), LABELS.numpy()):
        with pytest.raises(
            TypeError, match=f"{name} is a (list|ndarray), not a tensor of integers"
        ):
            model(IDS, **{name: wrong}, **path)


def test_loss_weights_of_every_dtype(model: CausalLM) -> None:
    weights = torch.rand(2, 13, dtype=torch.float64).requires_grad_()
    out = model(IDS, labels=LABELS, loss_weights=weights)
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss, model(IDS, labels=LABELS, loss_weights=weights.float()).loss)
    (grad,) = torch.autograd.grad(out.loss, weights)
    assert grad.dtype == torch.float64 and grad[:, 1:].all()
    for dtype in (torch.bool, torch.uint8, torch.int64):
        ones = torch.ones(2, 13, dtype=dtype)
        loss = model(IDS, labels=LABELS, loss_weights=ones, loss_reduction="none").loss
        assert torch.equal(loss, model(IDS, labels=LABELS, loss_reduction="none").loss)
    for wrong, kind in ((weights.tolist(), "list"), (weights.to(torch.complex64), "complex64")):
        given: dict[str, Any] = {"labels": LABELS, "loss_weights": wrong}
        with pytest.raises(TypeError, match=f"loss_weights must be a tensor .*, not .*{kind}"):
            model(IDS, **given)


@pytest.mark.parametrize("wrong", [-3, -0.5, math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_numbers_of_items_that_are_none(model: CausalLM, wrong: float, reduction: str) -> None:
    for given in (wrong, torch.tensor(wrong), torch.tensor([wrong], dtype=torch.float64)):
        batch: dict[str, Any] = {"labels": LABELS, "loss_reduction": reduction}
        with pytest.raises(ValueError, match=f"num_items_in_batch={wrong}(.0)? is no number of it"):
            model(IDS, **batch, num_items_in_batch=given)


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_zero_items_of_a_batch_that_has_some(model: CausalLM, zero: Any) -> None:
    with pytest.raises(ValueError, match=r"num_items_in_batch=0.*or 0 where no micro-batch has"):
        model(IDS, labels=LABELS, num_items_in_batch=zero)
    nothing = torch.full_like(LABELS, -100)
    assert model(IDS, labels=nothing, num_items_in_batch=zero).loss == 0


@pytest.mark.parametrize("wrong", ["7", True, [7]])
def test_numbers_of_items_of_another_type(model: CausalLM, wrong: Any) -> None:
    with pytest.raises(TypeError, match="num_items_in_batch must be a number or a tensor, not"):
        model(IDS, labels=LABELS, num_items_in_batch=wrong)


def test_a_wrong_number_of_items_in_one_graph(model: CausalLM) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for wrong in (torch.tensor(-3.0), torch.tensor(math.nan)):
        with pytest.raises(RuntimeError, match="num_items_in_batch is no number of items"):
            compiled(IDS, labels=LABELS, num_items_in_batch=wrong)
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_weights_of_ignored_positions_mean_nothing(
    model: CausalLM, path: dict[str, Any], wrong: float
) -> None:
    path, labels = dict(path), changed((1, 5), -100)
    weights = path.pop("loss_weights", torch.rand(2, 13)).clone()
    given = {"labels": labels, "loss_weights": weights, **path}
    expected = model(IDS, **given)
    grads = gradients(expected.loss.sum(), model)
    strange = weights.clone()
    strange[1, 5] = strange[0, 0] = wrong  # ignored, and nobody's target
    strange.requires_grad_()
    out = model(IDS, **given | {"loss_weights": strange})
    assert torch.equal(out.loss, expected.loss)
    (grad,) = torch.autograd.grad(out.loss.sum(), strange, retain_graph=True)
    assert grad.isfinite().all() and grad[1, 5] == 0
    assert_same_gradients(gradients(out.loss.sum(), model), grads)


@pytest.mark.parametrize("bad", [float("-inf"), float("nan"), 0.5])
def test_masks_to_add_to_scores_are_refused(model: CausalLM, bad: float) -> None:
    mask = torch.ones(2, 13)
    mask[0, :3] = 0
    expected = model(IDS, attention_mask=mask.bool()).logits
    assert torch.equal(model(IDS, attention_mask=mask).logits, expected)
    mask[1, 0] = bad
    with pytest.raises(ValueError, match=r"attention_mask is torch.float32 and has other values"):
        model(IDS, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_positions_are_integers(model: CausalLM, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="positions are integers"):
        model(IDS, position_ids=torch.arange(13).to(dtype)[None])
