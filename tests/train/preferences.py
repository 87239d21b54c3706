"""Rows of preferences for tests, as files, and a task's curves in every layout of its batches."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small import WORDS
from tests.train.ranks import train_on
from tigon.train import main


def answers(count: int, seed: int) -> list[tuple[str, str, str]]:
    """Prompts, each with two answers that are not equal."""
    draw = random.Random(seed)

    def say(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    found = []
    while len(found) < count:
        prompt, chosen, rejected = say(8), say(draw.choice([3, 12])), say(9)
        if chosen != rejected:
            found.append((prompt, chosen, rejected))
    return found


def message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": message("user", prompt),
            "chosen": message("assistant", chosen),
            "rejected": message("assistant", rejected),
        }
        for prompt, chosen, rejected in answers(count, seed)
    ]


def text_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{prompt}:", "chosen": f" {chosen}", "rejected": f" {rejected}"}
        for prompt, chosen, rejected in answers(count, seed)
    ]


def labeled(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": message("user", prompt),
            "completion": message("assistant", answer),
            "label": i % 3 != 1,
        }
        for i, (prompt, answer, _) in enumerate(answers(count, seed))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rewarded(count: int, seed: int = 0, tokens: int = 300, each: int = 3) -> list[dict[str, Any]]:
    """Prompts with some answers each, as tokens, and log-probabilities of whoever gave them."""
    draw = random.Random(seed)

    def ids(longest: int) -> list[int]:
        return [draw.randrange(3, tokens) for _ in range(draw.randint(1, longest))]

    rows = []
    for _ in range(count):
        answers = [ids(9) for _ in range(each)]
        rows.append(
            {
                "prompt": ids(6),
                "completions": answers,
                "rewards": [draw.random() for _ in answers],
                "old_logprobs": [[draw.uniform(-8, -4) for _ in a] for a in answers],
            }
        )
    return rows


def assert_same_in_every_layout(
    workspace: Any, make: Callable[..., list[str]], name: str, keys: Sequence[str], rel: float
) -> None:
    """Trains four steps of `make(run, **changes)`: resumed with the same bits, on two ranks,
    packed, padded, and in micro-batches that are recomputed."""

    def curve(run: str, key: str) -> list[float]:
        return [np.nan if x is None else x for x in workspace.metrics(f"{name}{run}", key)]

    main(make(name, save_every=2))
    main(make(f"{name}-resumed", resume=workspace.checkpoint(name, 2)))
    train_on(2, make(f"{name}-two"))
    main(make(f"{name}-packed", batch_size=64))
    parts = {"batch_size": 64, "micro_batch_size": 4}
    main(make(f"{name}-padded", **parts, packing="false"))
    main(make(f"{name}-parts", **parts, activation_checkpointing="true"))
    for key in keys:
        whole, resumed, packed = (curve(run, key) for run in ("", "-resumed", "-packed"))
        assert len(whole) == (3 if key.startswith("eval_") else 4) and len(resumed) == 2
        assert resumed == pytest.approx(whole[-2:], rel=0, abs=0, nan_ok=True), key
        close = {"rel": rel, "abs": rel / 10, "nan_ok": True}
        assert curve("-two", key) == pytest.approx(whole, **close), key
        for run in ("-padded", "-parts"):
            assert curve(run, key) == pytest.approx(packed, **close), key
