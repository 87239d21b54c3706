"""Chats with a weight for each answer and row."""

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_weighted(chats: Path) -> Path:
    """The chats of a file, with weights, in another one beside it."""
    rows = [json.loads(line) for line in chats.read_text().splitlines()]
    for line, row in enumerate(rows, 1):
        answers = [m for m in row["messages"] if m["role"] == "assistant"]
        for message, weight in zip(answers, answer_weights(line, len(answers)), strict=True):
            message["weight"] = weight
        row["weight"] = row_weight(line)
    target = chats.with_name(f"{chats.stem}-weighted.jsonl")
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def row_weight(line: int) -> float:
    return 0.25 + line % 3 * 0.5


def answer_weights(line: int, answers: int) -> list[float]:
    """1, 0.5, 1, ...; of every fourth line with several answers, the first does not count."""
    weights = [(1.0, 0.5)[i % 2] for i in range(answers)]
    return [0.0, *weights[1:]] if answers > 1 and line % 4 == 3 else weights


def token_weights(line: int, supervised: list[Any]) -> np.ndarray:
    """Of a chat without weights: an answer is a run of supervised tokens."""
    learned = np.asarray(supervised, dtype=bool)
    answer = np.cumsum(np.diff(learned.astype(int), prepend=0) == 1)  # of each token, from 1
    weights = np.array([0.0, *answer_weights(line, int(answer.max()))])[answer]
    return weights * learned * row_weight(line)
