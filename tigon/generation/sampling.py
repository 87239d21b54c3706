"""Samples tokens from logits: transformers' processors, and random numbers for each row.

# B rows at first, b rows now, V vocab
"""

import torch
from torch import Tensor

from tigon.generation.settings import GenerationSettings
from tigon.kernels.loss.argmax import NOT_FINITE, argmax


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Returns scores [b, V], those of `seen` tokens penalized: positive / penalty, negative *
    penalty, which may be [b, 1]."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def keep_top_k(scores: Tensor, k: int) -> Tensor:
    """Returns scores [b, V] with -inf below the k-th largest of a row; equal ones all stay."""
    kth = scores.topk(min(k, scores.shape[-1])).values[:, -1:]
    return scores.masked_fill(scores < kth, float("-inf"))


def keep_top_p(scores: Tensor, p: float) -> Tensor:
    """Returns scores [b, V] with -inf outside a row's smallest set whose probability reaches p."""
    ascending, order = scores.sort()
    remove = ascending.softmax(-1).cumsum(-1) <= 1 - p
    remove[:, -1] = False
    return scores.masked_fill(remove.scatter(1, order, remove), float("-inf"))


def keep_min_p(scores: Tensor, p: float) -> Tensor:
    """Returns scores [b, V] with -inf where probability is below p times a row's largest."""
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
        """Returns Exp(1) random numbers, fp32 [b, columns]."""
        return self._select_rows(self._empty(columns).exponential_(generator=self.generator))

    def uniform(self, columns: int) -> Tensor:
        """Returns uniform random numbers in [0, 1), fp32 [b, columns]."""
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


class Sampling:
    """Turns logits into tokens by transformers' processors, in transformers' order."""

    def __init__(
        self,
        settings: GenerationSettings,
        vocab: int,
        device: torch.device,
        # Where `scores` leaves the `logits` and `scores` of its last call, fp32 [b, V], if wanted
        last: dict[str, Tensor] | None = None,
    ):
        self.settings, self.last = settings, last
        self.ends: Tensor | None = None  # [V], True at eos tokens; None: rows may end at once
        eos = [token for token in settings.eos_token_id if 0 <= token < vocab]
        if settings.min_new_tokens and eos:
            ends = torch.zeros(vocab, dtype=torch.bool, device="cpu")
            ends[eos] = True
            self.ends = ends.to(device)

    def scores(
        self, logits: Tensor, seen: Tensor | None, generated: Tensor | None = None
    ) -> Tensor:
        """Returns the fp32 scores [b, V] for choosing the next token, from its logits.

        `generated`, [b] or [1], is the number of tokens after the prompt; None: enough to end.
        """
        scores = self._process(logits, seen, generated)
        if self.last is not None:
            self.last.update(logits=logits.float(), scores=scores)
        return scores

    def _process(self, logits: Tensor, seen: Tensor | None, generated: Tensor | None) -> Tensor:
        """Applies the processors."""
        s, scores = self.settings, logits.float()
        # float: torch takes no whole number of more than 64 bits
        if seen is not None:
            scores = penalize_repetition(scores, seen, float(s.repetition_penalty))
        if self.ends is not None and generated is not None:
            early = generated[:, None] < s.min_new_tokens
            scores = scores.masked_fill(early & self.ends, float("-inf"))
        if not s.do_sample:
            return scores
        if s.temperature != 1:
            scores = scores / float(s.temperature)
        if s.top_k:
            scores = keep_top_k(scores, s.top_k)
        if s.top_p < 1:
            scores = keep_top_p(scores, s.top_p)
        return keep_min_p(scores, s.min_p) if s.min_p else scores

    def __call__(
        self, logits: Tensor, seen: Tensor | None, generated: Tensor, draws: Draws
    ) -> Tensor:
        """Returns the next token of every row: [b]; NOT_FINITE where its scores allow none."""
        sampled = self.settings.do_sample
        plain = not sampled and seen is None and self.ends is None
        if plain and self.last is None:
            return argmax(logits)  # which a copy in fp32 would not change
        scores = self.scores(logits, seen, generated)
        return sample_columns(scores.softmax(-1), draws) if sampled else argmax(scores)

    def seen(self, prompt: Tensor, mask: Tensor | None, vocab: int) -> Tensor | None:
        """Returns bool [b, V], True for the prompt's tokens; None without a repetition penalty."""
        if self.settings.repetition_penalty == 1:
            return None
        seen = torch.zeros(prompt.shape[0], vocab, dtype=torch.bool, device=prompt.device)
        # Padding, which is on the left, is replaced by the last token
        real = prompt if mask is None else torch.where(mask, prompt, prompt[:, -1:])
        return seen.scatter_(1, real, True)
