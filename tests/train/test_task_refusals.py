"""Settings, rows and models that a task cannot use are errors, which name them."""

import json
import re
from typing import Any

import pytest

from tests.support.small import write_model
from tests.train import preferences
from tigon.train import load, main, prepare, start

NEEDED = ["run_dir=a", "model=m", "data=a.jsonl"]
UNUSED = "has no use for it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("task=sft beta=0.2", f"beta=0.2: task=sft {UNUSED}; leave it out, or give beta=null"),
        ("task=sft max_length=9", f"task=sft {UNUSED}: seq_len is where rows are cut"),
        ("task=orpo loss_type=hinge", f"loss_type='hinge': task=orpo {UNUSED}"),
        ("task=dpo loss_type=dapo", "loss_type=dapo of task=dpo is not one of sigmoid, hinge"),
        ("task=dpo beta=0", "beta=0 of task=dpo must be above 0"),
        ("task=dpo loss_type=ipo label_smoothing=0.1", "loss_type=ipo of task=dpo has no use"),
        ("task=dpo loss_type=robust label_smoothing=0.5", "label_smoothing=0.5 must be below 0.5"),
        ("task=cpo reference=x", f"reference='x': task=cpo {UNUSED}"),
        ("task=kto label_smoothing=0.1", f"label_smoothing=0.1: task=kto {UNUSED}"),
        ("task=kto desirable_weight=0 undesirable_weight=0", "leave kto nothing to learn"),
        ("task=dpo train_on=all", f"train_on='all': task=dpo {UNUSED}"),
        ("task=dpo loss_reduction=sequence", "loss_reduction='sequence': task=dpo has no use"),
        ("task=ipo beta=.inf", r"beta=inf must be at most 3.4e\+38"),
        ("task=simpo simpo_gamma=1e39", r"simpo_gamma=1e\+39 must be at most"),
        ("task=dpo metrics=[nll]", f"task=dpo {UNUSED}"),
        ("task=dpo eval_z_loss=0.1", f"eval_z_loss=0.1: task=dpo {UNUSED}"),
        ("task=reward router_aux_loss_coef=0.01", "router_aux_loss_coef=.* task=reward has no use"),
        ("task=distill beta=1.5", r"beta=1.5 of task=distill is not in \[0, 1\]"),
        ("task=distill cross_entropy_weight=1", "cross_entropy_weight=1 must be below 1"),
        ("task=distill temperature=1e200", r"temperature=1e\+200 must be at most"),
        ("task=distill temperature=0", "temperature=0 must be above 0"),
        ("task=grpo loss_type=hinge", "loss_type=hinge of task=grpo is not one of dapo, grpo"),
        ("label_smoothing=1", "label_smoothing=1 must be below 1"),
        ("eval_label_smoothing=1.5", "eval_label_smoothing=1.5 must be below 1"),
        ("z_loss=.inf", "z_loss=inf must be finite"),
        ("z_loss=.nan", "z_loss=nan must be at least 0"),
        ("logits_bytes=0", "logits_bytes=0 must be at least 1"),
        ("logits_to_keep=1 packing=false", "logits_to_keep=1 leaves nothing to learn"),
        ("metrics=[nll,entrpy]", "metrics=entrpy is not one of accuracy, entropy, max_logit"),
        ("eval_metrics=predicted_tokens", "predicted_tokens has no mean"),
        ("loss_reduction=sum", "loss_reduction='sum' is not one of token, sequence"),
        ("hooks=tests.nowhere:f", r"hooks=tests\.nowhere:f"),
    ],
)
def test_settings_are_refused_before_the_model_is_read(given, message):
    with start("cpu") as world, pytest.raises(ValueError, match=message):
        prepare(load(None, [*NEEDED, *given.split()]), world)


PAIR = preferences.pairs(1)[0]
STORED = {"input_ids": [5, 6], "teacher_tokens": [[], [1]], "teacher_logprobs": [[], [-0.1]]}
TEXT = {"prompt": "the model", "completions": [" reads", " says"], "rewards": [1, 0]}
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("dpo", PAIR, {"rejected": PAIR["chosen"]}, "'chosen' and 'rejected' are equal"),
    *(
        ("distill", STORED, changes, message)
        for changes, message in (
            ({"teacher_tokens": [[]]}, "'teacher_tokens' must have a list for each of the 2"),
            ({"teacher_tokens": [[], []], "teacher_logprobs": [[], []]}, "token 1 is empty"),
            ({"teacher_logprobs": [[], [-0.1, -2]]}, "token 1 has 1 tokens and 2 log-prob"),
            ({"teacher_logprobs": [[], [0.1]]}, "token 1 is none"),
            (
                {"teacher_tokens": [[], [1, 1]], "teacher_logprobs": [[], [-1, -2]]},
                "duplicate or negative id",
            ),
            ({"input_ids": "text"}, "'input_ids' must be a list of whole numbers"),
            ({"completion_mask": [1, 0]}, "has no token to learn"),
            ({"completion_mask": [1]}, "'completion_mask' has 1 values for 2 tokens"),
        )
    ),
    *(
        ("grpo", TEXT, changes, message)
        for changes, message in (
            ({"rewards": [1]}, "'rewards' must be a list of numbers, 2 of them"),
            ({"rewards": [1, "x"]}, "'rewards' has 'x' in it, which is no finite number"),
            ({"completions": [" reads"], "rewards": [1]}, "'rewards' of one answer teach nothing"),
            ({"advantages": [1, 0]}, "needs either 'rewards' or 'advantages', and has both"),
            ({"rewards": None}, "needs either 'rewards' or 'advantages', and has neither"),
            ({"completions": []}, "'completions' must be a list of answers"),
            ({"completions": [" reads", ""]}, "'completions' has no answer: it is empty"),
            ({"completions": [" reads", 3]}, r"'completions\[1\]' must be a text"),
            ({"old_logprobs": [[-1.0]]}, "'old_logprobs' must have a list for each of the 2"),
            ({"old_logprobs": [[-1.0], [-1.0]]}, "'old_logprobs' has 1 numbers for the"),
            ({"prompt": [3, 4]}, "'prompt' is a list of tokens: each answer must be one"),
        )
    ),
]


@pytest.mark.slow(first=8)
@pytest.mark.parametrize(("task", "row", "changes", "message"), ROWS)
def test_bad_rows_are_refused_with_their_line(workspace, tmp_path, task, row, changes, message):
    path = preferences.write(tmp_path / "bad.jsonl", [row, row | changes])
    with pytest.raises(SystemExit, match=f"bad.jsonl:2: .*{message}"):
        main(workspace.settings("bad", task=task, data=path, steps=1))


@pytest.mark.parametrize(("task", "name"), [("distill", "teacher"), ("dpo", "reference")])
def test_unfit_models_are_refused_before_data(workspace, tmp_path, task, name):
    """With another tokenizer, or a context in which they have never seen such places."""
    other = write_model(tmp_path / "other", max_position_embeddings=64)
    nowhere = {"task": task, "data": "hf://nowhere", name: other}
    said = "seq_len=65 is more than .*other's context of 64 tokens .*: set seq_len=64 or less"
    with pytest.raises(SystemExit, match=said):
        main(workspace.settings("context", **nowhere, seq_len=65))
    path = other / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"].append(values["added_tokens"][0] | {"id": 300, "content": "<|x|>"})
    path.write_text(json.dumps(values))
    with pytest.raises(SystemExit, match=re.escape("vocabulary: token '<|x|>' is 300 there")):
        main(workspace.settings("tokens", **nowhere, seq_len=64))
