"""Distillation against the definition in fp64: live teachers, stored distributions, ranks.

# T tokens, V vocab
"""

import json
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tigon
from tests.support.small import write_model
from tests.train.ranks import train_on
from tigon.data import TopEncoder
from tigon.train import main

TOPS = 3, 5, 2, 4  # tokens whose log-probabilities were stored, in the rows in turn


@pytest.fixture(scope="module")
def teacher(workspace) -> Any:
    """Another width and depth, and other weights."""
    return write_model(
        workspace.root / "teacher", num_hidden_layers=1, hidden_size=48, initializer_range=0.2
    )


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Of log-probabilities [T, V], fp64: GKD's definition (arXiv 2306.13649)."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if beta in (0, 1):
        return kl(teacher, student) if beta == 0 else kl(student, teacher)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


class Definition:
    """Of the untrained model on all rows, one by one."""

    def __init__(self, workspace: Any, teacher: Any):
        tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)
        models = [tigon.from_pretrained(path) for path in (workspace.model, teacher)]
        self.rows = []
        for line in workspace.held_out.read_text().splitlines():
            ids, mask = tokenizer.encode_chat(json.loads(line)["messages"])
            given = torch.tensor(ids)
            with torch.no_grad():
                logits = [model(given[None]).logits[0, :-1].double() for model in models]
            self.rows.append((given, torch.tensor(mask), logits))

    def loss(
        self, beta: float, t: float, weight: float, tops: Sequence[int] = ()
    ) -> tuple[float, float]:
        """And the mean divergence."""
        total, divergences, count = 0.0, 0.0, 0
        for i, (ids, mask, (own, other)) in enumerate(self.rows):
            student, teacher = ((x / t).log_softmax(-1) for x in (own, other))
            if tops:
                kept = teacher.topk(tops[i % len(tops)]).indices
                student, teacher = (rest_as_one(x, kept) for x in (student, teacher))
            each = divergence(student, teacher, beta)[mask[1:]]
            nll = -own.log_softmax(-1).gather(1, ids[1:, None])[mask[1:], 0]
            total += ((1 - weight) * t**2 * each + weight * nll).sum().item()
            divergences += each.sum().item()
            count += len(each)
        return total / count, divergences / count


def rest_as_one(logprobs: Tensor, kept: Tensor) -> Tensor:
    some = logprobs.gather(1, kept)
    return torch.cat([some, torch.log1p(-some.exp().sum(1, keepdim=True))], dim=1)


ALL = {"task": "distill", "batch_size": 64, "steps": 1}
settings = pytest.mark.parametrize(  # each two values of different settings come together
    ("beta", "t", "weight"),
    [
        (0.0, 1.0, 0.3),
        (0.0, 2.0, 0.0),
        (0.4, 1.0, 0.0),
        (0.4, 2.0, 0.3),
        (1.0, 1.0, 0.3),
        (1.0, 2.0, 0.0),
    ],
)


@pytest.fixture(scope="module")
def definition(workspace, teacher) -> Definition:
    return Definition(workspace, teacher)


@pytest.mark.slow(first=2)
@settings
def test_a_live_teacher(workspace, teacher, definition, beta, t, weight):
    name = f"live-{beta}-{t}-{weight}"
    own = {"teacher": teacher, "beta": beta, "temperature": t, "cross_entropy_weight": weight}
    held = {"data": workspace.held_out, "eval_data": workspace.held_out, "eval_every": 1}
    main(workspace.settings(name, **ALL, **own, **held, metrics="[nll]", lr=0))
    loss, kl = definition.loss(beta, t, weight)
    for prefix in ("", "eval_"):
        assert workspace.metrics(name, f"{prefix}loss")[0] == pytest.approx(loss, rel=1e-5)
        assert workspace.metrics(name, f"{prefix}kl")[0] == pytest.approx(kl, rel=1e-5)


@pytest.mark.slow(first=2)
@settings
def test_stored_distributions(workspace, definition, beta, t, weight):
    path = workspace.root / f"stored-{t}.jsonl"
    lines = []
    for i, (ids, mask, (_, other)) in enumerate(definition.rows):
        top = (other / t).log_softmax(-1).topk(TOPS[i % len(TOPS)])
        row = {"input_ids": ids.tolist(), "completion_mask": mask.int().tolist()}
        row["teacher_tokens"] = [[], *top.indices.tolist()]
        row["teacher_logprobs"] = [[], *top.values.tolist()]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    name = f"stored-{beta}-{t}-{weight}"
    own = {"data": path, "beta": beta, "temperature": t, "cross_entropy_weight": weight}
    main(workspace.settings(name, **ALL, **own))
    loss, kl = definition.loss(beta, t, weight, TOPS)
    assert workspace.metrics(name, "loss")[0] == pytest.approx(loss, rel=1e-5)
    assert workspace.metrics(name, "kl")[0] == pytest.approx(kl, rel=1e-5)


def test_teachers_of_another_vocabulary_are_refused(workspace, tmp_path):
    """Before the data are read."""
    smaller = write_model(tmp_path / "smaller", vocab_size=320)  # the workspace's has 321
    nowhere = ALL | {"data": "hf://nowhere"}
    said = "has a vocabulary of 320 tokens, and the model one of 321: .* cut the model to 320 rows"
    with pytest.raises(SystemExit, match=said):
        main(workspace.settings("sizes", **nowhere, teacher=smaller))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_teacher_with_nan_is_named(workspace, tmp_path, value):
    """Not the rows of the first step."""
    broken = write_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, broken / "model.safetensors")
    said = r"broken has values that are NaN or infinite in model\.layers\.1\.mlp\.down_proj"
    with pytest.raises(SystemExit, match=said):
        main(workspace.settings("broken", **ALL, teacher=broken))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_teacher_rows_without_a_token_are_left_out(workspace, tmp_path, tied):
    """As if transformers had cut them off, on one rank and on two that divide the vocabulary."""
    transformers = pytest.importorskip("transformers")
    changes = {"vocab_size": 400, "tie_word_embeddings": tied, "initializer_range": 0.2}
    larger = write_model(tmp_path / "larger", **changes)
    cut = transformers.AutoModelForCausalLM.from_pretrained(larger)
    cut.resize_token_embeddings(321)
    cut.save_pretrained(tmp_path / "cut")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(larger / name, tmp_path / "cut")
    same, names = ALL | {"steps": 2, "beta": 0.4}, [f"{i}-{tied}" for i in range(3)]
    main(workspace.settings(names[0], **same, teacher=tmp_path / "cut"))
    main(workspace.settings(names[1], **same, teacher=larger))
    train_on(2, workspace.settings(names[2], **same, teacher=larger, **{"parallel.tensor": 2}))
    for key in ("loss", "kl", "grad_norm"):
        expected, alone, divided = (workspace.metrics(name, key) for name in names)
        assert len(expected) == 2 and alone == expected and min(expected) > 0.01
        assert divided == pytest.approx(expected, rel=1e-4)


ROW = {"input_ids": [5, 6], "teacher_tokens": [[], [1]], "teacher_logprobs": [[], [-0.1]]}


class Padded(TopEncoder):
    """Every row's lists padded to 4 tokens."""

    def row(self, row: Any, form: Any) -> Any:
        (example,) = super().row(row, form)
        values = dict(example.per_token)
        for name, nothing in (("teacher_tokens", -1), ("teacher_logprobs", 0.0)):
            own = values[name]
            values[name] = np.full((len(own), 4), nothing)
            values[name][:, : own.shape[1]] = own
        return [example._replace(per_token=values)]


def test_lists_of_different_sizes_equal_padded_lists(workspace, tmp_path, monkeypatch):
    """Within a file and from one to the next, in losses and gradients."""
    draw, paths = torch.Generator().manual_seed(0), []
    for name, sizes in (("one", (3, 2, 4)), ("two", (2, 3))):
        rows = []
        for size in sizes:
            ids, logits = (
                torch.randint(321, (8,), generator=draw),
                torch.randn(8, 321, generator=draw),
            )
            top = (4 * logits).log_softmax(-1).topk(size)
            values = {"teacher_tokens": top.indices, "teacher_logprobs": top.values}
            rows.append({"input_ids": ids.tolist()} | {k: v.tolist() for k, v in values.items()})
            rows[-1]["teacher_tokens"][3].pop()  # one of a row may be shorter, too
            rows[-1]["teacher_logprobs"][3].pop()
        paths.append(path := tmp_path / f"{name}.jsonl")
        path.write_text("\n".join(map(json.dumps, rows)))
    own = {"data": f"[{paths[0]}, {paths[1]}]", "steps": 2, "batch_size": 5, "micro_batch_size": 5}
    main(workspace.settings("sizes", **ALL | own))
    monkeypatch.setattr("tigon.train.tasks.distill.TopEncoder", Padded)
    main(workspace.settings("by-hand", **ALL | own))
    for key in ("loss", "kl", "grad_norm"):
        found, expected = (workspace.metrics(name, key) for name in ("sizes", "by-hand"))
        assert len(found) == 2 and found == expected and found[0] > 0


def test_a_teacher_s_token_beyond_the_vocabulary(workspace, tmp_path):
    """It ends the run before its first step."""
    path = tmp_path / "bad.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in (ROW, ROW | {"teacher_tokens": [[], [321]]}))
    )
    with pytest.raises(SystemExit, match=r"token 321, or a row has it, but .* vocabulary has 321"):
        main(workspace.settings("bad", **ALL, data=path))
