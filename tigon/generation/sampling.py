"""Samples tokens from logits: transformers' processors, and random numbers for each row.

# B rows at first, b rows now, V vocab
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from tigon.generation.settings import GenerationSettings
from tigon.kernels.loss.argmax import NOT_FINITE, argmax


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Returns scores [b, V], those of `seen` tokens penalized: positive / penalty, negative *
    penalty, which may be [b, 1]."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def keep_top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """Returns scores [b, V] with -inf below the k-th largest of a row; equal ones all stay.

    k may be [b, 1], of at most V.
    """
    if isinstance(k, Tensor):
        kth = scores.sort(descending=True).values.gather(1, k - 1)
    else:
        kth = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < kth, float("-inf"))


def keep_top_p(scores: Tensor, p: float | Tensor) -> Tensor:
    """Returns scores [b, V] with -inf outside a row's smallest set whose probability reaches p,
    which may be [b, 1]."""
    ascending, order = scores.sort()
    remove = ascending.softmax(-1).cumsum(-1) <= 1 - p
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), float("-inf"))


def keep_min_p(scores: Tensor, p: float | Tensor) -> Tensor:
    """Returns scores [b, V] with -inf where probability is below p times a row's largest; p may be
    [b, 1]."""
    probabilities = scores.softmax(-1)
    floor = p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < floor, float("-inf"))


class Draws:
    """Random numbers for the rows of a batch, which do not change when other rows are removed:
    they are drawn for all rows that there were at first."""

    def __init__(self, rows: int, device: torch.device, generator: torch.Generator | None):
        self.generator = generator  # None: the device's default
        self._batch, self._device = rows, device
        self._rows: Tensor | None = None  # remaining rows; None: all

    def exponential(self, columns: int) -> Tensor:
        """Exp(1) random numbers, fp32 [b, columns]."""
        return self._select_rows(self._empty(columns).exponential_(generator=self.generator))

    def uniform(self, columns: int) -> Tensor:
        """Uniform random numbers in [0, 1), fp32 [b, columns]."""
        return self._select_rows(self._empty(columns).uniform_(generator=self.generator))

    def select(self, index: Tensor) -> None:
        """Keeps these of the b rows."""
        self._rows = index if self._rows is None else self._rows[index]

    def _empty(self, columns: int) -> Tensor:
        return torch.empty(self._batch, columns, device=self._device)

    def _select_rows(self, numbers: Tensor) -> Tensor:
        """Returns those of the remaining rows."""
        return numbers if self._rows is None else numbers.index_select(0, self._rows)


def sample_columns(weights: Tensor, draws: Draws) -> Tensor:
    """Samples one column [b] per row with probabilities proportional to weights [b, V].

    Takes the largest of weight / Exp(1), as torch.multinomial does, so the same random state gives
    the same column, but without a sync that checks the weights. NOT_FINITE if a weight is NaN.
    """
    value, column = (weights / draws.exponential(weights.shape[-1])).max(-1)
    return column.masked_fill(value.isnan(), NOT_FINITE)


@dataclass(frozen=True)
class Sampling:
    """Turns logits into tokens by transformers' processors, in transformers' order."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_new_tokens: int = 0
    ends: Tensor | None = None  # [V], True at eos tokens; None: there are none

    @classmethod
    def of(cls, settings: GenerationSettings, vocab: int, device: torch.device) -> Self:
        """Returns the sampling that settings ask for, on the device."""
        ends = None
        eos = [token for token in settings.eos_token_id if 0 <= token < vocab]
        if settings.min_new_tokens and eos:
            ends = torch.zeros(vocab, dtype=torch.bool)
            ends[eos] = True
            ends = ends.to(device)
        values = {f.name: getattr(settings, f.name) for f in fields(cls) if f.name != "ends"}
        # torch takes no whole number of more than 64 bits
        values |= {name: float(values[name]) for name in ("temperature", "repetition_penalty")}
        return cls(**values, ends=ends)

    def scores(
        self, logits: Tensor, seen: Tensor | None, generated: Tensor | None = None
    ) -> Tensor:
        """The fp32 scores [b, V] for choosing the next token, from its logits.

        `generated`, [b] or [1], is the number of tokens after the prompt; None: enough to end.
        """
        scores = logits.float()
        if seen is not None:
            scores = penalize_repetition(scores, seen, self.repetition_penalty)
        if self.ends is not None and generated is not None:
            early = generated[:, None] < self.min_new_tokens
            scores = scores.masked_fill(early & self.ends, float("-inf"))
        if not self.do_sample:
            return scores
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k:
            scores = keep_top_k(scores, self.top_k)
        if self.top_p < 1:
            scores = keep_top_p(scores, self.top_p)
        return keep_min_p(scores, self.min_p) if self.min_p else scores

    def __call__(
        self, logits: Tensor, seen: Tensor | None, generated: Tensor, draws: Draws
    ) -> Tensor:
        """The next token of every row: [b]; NOT_FINITE where its scores allow none."""
        if not self.do_sample and seen is None and self.ends is None:
            return argmax(logits)  # which a copy in fp32 would not change
        scores = self.scores(logits, seen, generated)
        return sample_columns(scores.softmax(-1), draws) if self.do_sample else argmax(scores)

    def seen(self, prompt: Tensor, mask: Tensor | None, vocab: int) -> Tensor | None:
        """Bool [b, V], True for tokens of the prompt [b, T]; None without a repetition penalty."""
        if self.repetition_penalty == 1:
            return None
        seen = torch.zeros(prompt.shape[0], vocab, dtype=torch.bool, device=prompt.device)
        # Padding, which is on the left, is replaced by the last token
        real = prompt if mask is None else torch.where(mask, prompt, prompt[:, -1:])
        return seen.scatter_(1, real, True)


@dataclass(frozen=True)
class Work:
    """What the settings of some rows make a step compute."""

    scores: bool = False  # some row samples or changes its logits; else all take the argmax
    filters: bool = False  # some row has a top_k or top_p, which sort a vocabulary

    def __or__(self, other: Self) -> Self:
        return type(self)(self.scores or other.scores, self.filters or other.filters)


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

    def set(self, row: int, settings: GenerationSettings, prompt: Tensor, tokens: int) -> Work:
        """Makes a row begin after its prompt [T], for up to `tokens` more, by these settings.

        `settings.eos_token_id` must be the same for all rows. Returns what the row needs.
        """
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
            draws = torch.rand(tokens, generator=generator)
            self._draws[row, :tokens] = draws.to(self._draws.device)
        filters = sampled and (top_k < self._vocab or s.top_p < 1)
        return Work(sampled or penalized or s.min_new_tokens > 0, filters)

    def __call__(self, logits: Tensor, work: Work, start: int = 0) -> Tensor:
        """The next tokens [b] of the rows from `start` on, from their logits [b, V]; NOT_FINITE
        where a row's scores allow none.

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

    def _sample(self, scores: Tensor, work: Work, rows: slice) -> Tensor:
        """Samples a token of each row from its scores [b, V]: [b], or NOT_FINITE."""
        scores = scores / self._temperature[rows]
        if work.filters:
            scores = keep_top_p(keep_top_k(scores, self._top_k[rows]), self._top_p[rows])
        sums = keep_min_p(scores, self._min_p[rows]).softmax(-1).cumsum(-1, dtype=torch.float64)
        at = self._generated[rows].clamp(max=self._draws.shape[1] - 1)
        draw = self._draws[rows].gather(1, at) * sums[:, -1:]
        token = torch.searchsorted(sums, draw, right=True)[:, 0]
        return token.where(sums[:, -1].isfinite(), NOT_FINITE)
