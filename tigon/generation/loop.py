"""The loop over steps. The device runs ahead of the host, which hears of tokens a little later.

# B rows at first, b rows now, n tokens of a step
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from tigon.generation.protocols import Steps
from tigon.generation.stopping import Continuations

LAG = 8  # steps that the host may be behind
FEW = 8  # steps for which it does not pay to change anything


class Arrivals:
    """Tokens on their way to the host, in the order of their steps; at most `lag` are waited for.

    From a GPU they are copied to pinned memory behind their step, so that sending them and looking
    whether they are there holds nobody up.
    """

    def __init__(self, lag: int = LAG):
        self.lag = lag
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # [lag + 1, b, n]
        self._events: list[torch.cuda.Event] = []
        self._count = 0

    def send(self, tokens: Tensor) -> None:
        """Tokens [b, n] of the next step; `receive` must have been exhausted since the last."""
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
        """The tokens that are there; waits for those that are late, or for all."""
        while self._sent:
            tokens, event = self._sent[0]
            wait = everything or len(self._sent) > self.lag
            if not wait and not self.here(event):
                return
            self._sent.popleft()
            if event is not None:
                event.synchronize()
            yield tokens.tolist()

    def here(self, event: torch.cuda.Event | None) -> bool:
        return event is None or event.query()


def drive(steps: Steps, said: Continuations, lag: int = LAG) -> None:
    """Step until every row has ended.

    The host hears a few steps late that a row has: it has by then launched more of them, whose
    tokens nobody hears. When half of the rows or more have ended, they leave the batch.
    """
    rows = list(range(len(said.said)))
    arrivals = Arrivals(lag)
    for done in range(said.most):
        left = min(said.left, said.most - done)
        arrivals.send(steps(left))
        for tokens in arrivals.receive():
            said.hear(rows, tokens)
        if steps.leaves and 2 * len(said.alive) <= len(rows) and left > FEW:
            for tokens in arrivals.receive(everything=True):
                said.hear(rows, tokens)
            stay = [i for i, row in enumerate(rows) if row in said.alive]
            if stay:
                steps.select(torch.tensor(stay))
                rows = [rows[i] for i in stay]
                arrivals = Arrivals(lag)
        if not said.alive:
            return
    for tokens in arrivals.receive(everything=True):
        said.hear(rows, tokens)
