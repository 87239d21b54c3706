"""Rows of preferences for tests, as files."""

import json
import random
from pathlib import Path
from typing import Any

from tests.support.small import WORDS


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
