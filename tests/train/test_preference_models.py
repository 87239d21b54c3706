"""Preference objectives with other models and ways to divide them, and the memory of logits.

# T tokens, V vocab
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tests.support.small import EXPERTS, LLAMA, write_model
from tests.train import preferences
from tests.train.ranks import train_on
from tigon.data import MicroBatch
from tigon.train import load, main, prepare, reference, start
from tigon.train.tasks import TASKS
from tigon.train.trainer import forward_backward, open_task

pytestmark = pytest.mark.usefixtures("empty_cache")

V = LLAMA["vocab_size"]


@pytest.fixture
def data(tmp_path) -> dict[str, Any]:
    pairs = preferences.write(tmp_path / "pairs.jsonl", preferences.pairs(21, 5))
    kto = preferences.write(tmp_path / "kto.jsonl", preferences.labeled(21, 5))
    grpo = preferences.write(tmp_path / "grpo.jsonl", preferences.rewarded(9))
    return {"kto": kto, "grpo": grpo} | dict.fromkeys(("dpo", "orpo", "reward"), pairs)


@pytest.mark.slow(first=1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["dpo", "kto", "reward", "grpo"])
def test_experts_are_balanced_and_ranks_agree(workspace, data, tmp_path, task):
    experts = {**EXPERTS, "output_router_logits": True}
    model = write_model(tmp_path / "experts", **experts, router_aux_loss_coef=2.0)
    same = {"task": task, "data": data[task], "steps": 2, "model": model, "max_grad_norm": 0}
    main(workspace.settings(f"experts-{task}", **same))
    train_on(2, workspace.settings(f"experts-{task}-two", **same))
    off = write_model(tmp_path / "off", **experts, router_aux_loss_coef=0.0)
    main(workspace.settings(f"experts-{task}-off", **{**same, "model": off, "steps": 1}))
    curve, two, without = (
        workspace.metrics(f"experts-{task}{name}", "grad_norm") for name in ("", "-two", "-off")
    )
    assert two == pytest.approx(curve, rel=1e-3)
    balanced = abs(curve[0] - without[0]) > 1e-3 * curve[0]
    assert balanced == (task != "reward")  # as in transformers, whose scores have no such loss


def test_base_path_is_the_same_reference(workspace, data):
    same = {"task": "dpo", "data": data["dpo"], "steps": 2, "lora.rank": 4, "lr": 1e-2}
    main(workspace.settings("adapter", **same))
    main(workspace.settings("apart", **same, reference=workspace.model))
    assert workspace.metrics("adapter", "loss")[0] == pytest.approx(0.6931471806, abs=1e-6)
    for key in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
        expected = pytest.approx(workspace.metrics("adapter", key), rel=1e-4, abs=1e-6)
        assert workspace.metrics("apart", key) == expected


class Largest(TorchDispatchMode):
    """The most rows of logits that any operation returns."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] == V:
                self.rows = max(self.rows, x.numel() // V)
        return out


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("task", ["dpo", "orpo", "kto", "grpo", "distill"])
def test_no_logits_of_all_tokens_exist(workspace, data, tmp_path, task):
    own: dict[str, Any] = {"task": task, "data": data.get(task, workspace.data)}
    if task == "distill":
        own["teacher"] = write_model(tmp_path / "teacher", num_hidden_layers=1)
    own |= {"logits_bytes": 16 * V * 4, "batch_size": 4, "steps": 1}
    with start("cpu") as world:
        run = prepare(load(None, workspace.settings(f"memory-{task}", **own)), world)
        open_task(run)
        with run.prefetcher, Largest() as largest:
            forward_backward(run, 0)
    assert 0 < largest.rows <= 64  # the weight itself, [V, C], has C columns


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
    objective: Any = TASKS["dpo"](config, world)
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
