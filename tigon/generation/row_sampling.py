"""Samples tokens for rows that have settings of their own, and that come and go.

# R rows, b rows of a step, V vocab, T prompt tokens
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.generation.sampling import penalize_repetition
from tigon.generation.settings import GenerationSettings
from tigon.kernels.loss.argmax import NOT_FINITE, argmax

FEW = 128  # up to which the largest scores are found without sorting a vocabulary
BLOCK = 1024  # weights of a running sum: over a whole vocabulary it would be slow


@dataclass(frozen=True)
class SamplingNeeds:
    """What the settings of some rows make a step compute."""

    scores: bool = False  # some row samples or changes its logits; else all take the argmax
    ranked: int = 0  # how many of the largest scores top_k and top_p look at: 0, FEW or all
    drawn: int = 0  # how many of the largest scores a token is drawn from: 0, FEW or all

    def __or__(self, other: Self) -> Self:
        return type(self)(
            self.scores or other.scores,
            max(self.ranked, other.ranked),
            max(self.drawn, other.drawn),
        )


class RowSampling:
    """Chooses tokens for R rows, each by settings of its own, as `Sampling` does by those of all.

    What a CUDA graph reads are tensors, which `set` changes in place. A row draws from a generator
    of its own, so that its tokens do not depend on other rows: one number for each token, which
    picks it from the row's cumulative probabilities.
    """

    def __init__(self, rows: int, vocab: int, most_tokens: int, device: torch.device):
        def full(value: float, dtype: torch.dtype = torch.float32, columns: int = 1) -> Tensor:
            return torch.full((rows, columns), value, dtype=dtype, device=device)

        self._vocab = vocab
        self._temperature, self._penalty = full(1), full(1)
        self._top_k, self._top_p, self._min_p = full(vocab, torch.int64), full(1), full(0)
        self._greedy, self._least = full(True, torch.bool), full(0, torch.int64)
        self._seen = full(False, torch.bool, vocab)
        self._ends = torch.zeros(vocab, dtype=torch.bool, device=device)
        self._draws = full(0, columns=most_tokens)
        self._generated = full(0, torch.int64)  # tokens after the prompt

    def set(
        self, row: int, settings: GenerationSettings, prompt: Tensor, tokens: int
    ) -> SamplingNeeds:
        """Makes a row begin after its prompt [T], for up to `tokens` more; returns its needs."""
        s, sampled = settings, settings.do_sample
        top_k = min(s.top_k or self._vocab, self._vocab)
        for tensor, value in (
            (self._temperature, s.temperature if sampled else 1),
            (self._top_k, top_k if sampled else self._vocab),
            (self._top_p, s.top_p if sampled else 1),
            (self._min_p, s.min_p if sampled else 0),
            (self._penalty, s.repetition_penalty),
            (self._greedy, not sampled),
            (self._least, s.min_new_tokens),
            (self._generated, 0),
            (self._seen, False),
        ):
            tensor[row].fill_(value)
        penalized = s.repetition_penalty != 1
        if penalized:
            self._seen[row, prompt] = True
        ends = [token for token in s.eos_token_id if token < self._vocab]
        if s.min_new_tokens and ends:
            self._ends[ends] = True
        if sampled:
            generator = torch.Generator()
            generator.seed() if s.seed is None else generator.manual_seed(s.seed)
            draws = torch.rand(tokens, generator=generator, device="cpu")
            self._draws[row, :tokens] = draws.to(self._draws.device)
        drawn = min(FEW, self._vocab) if top_k <= FEW else self._vocab
        filters = top_k < self._vocab or s.top_p < 1
        return SamplingNeeds(
            scores=sampled or penalized or s.min_new_tokens > 0,
            ranked=drawn if sampled and filters else 0,
            drawn=drawn if sampled else 0,
        )

    def __call__(self, logits: Tensor, work: SamplingNeeds, start: int = 0) -> Tensor:
        """Returns the next tokens [b] of the rows from `start` on, from their logits [b, V];
        NOT_FINITE where a row's scores allow none.

        `work` is at least what these rows need; more gives the same tokens.
        """
        rows = slice(start, start + len(logits))
        if not work.scores:
            token = argmax(logits)
        else:
            scores = penalize_repetition(logits.float(), self._seen[rows], self._penalty[rows])
            early = self._generated[rows] < self._least[rows]
            scores = scores.masked_fill(early & self._ends, float("-inf"))
            token = torch.where(
                self._greedy[rows, 0], argmax(scores), self._sample(scores, work, rows)
            )
            self._seen[rows].scatter_(1, token.clamp(min=0)[:, None], True)
        self._generated[rows] += 1
        return token

    def _least_score(self, ranked: Tensor, rows: slice) -> Tensor:
        """Returns the least score [b, 1] that top_k and then top_p leave of the largest ones, which
        descend: [b, N]. Equal scores all stay, so it is the same for any N of at least top_k."""
        top_k, n = self._top_k[rows], ranked.shape[1]
        kth = ranked.gather(1, top_k.clamp(max=n) - 1)
        ranked = ranked.masked_fill(ranked < kth, float("-inf"))
        rest = ranked.softmax(-1).flip(1).cumsum(1).flip(1)  # of it and all below
        removed = rest <= 1 - self._top_p[rows]
        removed[:, 0] = False
        least = ranked.masked_fill(removed, float("inf")).amin(-1, keepdim=True)
        return least.masked_fill(top_k > n, float("-inf"))  # has no top_k, and so no top_p here

    def _sample(self, scores: Tensor, work: SamplingNeeds, rows: slice) -> Tensor:
        """Samples a token of each row from its scores [b, V]: [b], or NOT_FINITE."""
        scores, columns = scores / self._temperature[rows], None
        if work.ranked:
            ranked, ranks = scores.topk(work.ranked)
            least = self._least_score(ranked, rows)
            if work.drawn < self._vocab:
                # In the vocabulary's order, in which the same draw picks the same token
                columns, order = ranks.sort()
                scores = ranked.gather(1, order)
            scores = scores.masked_fill(scores < least, float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights.masked_fill(weights < self._min_p[rows], 0)
        at = self._generated[rows].clamp(max=self._draws.shape[1] - 1)
        column, total = pick_column(weights, self._draws[rows].gather(1, at))
        token = column if columns is None else columns.gather(1, column)
        return token.masked_fill(~total.isfinite(), NOT_FINITE)[:, 0]


def pick_column(weights: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the column [b, 1] whose part of a row's sum holds `draw`, [b, 1] in [0, 1), of it,
    and the sum [b, 1]; weights [b, V] are not negative."""
    size = weights.shape[1]
    blocks = F.pad(weights.double(), (0, -size % BLOCK)).unflatten(1, (-1, BLOCK))
    ends = blocks.sum(-1).cumsum(-1)
    total = ends[:, -1:]
    block = torch.searchsorted(ends, draw * total, right=True).clamp(max=blocks.shape[1] - 1)
    rest = draw * total - F.pad(ends, (1, 0)).gather(1, block)
    sums = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    rest = rest.minimum(sums[:, -1:] * (1 - 2**-50))  # both are rounded
    column = block * BLOCK + torch.searchsorted(sums, rest, right=True)
    return column.clamp(max=size - 1), total
