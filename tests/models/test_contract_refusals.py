"""Bad input is an error that names the value: one table of calls and what each message has."""

import math
import re
from typing import Any

import pytest
import torch

from tests.models.test_contract_inputs import IDS, LABELS, changed
from tests.support.contract import tiny_llama
from tigon.kernels import KL, CrossEntropy, LogProbs
from tigon.models import Batch, CausalLM, Targets
from tigon.models.inputs import check_prefixes

t = torch.tensor
HIDDEN = torch.zeros(2, 13, 56)
THREE = t([0, 13, 20, 26])
RESTARTS = t([[*range(13)], [*range(8), *range(5)]])
LABELED = {"labels": LABELS}
COEFFICIENT = torch.ones((), requires_grad=True)
HALF_PADDED = torch.ones(2, 13).index_fill(1, torch.arange(9, 13), 0)


def mask_of(value: float) -> torch.Tensor:
    mask = torch.ones(2, 13)
    mask[1, 0] = value
    return mask


# Arguments, and what the message of the ValueError has
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"logits_to_keep": -1}, "logits_to_keep=-1"),
    ({"logits_to_keep": t([0, 13])}, "outside [-13, 13): [13]"),
    ({"logits_to_keep": t([13], dtype=torch.uint8)}, "outside [-13, 13): [13]"),
    ({"logits_to_keep": t([-14])}, "outside [-13, 13): [-14]"),
    ({"logits_to_keep": t([[0], [13]]), **LABELED}, "outside [-13, 13)"),
    ({"logits_to_keep": torch.ones(2, 13).bool()}, "(2, 13); it must be [13]"),
    ({"logits_to_keep": torch.ones(12).bool()}, "(12,); it must be [13]"),
    ({"logits_to_keep": torch.zeros(3, 1).long()}, "has 3 rows, but the batch has 2"),
    ({"logits_to_keep": t(3)}, "is not an index [n] or [batch, n]"),
    ({"logits_to_keep": torch.ones(2)}, "float32"),
    ({"logits_to_keep": torch.zeros(2, 1, 1).long()}, "(2, 1, 1)"),
    ({"logits_at": t([0, 26]), **LABELED}, "logits_at has an index outside [0, 26): [26]"),
    ({"logits_at": t([-1]), **LABELED}, "[-1]"),
    ({"logits_at": torch.ones(13, dtype=torch.bool)}, "(13,) is not [batch, tokens]"),
    ({"logits_at": torch.zeros(1, 2, dtype=torch.int64)}, "(1, 2) is not an index [n]"),
    ({"logits_bytes": 0, **LABELED}, "logits_bytes=0 must be at least 1"),
    ({"criteria": (LogProbs(),)}, "LogProbs without labels: give labels, or targets="),
    ({"criteria": (CrossEntropy(),)}, "CrossEntropy without labels"),
    ({"criteria": (LogProbs(targets=torch.zeros(2, 4).long()),)}, "targets (2, 4) of LogProbs"),
    ({"criteria": (CrossEntropy(z_loss=-5.0),), **LABELED}, "z_loss=-5.0 is not a finite number"),
    ({"criteria": (CrossEntropy(coefficient=COEFFICIENT),), **LABELED}, "requires a gradient"),
    ({"label_smoothing": 1.5, **LABELED}, "=1.5 is not in [0, 1]"),
    ({"label_smoothing": 0.1}, "label_smoothing without a cross-entropy"),
    (
        {"label_smoothing": 0.1, "criteria": (CrossEntropy(label_smoothing=0.5),), **LABELED},
        "label_smoothing is given twice",
    ),
    ({"z_loss": -1.0, **LABELED}, "z_loss=-1.0"),
    ({"z_loss": 0.1, "criteria": (LogProbs(),), **LABELED}, "z_loss without a cross-entropy"),
    ({"class_weights": torch.ones(5), **LABELED}, "class_weights (5,) is not [V] = "),
    ({"labels": LABELS[:, :-1]}, "labels (2, 12) is not [batch, tokens] = [2, 13]"),
    ({"labels": LABELS.flatten()}, "labels (26,) is not [batch, tokens]"),
    ({"shift_labels": LABELS[:1]}, "shift_labels (1, 13) is not [batch, tokens]"),
    ({"loss_weights": torch.ones(2, 12), **LABELED}, "loss_weights (2, 12) is not"),
    ({"loss_weights": torch.ones(2, 13)}, "loss_weights without labels"),
    ({"labels": changed(1, 5, 97)}, "label 97 at [1, 4] is neither -100 nor in [0, 97)"),
    ({"labels": changed(0, 12, -1), "return_logits": True}, "label -1 at "),
    ({"shift_labels": changed(0, 0, -101)}, "label -101 at "),
    ({"metrics": ("entropy", "nll")}, "metrics=('nll',) without labels"),
    ({"metrics": "accuracy"}, "metrics=('accuracy',) without labels"),
    ({"metrics": ("nll", "acc"), **LABELED}, "unknown metrics ['acc']; there are accuracy, "),
    ({"metrics": "acc", "return_logits": True, **LABELED}, "unknown metrics ['acc']"),
    ({"loss_reduction": "mean", **LABELED}, "loss_reduction='mean' is not one of"),
    ({"num_items_in_batch": t([3, 4]), **LABELED}, "num_items_in_batch (2,) is not one number"),
    *(
        ({"num_items_in_batch": 3, "loss_reduction": name, **LABELED}, f"loss_reduction='{name}'")
        for name in ("sum", "none")
    ),
    *(
        ({"num_items_in_batch": kind(wrong), **LABELED}, f"num_items_in_batch={wrong}")
        for wrong in (-3.0, -0.5, math.nan, math.inf)
        for kind in (float, t)
    ),
    *(
        ({"num_items_in_batch": zero, **LABELED}, "num_items_in_batch=0")
        for zero in (0, 0.0, t(0), t(0.0))
    ),
    ({"prefixes": t([[0, 0], [0, 4]])}, "prefixes (2, 2) on cpu must be [None, 2]"),
    ({"cu_seq_lens": THREE, "prefixes": t([[0, 4]])}, "prefixes (1, 2) on cpu must be [3, 2]"),
    *(
        ({"cu_seq_lens": THREE, "prefixes": t([[0, 0], [0, 0], last])}, f"{last}]")
        for last in ([0, 4], [14, 23], [16, 14])  # of another row, itself, no range
    ),
    (
        {"cu_seq_lens": THREE, "prefixes": t([[0, 0], [0, 0], [13, 16]])},
        "prefixes without position_ids",
    ),
    ({"attention_mask": torch.ones(2, 12)}, "attention_mask (2, 12) is not "),
    ({"attention_mask": torch.ones(2, 1, 13, 13)}, "attention_mask (2, 1, 13, 13) is not"),
    *(
        ({"attention_mask": mask_of(wrong)}, "attention_mask is torch.float32 and has other values")
        for wrong in (-math.inf, math.nan, 0.5)
    ),
    ({"position_ids": torch.arange(12)}, "position_ids (1, 12) is not [1 or 2, 13]"),
    ({"position_ids": IDS[:, :3]}, "position_ids (2, 3) is not [1 or 2, 13]"),
    (
        {"cu_seq_lens_q": THREE, "cu_seq_lens_k": t([0, 12, 26])},
        "cu_seq_lens_q and cu_seq_lens_k differ: [0, 13, 20, 26] and [0, 12, 26]",
    ),
    ({"cu_seq_lens": THREE, "cu_seq_lens_k": t([0, 26])}, "cu_seq_lens and cu_seq_lens_k differ"),
    (
        {"cu_seq_lens": THREE, "position_ids": t([*range(9), *range(4)])},
        "token 9 of row 0 has position 0 after 8; give one",
    ),
    (
        {"cu_seq_lens": THREE, "position_ids": RESTARTS},
        "token 8 of row 1 has position 0 after 7; give one",
    ),
    (
        {"cu_seq_lens": THREE, "attention_mask": HALF_PADDED},
        "padding inside a sequence of cu_seq_lens: row 0 changes at token 9",
    ),
    *(
        ({name: t(cu)}, message)
        for name in ("cu_seq_lens", "cu_seq_lens_q")
        for cu, message in (
            ([0, 14, 13, 26], "cu_seq_lens is not sorted: [0, 14, 13, 26]"),
            ([0, 13, 25], "from 0 to 26, the number of tokens: [0, 13, 25]"),
            ([0, 13, 27], "from 0 to 26, the number of tokens: [0, 13, 27]"),
            ([1, 13, 26], "from 0 to 26, the number of tokens: [1, 13, 26]"),
            ([-1, 13, 26], "from 0 to 26"),
            ([26], "integers [sequences + 1]"),
            ([0.0, 26.0], "integers [sequences + 1], not torch.float32"),
            ([[0, 26]], "(1, 2)"),
            ([0, 14, 26], "spans two rows of 13: [0, 14, 26]"),
        )
    ),
    *(
        ({"cu_seq_lens": THREE, name: 8}, "max_length_q=8 is less than the longest sequence")
        for name in ("max_length_q", "max_length_k")
    ),
    ({"inputs_embeds": HIDDEN}, "input_ids or inputs_embeds, one of them"),
    ({"input_ids": None, **LABELED}, "input_ids or inputs_embeds, one of them"),
    ({"input_ids": None, "inputs_embeds": HIDDEN[..., 1:]}, "inputs_embeds (2, 13, 55) is not ["),
    ({"input_ids": IDS[0]}, "input_ids (13,) is not [batch, tokens]"),
    *(
        ({"input_ids": IDS.index_fill(1, t(4), wrong)}, f"token {wrong}, outside of [0, 97)")
        for wrong in (97, -1)
    ),
    *(
        (dict(zip(("input_ids", "inputs_embeds"), tokens, strict=True)), "has no tokens")
        for rows, length in ((2, 0), (0, 13), (0, 0))
        for tokens in ((IDS[:rows, :length], None), (None, HIDDEN[:rows, :length]))
    ),
]
# The same with a TypeError
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"lables": 1}, "forward() got an unexpected keyword argument 'lables'; did you mean 'la"),
    ({"output_attentions": True}, "unexpected keyword argument 'output_attentions'"),
    ({"output_hidden_states": True}, "here: 'return_hidden'"),
    ({"cache": None}, "unexpected keyword argument 'cache'; here: 'past_key_values'"),
    ({"attention_mask": [[1]]}, "attention_mask must be a tensor, not list"),
    ({"input_ids": [[1]]}, "input_ids must be a tensor, not list"),
    ({"logits_to_keep": True}, "not True"),
    ({"logits_to_keep": 2.0}, "not 2.0"),
    ({"logits_to_keep": [1, 2]}, "not [1, 2]"),
    ({"logits_at": torch.zeros(3)}, "integers or truth values, not torch.float32"),
    ({"logits_at": 3, **LABELED}, "integers or truth values, not int"),
    ({"criteria": ("kl",)}, "criteria has 'kl'"),
    ({"criteria": CrossEntropy(), **LABELED}, "give a tuple of criteria"),
    ({"class_weights": [1.0], **LABELED}, "class_weights must be a tensor"),
    *(
        ({"num_items_in_batch": wrong, **LABELED}, "num_items_in_batch must be a number or a ten")
        for wrong in ("7", True, [7])
    ),
    *(
        ({"loss_weights": wrong, **LABELED}, "loss_weights must be a tensor of real numbers")
        for wrong in ([[1.0]], torch.zeros(2, 13, dtype=torch.complex64))
    ),
    *(
        ({name: LABELS.to(dtype)}, f"{name} is {dtype}: labels are integers")
        for name in ("labels", "shift_labels")
        for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.complex64)
    ),
    ({"labels": LABELS.tolist()}, "labels is a list, not a tensor of integers"),
    ({"shift_labels": LABELS.numpy()}, "shift_labels is a ndarray, not a tensor of integers"),
    *(
        ({"position_ids": torch.arange(13).to(dtype)[None]}, "positions are integers")
        for dtype in (torch.float32, torch.bool)
    ),
    *(
        ({"criteria": (KL(teacher_hidden=HIDDEN, teacher=teacher),)}, "give the teacher's lm_head")
        for teacher in (tiny_llama(), torch.zeros(97, 56))
    ),
]
CALLS = [(ValueError, *row) for row in VALUES] + [(TypeError, *row) for row in TYPES]


@pytest.mark.parametrize(
    ("error", "arguments", "message"), CALLS, ids=[message[:40] for *_, message in CALLS]
)
def test_error_names_the_value(
    model: CausalLM, error: type[Exception], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        model(**{"input_ids": IDS, **arguments})


def test_resolved_arguments_come_alone(model: CausalLM) -> None:
    batch = Batch.of(model, IDS)
    targets = Targets.of(batch, labels=LABELS)
    both: dict[str, Any] = {"batch": batch, "targets": targets}
    for call, error, message in (
        (lambda: model(IDS, batch=batch, attention_mask=HALF_PADDED), TypeError, "batch= with att"),
        (lambda: model(**both, labels=LABELS), TypeError, "targets= with labels: they are part of"),
        (lambda: model(IDS, targets=targets), TypeError, "targets= without batch="),
        (lambda: Targets.of(batch).items, ValueError, "items need labels or shift_labels"),
        (lambda: tiny_llama()(batch=batch), ValueError, "for another model"),
        (lambda: Batch.of(model, IDS, **LABELED), TypeError, r"Batch.of\(\) got an unexpected"),
        (lambda: Targets.of(batch, metrics=()), TypeError, r"Targets.of\(\) got an unexpected"),
        (lambda: model.num_items(LABELS, lables=1), TypeError, "unexpected keyword argument"),
        (lambda: model.num_items(input_ids=IDS), ValueError, "items need labels or shift_labels"),
        (lambda: model.num_items(LABELS, cu_seq_lens=t([3])), ValueError, "integers"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.traced
def test_prefixes_inside_torch_compile() -> None:
    compiled = torch.compile(check_prefixes, backend="eager")
    places = t([[0, 0], [0, 0], [13, 16]])
    with pytest.raises(ValueError, match=r"make the batch with Batch\.of outside of it"):
        compiled(places, THREE, 13)
    assert check_prefixes(places, THREE, 13) is not None


def test_a_wrong_number_of_items_in_one_graph(model: CausalLM) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for wrong in (t(-3.0), t(math.nan)):
        with pytest.raises(RuntimeError, match="num_items_in_batch is no number of items"):
            compiled(IDS, labels=LABELS, num_items_in_batch=wrong)
    torch._dynamo.reset()
