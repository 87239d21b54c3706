"""The loop over steps. The device runs ahead: the host reads the tokens of a step some steps later.

# B rows at first, b rows now, n tokens of a step
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from tigon.generation.protocols import Steps
from tigon.generation.stopping import Continuations

LAG = 8  # steps that the host may be behind the device
FEW = 8  # with so few steps left, removing rows or capturing a graph costs more than it saves


class HostCopies:
    """Copies of tokens to the host, in the order of their steps; at most `lag` are unfinished.

    From a GPU, tokens are copied to pinned memory on the stream of their step, so that neither
    starting a copy nor asking whether it has finished waits for the device. With `in_step`, nobody
    asks: tokens are there `lag` steps later, neither sooner nor later, on all ranks alike.
    """

    def __init__(self, lag: int = LAG, in_step: bool = False):
        self.lag, self.in_step = lag, in_step
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # [lag + 1, b, n]
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def send(self, tokens: Tensor) -> None:
        """Start to copy tokens [b, n]; `receive` must have been exhausted since the last call."""
        if not tokens.is_cuda:
            self._sent.append((tokens, None))
            return
        if self._slots is None:
            shape = self.lag + 1, *tokens.shape
            self._slots = torch.empty(shape, dtype=tokens.dtype, pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(self.lag + 1)]
        i = self._count % (self.lag + 1)
        self._slots[i].copy_(tokens, non_blocking=True)
        self._events[i].record()
        self._sent.append((self._slots[i], self._events[i]))
        self._count += 1

    def receive(self, everything: bool = False) -> Iterator[list[list[int]]]:
        """Tokens whose copies have finished; waits for those over `lag` steps old, or for all."""
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
        return event is None or event.query()


def run_steps(
    steps: Steps, output: Continuations, lag: int = LAG, *, in_step: bool = False
) -> None:
    """Step until every row has ended; `in_step` with other ranks, which all stop after the same
    step.

    The host learns some steps later that a row has ended; the tokens of the steps launched since
    are dropped. When at least half of the rows have ended, they are removed from the batch.
    """
    rows = list(range(len(output.tokens)))
    copies = HostCopies(lag, in_step)
    for done in range(output.max_tokens):
        remaining = min(output.remaining, output.max_tokens - done)
        copies.send(steps(remaining))
        for tokens in copies.receive():
            output.append(rows, tokens)
        half = 2 * len(output.unfinished) <= len(rows)
        if steps.can_remove_rows and half and remaining > FEW:
            for tokens in copies.receive(everything=True):
                output.append(rows, tokens)
            kept = [i for i, row in enumerate(rows) if row in output.unfinished]
            if kept:
                steps.select(torch.tensor(kept))
                rows = [rows[i] for i in kept]
                copies = HostCopies(lag, in_step)
        if not output.unfinished:
            return
    for tokens in copies.receive(everything=True):
        output.append(rows, tokens)
