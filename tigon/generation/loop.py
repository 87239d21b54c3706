"""The loop over generation steps: what ends rows, and copies of tokens to the host.

The device runs ahead: the host reads the tokens of a step some steps later.

# B rows at first, b rows now, n tokens of a step, T prompt tokens, V vocab
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tigon.generation.prompt import DecodingTokenizer
from tigon.kernels.loss.argmax import NOT_FINITE

ABSENT = -1  # in place of a token if a step has none for a row
LAG = 8  # steps that the host may be behind the device
FEW_STEPS = 8  # with fewer steps to go, removing rows or capturing a graph costs more than it saves

Scores = tuple[Tensor, ...] | None
Criterion = Callable[[Tensor, Scores], Any]


class StopStrings:
    """Detects whether a row's last token completes one of the strings."""

    def __init__(self, strings: Sequence[str], tokenizer: DecodingTokenizer):
        self.strings, self.tokenizer = strings, tokenizer
        # A token is at least a byte; one more, since decoders treat the first token differently
        self.window = max(len(s.encode()) for s in strings) + 1

    def completed(self, ids: list[int]) -> bool:
        """Returns whether the last of these tokens, up to `window` of a row, completes a string."""
        before = self.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        # An unfinished character is U+FFFD until its last byte
        old = len(before.rstrip("\ufffd"))
        return any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self.strings)


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
        if not isinstance(criteria, Sequence) or not all(map(callable, criteria)):
            raise TypeError(
                f"stopping_criteria={criteria!r} is not a list of functions of input_ids and scores"
            )
        self._criteria, self._ids, self._share = criteria, prompt, share

    def __call__(self, column: Tensor, scores: Scores) -> list[int]:
        """Returns the rows that end with these tokens [B]; `scores`: of all new tokens so far."""
        self._ids = torch.cat((self._ids, column[:, None].to(self._ids.device)), 1)
        ends = torch.zeros(len(column), dtype=torch.bool, device=self._ids.device)
        for criterion in self._criteria:
            ends |= _read_answer(criterion, criterion(self._ids, scores), ends)
        return self._share(ends.long()).nonzero().flatten().tolist()


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


class Continuations:
    """The generated tokens of each row that have reached the host, and the unfinished rows.

    Tokens after the end of a row are dropped. `criteria`, then `emit`, get a column [B] as soon as
    all unfinished rows are past it.
    """

    def __init__(
        self,
        prompt: Tensor,  # [B, T]
        max_tokens: int,  # of a row
        eos: Sequence[int],
        pad: int | None,  # fills short rows; None: eos, or else 0
        stop: StopStrings | None,
        emit: Callable[[Tensor], object] | None,
        criteria: StoppingCriteria | None = None,
        # What criteria get with the tokens of each row, for the first so many of them
        scores: Callable[[list[list[int]], int], Scores] = lambda tokens, count: None,
    ):
        for name, given in (("stop_strings", stop), ("stopping_criteria", criteria)):
            if given is not None and pad is None and not eos and len(prompt) > 1:
                raise ValueError(f"{name} for several rows need pad_token_id to fill short ones")
        self.max_tokens, self.pad = max_tokens, next(iter(eos), 0) if pad is None else pad
        self.tokens: list[list[int]] = [[] for _ in range(prompt.shape[0])]
        self.unfinished = set(range(prompt.shape[0])) if max_tokens else set()
        self._eos, self._stop, self._emit = frozenset(eos), stop, emit
        self._criteria, self._scores = criteria, scores
        self._complete = 0  # columns that are complete
        self._prompt = [] if stop is None else prompt[:, -stop.window :].tolist()

    @property
    def length(self) -> int:
        """Returns the number of tokens of the longest row."""
        return max(len(tokens) for tokens in self.tokens)

    @property
    def remaining(self) -> int:
        """Returns the number of tokens that the shortest unfinished row may still get."""
        shortest = min((len(self.tokens[row]) for row in self.unfinished), default=self.max_tokens)
        return self.max_tokens - shortest

    def append(self, rows: Sequence[int], tokens: list[list[int]]) -> None:
        """Appends tokens [b, n] of `rows` but ABSENT ones, and emits complete columns."""
        for row, new in zip(rows, tokens, strict=True):
            for token in new:
                if row in self.unfinished and token != ABSENT:
                    self._append_token(row, token)
        if self._emit is not None or self._criteria is not None:
            self._complete_columns()

    def _complete_columns(self) -> None:
        """Passes columns that have become complete to the criteria, and emits them."""

        def least() -> int:
            return min((len(self.tokens[row]) for row in self.unfinished), default=self.length)

        while self._complete < least():
            at = self._complete
            column = [tokens[at] if at < len(tokens) else self.pad for tokens in self.tokens]
            self._complete += 1
            if self._criteria is not None:
                scores = self._scores(self.tokens, self._complete)
                for row in self._criteria(torch.tensor(column, device="cpu"), scores):
                    del self.tokens[row][self._complete :]
                    self.unfinished.discard(row)
            if self._emit is not None:
                self._emit(torch.tensor(column, device="cpu"))

    def _append_token(self, row: int, token: int) -> None:
        """Appends a token to a row, which may end it; ValueError for NOT_FINITE."""
        if token == NOT_FINITE:
            raise ValueError(
                f"row {row}: the scores of token {len(self.tokens[row])} after the prompt are not "
                "finite: look for nan, inf or huge values in the weights of model and adapter"
            )
        tokens = self.tokens[row]
        tokens.append(token)
        ended = len(tokens) == self.max_tokens or token in self._eos
        if self._stop is not None and not ended:
            window = self._stop.window
            ended = self._stop.completed((self._prompt[row] + tokens[-window:])[-window:])
        if ended:
            self.unfinished.remove(row)

    def tensor(self) -> Tensor:
        """Returns the tokens [B, length] on the CPU, with pad tokens behind the ends of rows."""
        length = self.length
        filled = [tokens + [self.pad] * (length - len(tokens)) for tokens in self.tokens]
        return torch.tensor(filled, dtype=torch.long, device="cpu").view(len(filled), length)


class HostCopies:
    """Copies tokens to the host in the order of their steps; at most `lag` copies are unfinished.

    From a GPU, tokens are copied to pinned memory on the stream of their step, so that neither
    starting a copy nor testing for its end waits for the device. With `in_step`, tokens are
    received exactly `lag` steps later, so that all ranks see them in the same step.
    """

    def __init__(self, lag: int, in_step: bool = False):
        self.lag, self.in_step = lag, in_step
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # [lag + 1, b, n]
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def send(self, tokens: Tensor) -> None:
        """Starts to copy tokens [b, n]; `receive` must have been exhausted since the last call."""
        if not tokens.is_cuda:
            self._sent.append((tokens, None))
            return
        if self._slots is None:
            shape = self.lag + 1, *tokens.shape
            self._slots = torch.empty(shape, dtype=tokens.dtype, pin_memory=True, device="cpu")
            self._events = [torch.cuda.Event() for _ in range(self.lag + 1)]
        i = self._count % (self.lag + 1)
        self._slots[i].copy_(tokens, non_blocking=True)
        self._events[i].record()
        self._sent.append((self._slots[i], self._events[i]))
        self._count += 1

    def receive(self, everything: bool = False) -> Iterator[list[list[int]]]:
        """Yields copied tokens; waits for those over `lag` steps old, or for `everything`."""
        while self._sent:
            tokens, event = self._sent[0]
            wait = everything or len(self._sent) > self.lag
            if not wait and (self.in_step or not self.finished(event)):
                return
            self._sent.popleft()
            if event is not None:
                event.synchronize()
            yield tokens.tolist()

    def finished(self, event: torch.cuda.Event | None) -> bool:
        """Returns whether the copy that recorded the event is complete; None: it was none."""
        return event is None or event.query()


def run_steps(
    steps: Callable[[int], Tensor], output: Continuations, lag: int = LAG, *, in_step: bool = False
) -> None:
    """Runs steps until every row has ended; with `in_step`, all ranks stop after the same step.

    A step returns the next tokens [b, n], or ABSENT, and is one of `remaining` calls at most. Steps
    from which rows can be removed also have `select(index)`, which keeps those of the index.
    The host learns some steps later that a row has ended, and drops the tokens of steps launched
    since. When at least half of the rows have ended, they are removed from the batch.
    """
    rows = list(range(len(output.tokens)))
    select, copies = getattr(steps, "select", None), HostCopies(lag, in_step)
    for done in range(output.max_tokens):
        remaining = min(output.remaining, output.max_tokens - done)
        copies.send(steps(remaining))
        for tokens in copies.receive():
            output.append(rows, tokens)
        half = 2 * len(output.unfinished) <= len(rows)
        if half and remaining > FEW_STEPS and select is not None:
            for tokens in copies.receive(everything=True):
                output.append(rows, tokens)
            unfinished = [i for i, row in enumerate(rows) if row in output.unfinished]
            if unfinished:
                select(torch.tensor(unfinished, device="cpu"))
                rows = [rows[i] for i in unfinished]
                copies = HostCopies(lag, in_step)
        if not output.unfinished:
            return
    for tokens in copies.receive(everything=True):
        output.append(rows, tokens)
