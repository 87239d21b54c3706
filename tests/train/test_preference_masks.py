"""DPO on answers of which parts are not learned: the objective, and log-probabilities alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tests.small import write_model
from tigon.data import MicroBatch
from tigon.train import load, reference
from tigon.train.tasks import find_task

LENGTHS = (11, 8, 14, 9)  # of two pairs, chosen and rejected
PROMPTS = (4, 4, 3, 3)
# Of an answer's tokens, by their number in the sequence: a turn of the user in between, the first
# token, and the last
LEFT_OUT = {0: (6, 7), 1: (4,), 2: (7, 8, 9), 3: (8,)}
BETA = 0.3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("models")
    paths = (write_model(root / name, num_hidden_layers=n) for name, n in (("a", 2), ("b", 1)))
    return [tigon.from_pretrained(path).train() for path in paths]


def sequences(vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and whether each is learned."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for i, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        said = torch.arange(length) >= prompt
        said[list(LEFT_OUT[i])] = False
        found.append((torch.randint(5, vocab, (length,), generator=draw), said))
    return found


def defined(model: Any, other: Any, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """From logits without labels, sequence by sequence, in fp64."""

    def ratio(ids: Tensor, said: Tensor) -> Tensor:
        own, base = (m(ids[None]).logits[0, :-1].double().log_softmax(-1) for m in (model, other))
        difference = (own - base.detach()).gather(1, ids[1:, None])[:, 0]
        return difference[said[1:]].sum()

    chosen, rejected = (torch.stack([ratio(*row) for row in rows[i::2]]) for i in range(2))
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def batch(rows: list[tuple[Tensor, Tensor]], *, packed: bool) -> MicroBatch:
    """The sequences one after the other in one line, or each in a line of its own, padded."""
    lines = [rows] if packed else [[row] for row in rows]
    width = max(sum(len(ids) for ids, _ in line) for line in lines) + 2
    shape = len(lines), width
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    said, real = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    spans, bounds = [], [0]
    for number, line in enumerate(lines):
        at = 0
        for own, mask in line:
            stop = at + len(own)
            ids[number, at:stop], said[number, at:stop], real[number, at:stop] = own, mask, True
            positions[number, at:stop] = torch.arange(len(own))
            spans.append([number * width + at, number * width + stop])
            bounds.append(number * width + stop)
            at = stop
        positions[number, at:] = torch.arange(width - at)
        bounds.append((number + 1) * width)
    cu = torch.tensor(bounds, dtype=torch.int32)
    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=real,
        cu_seq_lens=cu,
        longest=int(cu.diff().max()),
        spans=torch.tensor(spans),
        parts=torch.zeros(len(spans), dtype=torch.long),
        per_token={"supervised": said},
        per_example={},
        sources=(),
    )


@pytest.mark.parametrize("packed", [True, False])
def test_parts_of_answers_that_are_not_learned(models: Any, world: Any, packed: bool) -> None:
    model, other = models
    rows = sequences(model.config.vocab_size)
    expected = defined(model, other, rows)
    learned = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected, learned)
    config = load(None, ["run_dir=a", "model=m", "data=d", "task=dpo", f"beta={BETA}"])
    objective: Any = find_task("dpo")(config, world)
    rows_of = batch(rows, packed=packed)
    known = objective._logprobs_by(other, rows_of)
    rows_of.per_token[reference.COLUMN] = known  # type: ignore[index]
    inputs = objective.resolve(model, rows_of, training=True)
    loss = objective.loss(model, inputs, objective.sums(model, inputs)).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(loss, learned), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # What is masked counts: with all of the answers it is another loss
    whole = [(ids, torch.arange(len(ids)) >= n) for (ids, _), n in zip(rows, PROMPTS, strict=True)]
    assert (defined(model, other, whole) - expected).abs() > 1e-4
