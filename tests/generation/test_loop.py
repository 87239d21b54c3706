"""The host may get tokens late: that changes only how many steps are computed for nothing."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.generation.common import Counted, Letters, blurred, padded, some_ends
from tigon.distributed.collectives import check_same_on_all_ranks
from tigon.generation.loop import ABSENT, LAG, Continuations, HostCopies, run_steps
from tigon.generation.sampling import Draws


@pytest.fixture(params=["never before it must", "at random"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is there when the host looks, or by chance."""
    chance, share = random.Random(4), 0.3 if request.param == "at random" else 0.0
    monkeypatch.setattr(HostCopies, "finished", lambda *_: chance.random() < share)
    yield


def free_and_ends(model: tigon.CausalLM, common: dict[str, Any]) -> tuple[Tensor, list[int]]:
    free = model.generate(**common, eos_token_id=[], max_new_tokens=40)
    return free, some_ends(free, 11, (3, 17, 12, 6, 5))


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("way", ["greedy", "sampled", "assisted"])
def test_a_late_host_changes_nothing(model: tigon.Llama, late: None, way: str) -> None:
    ids, mask = padded((3, 11, 1, 7, 11), 97)
    common: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if way == "sampled":
        common |= {"do_sample": True, "seed": 9, "repetition_penalty": 1.2}
    free, ends = free_and_ends(model, common)
    common |= {"pad_token_id": 0, "max_new_tokens": 40}
    strings = [Letters().decode(free[row, 15:18].tolist()) for row in range(5)]
    given: dict[str, Any]
    for given in (
        {"eos_token_id": ends},
        {"eos_token_id": []},
        {"eos_token_id": [], "stop_strings": strings, "tokenizer": Letters()},
    ):
        expected = model.generate(**common, **given)
        seen: list[Tensor] = []
        assistant = blurred(model, 0.1) if way == "assisted" else None
        tokens = model.generate(
            **common,
            **given,
            streamer=seen.append,
            cache_implementation="static",
            assistant_model=assistant,
        )
        assert tokens.tolist() == expected.tolist()
        assert torch.stack(seen, 1).tolist() == tokens[:, 11:].tolist()
        assert all(column.device.type == "cpu" for column in seen)


def test_how_many_steps_are_computed_for_nothing(
    model: tigon.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = padded((11,), 97)
    free = model.generate(ids, eos_token_id=[], max_new_tokens=40)
    end = int(free[0, 11 + 5])
    needed = free[0, 11:].tolist().index(end) + 1
    for lag in (0, LAG):
        if lag:
            monkeypatch.setattr(HostCopies, "finished", lambda *_: False)
        counted = Counted(model)
        tokens = model.generate(
            ids, eos_token_id=end, max_new_tokens=40, cache_implementation="static"
        )
        assert tokens.tolist() == free[:, : 11 + needed].tolist()
        assert len(counted.shapes) == needed + lag
    counted = Counted(model)  # a dynamic cache never runs ahead
    model.generate(ids, eos_token_id=end, max_new_tokens=40)
    assert len(counted.shapes) == needed


class Script:
    """Steps with given tokens, from which rows can be removed."""

    def __init__(self, steps: list[list[list[int]]]):
        self.steps, self.rows = steps, list(range(len(steps[0])))
        self.sizes: list[int] = []  # of the batch at each step

    def __call__(self, remaining: int) -> Tensor:
        step = self.steps[len(self.sizes)]
        self.sizes.append(len(self.rows))
        return torch.tensor([step[row] for row in self.rows])

    def select(self, index: Tensor) -> None:
        self.rows = [self.rows[i] for i in index.tolist()]


def test_rows_at_paces_of_their_own() -> None:
    a = ABSENT
    script = Script(
        [
            [[1, a, a], [2, a, a]],
            [[3, 4, a], [5, a, a]],
            [[6, a, a], [7, 8, 9]],  # 8 ends, 9 is behind it
            [[10, 11, 12], [5, 5, 5]],  # 11 is the last that row 0 may have
        ]
    )
    seen: list[list[int]] = []
    output = Continuations(
        torch.zeros(2, 1), 6, [8], 0, None, lambda column: seen.append(column.tolist())
    )
    run_steps(script, output)
    assert output.tensor().tolist() == [[1, 3, 4, 6, 10, 11], [2, 5, 7, 8, 0, 0]]
    assert seen == [[1, 2], [3, 5], [4, 7], [6, 8], [10, 0], [11, 0]]
    assert len(script.sizes) == 4


def test_rows_are_removed_when_half_of_them_have_ended() -> None:
    def step(n: int) -> list[list[int]]:
        return [[9 if n >= ending else 1] for ending in (0, 2, 30, 1)]

    script = Script([step(n) for n in range(40)])
    output = Continuations(torch.zeros(4, 1), 40, [9], 0, None, None)
    run_steps(script, output)
    # Rows 0 and 3 are gone after two steps, row 1 after three
    assert script.sizes == [4, 4, 2] + [1] * 28
    assert [len(row) for row in output.tokens] == [1, 3, 31, 2]


@pytest.mark.parametrize(("max_tokens", "removed"), [(12, False), (18, True)])
def test_for_few_tokens_no_row_is_removed(max_tokens: int, removed: bool) -> None:
    """Row 1 ends when row 0 lacks 4 or 6 tokens, before whose last step it lacked 8 or 10."""
    script = Script([[[1, 1, 1, 1, ABSENT, ABSENT], [2] * 6]] * 9)
    output = Continuations(torch.zeros(2, 1), max_tokens, [], 0, None, None)
    run_steps(script, output)
    assert script.sizes[-1] == (1 if removed else 2)
    assert [len(row) for row in output.tokens] == [max_tokens, max_tokens]


def test_draws_of_a_row_do_not_depend_on_the_others() -> None:
    def draws() -> Draws:
        return Draws(5, torch.device("cpu"), torch.Generator().manual_seed(2))

    alone, all_rows = draws(), draws()
    for kept in ([4, 1, 2], [0, 2]):
        alone.select(torch.tensor(kept))
        for name in ("exponential", "uniform"):
            whole, some = getattr(all_rows, name)(7), getattr(alone, name)(7)
            rows = [4, 1, 2] if len(kept) == 3 else [4, 2]
            assert some.tolist() == whole[rows].tolist()


class Alone:
    """A group of one rank."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_tensors_of_every_kind_can_be_compared():
    """An attention_mask may have the model's dtype, which numpy need not have."""
    ones = torch.ones(2, 3)
    given = {str(dtype): ones.to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.int32)}
    given |= {"none": None, "empty": torch.zeros(0, 4), "number": torch.tensor(3)}
    given["turned"] = ones.to(torch.bfloat16).t()
    check_same_on_all_ranks([Alone()], "generate", given, torch.device("cpu"))  # type: ignore[list-item]
