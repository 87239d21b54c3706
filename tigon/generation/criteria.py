"""Stopping criteria: functions of the caller that end rows.

# B rows, T prompt tokens, V vocab
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Scores = tuple[Tensor, ...] | None
Criterion = Callable[[Tensor, Scores], Any]


class StoppingCriteria:
    """Asks each criterion after every token of all rows, in their order, which rows end with it.

    A criterion gets all tokens [B, T + n], on the prompt's device, and the scores of the n new ones
    or None, as in transformers. It returns a bool for all rows, or a bool tensor [B]. The device
    may already be some steps ahead; what it has computed since is dropped.
    """

    def __init__(
        self,
        criteria: Sequence[Criterion],
        prompt: Tensor,  # [B, T]
        share: Callable[[Tensor], Tensor],  # returns the answers of the first rank on all ranks
    ):
        self._criteria, self._ids, self._share = criteria, prompt, share

    def __call__(self, column: Tensor, scores: Scores) -> list[int]:
        """Returns the rows that end with these tokens [B]; `scores`: of all new tokens so far."""
        self._ids = torch.cat((self._ids, column[:, None].to(self._ids.device)), 1)
        ends = torch.zeros(len(column), dtype=torch.bool, device=self._ids.device)
        for criterion in self._criteria:
            ends |= _read_answer(criterion, criterion(self._ids, scores), ends)
        return self._share(ends.long()).nonzero().flatten().tolist()


def check_criteria(criteria: Any) -> Sequence[Criterion]:
    """Returns the criteria; raises TypeError for what is no list of functions."""
    if not isinstance(criteria, Sequence) or not all(callable(f) for f in criteria):
        raise TypeError(
            f"stopping_criteria={criteria!r} is not a list of functions of input_ids and scores"
        )
    return criteria


def _read_answer(criterion: Criterion, answer: Any, rows: Tensor) -> Tensor:
    """Returns a criterion's answer as bool [B] or [1]; raises TypeError for another one."""
    if isinstance(answer, bool | np.bool_ | Tensor):
        ends = torch.as_tensor(answer, device=rows.device)
        if ends.dtype == torch.bool and ends.numel() in (1, len(rows)):
            return ends.flatten()
        description = f"a {ends.dtype} tensor {list(ends.shape)}"
    else:
        description = f"{answer!r} ({type(answer).__name__})"
    raise TypeError(
        f"stopping_criteria: {criterion!r} returned {description}, and not a bool or a bool tensor "
        f"[{len(rows)}]"
    )
