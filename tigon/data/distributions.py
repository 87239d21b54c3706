"""Rows of tokens with what a teacher makes of each: its most likely tokens and their
log-probabilities.

# N tokens of a row, K of them at a place
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tigon.data.encoders import FormatEncoder
from tigon.data.examples import Example
from tigon.data.formats import DISTRIBUTED, Format, Row
from tigon.data.preferences import check_tokens
from tigon.data.widths import PADS

SUM = 1e-3  # by which probabilities may add up to more than 1, as they are rounded
LEAST = float(np.finfo(np.float32).min)  # log-probability that a column can hold


class TopEncoder(FormatEncoder):
    """Sequences of tokens, each with the teacher's distribution that it stands in.

    `teacher_tokens[i]` and `teacher_logprobs[i]` are those of token i after the ones before it, as
    vLLM's prompt_logprobs are; the first token has none, and any may have fewer than others, in its
    row or another. Learned is where `completion_mask` is 1; without it, everything.
    """

    formats = DISTRIBUTED
    per_token: Mapping[str, DTypeLike] = {
        "supervised": np.bool_,
        "teacher_tokens": np.int32,
        "teacher_logprobs": np.float32,
    }

    def options(self) -> dict[str, Any]:
        return {"tokens": "counted"}  # teacher's too, as the highest that there are: once not

    def row(self, row: Row, form: Format) -> Sequence[Example]:
        ids = _whole_numbers(form.get(row, "input_ids"), form.key("input_ids"))
        check_tokens(ids, form.key("input_ids"))
        tokens, logprobs = (form.get(row, n) for n in ("teacher_tokens", "teacher_logprobs"))
        for name, given in (("teacher_tokens", tokens), ("teacher_logprobs", logprobs)):
            if not isinstance(given, list) or len(given) != len(ids):
                raise ValueError(
                    f"{form.key(name)!r} must have a list for each of the {len(ids)} tokens"
                )
        mask = form.get(row, "completion_mask")
        learned = np.ones(len(ids), dtype=bool)
        if mask is not None:
            learned = np.array(_zeros_and_ones(mask, form.key("completion_mask")))
            if len(learned) != len(ids):
                raise ValueError(
                    f"{form.key('completion_mask')!r} has {len(learned)} values for {len(ids)} "
                    "tokens"
                )
        learned[:1] = False  # nothing predicts it
        if not learned.any():
            raise ValueError("has no token to learn behind its first")
        read = np.flatnonzero(learned).tolist()
        for i in read:
            _check(i, tokens[i], logprobs[i])
        shape = len(ids), max(len(tokens[i]) for i in read)
        columns = [np.full(shape, PADS[name]) for name in ("teacher_tokens", "teacher_logprobs")]
        for i in read:
            count = len(tokens[i])
            columns[0][i, :count], columns[1][i, :count] = tokens[i], logprobs[i]
        values = {"supervised": learned, "teacher_tokens": columns[0]}
        return [Example(ids, values | {"teacher_logprobs": columns[1]})]


def _whole_numbers(value: Any, name: str) -> list[int]:
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return value
    raise ValueError(f"{name!r} must be a list of whole numbers, not {value!r:.100}")


def _zeros_and_ones(value: Any, name: str) -> list[bool]:
    if isinstance(value, list) and all(type(v) in (int, bool) and v in (0, 1) for v in value):
        return [bool(v) for v in value]
    raise ValueError(f"{name!r} must be a list of 0 and 1, not {value!r:.100}")


def _check(place: int, tokens: Any, logprobs: Any) -> None:
    where = f"the teacher's distribution of token {place}"
    if not isinstance(tokens, list) or not isinstance(logprobs, list) or not tokens:
        raise ValueError(f"{where} is empty: give its tokens and their log-probabilities")
    if len(tokens) != len(logprobs):
        raise ValueError(f"{where} has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    if any(type(t) is not int or not 0 <= t < 2**31 for t in tokens) or len({*tokens}) < len(
        tokens
    ):
        raise ValueError(f"{where} has a token twice, or one that is none: {tokens!r:.100}")
    real = all(type(p) in (int, float) and LEAST <= p <= SUM for p in logprobs)
    if not real or np.exp(np.array(logprobs, dtype=np.float64)).sum() > 1 + SUM:
        raise ValueError(f"{where} is none: its log-probabilities are {logprobs!r:.100}")
