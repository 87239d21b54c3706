"""Speculative decoding: a draft proposes tokens, and the model scores them all in one pass.

The text is distributed as if the model had generated it token by token; greedily, it is the same.
Source: Leviathan et al. (arXiv 2211.17192), for every row of a batch on its own.

# B rows, T prompt tokens, k proposed tokens, V vocab
"""

import torch
from torch import Tensor
from torch.nn import functional

from tigon.generation.loop import ABSENT
from tigon.generation.prompt import Model, Prompt
from tigon.generation.sampling import Draws, Sampling, draw
from tigon.generation.steps import INITIAL_CAPACITY, Replay, make_cache, prefill
from tigon.kernels.loss.argmax import argmax
from tigon.layers.kv_cache import Quantize


def accept_proposals(p: Tensor, q: Tensor, proposed: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """How many of `proposed` [B, k], drawn from q [B, k, V], are kept: [B]; and the token after.

    p [B, k + 1, V] are the probabilities to obey. Each proposal is kept with probability p / q;
    behind the first that is not, the token comes from what p has more than q.
    """
    k = proposed.shape[1]
    wanted, had = (x.gather(2, proposed[..., None]).squeeze(2) for x in (p[:, :k], q))
    kept = count_leading(draws.uniform(k) * had < wanted)
    rest = p.clone()
    rest[:, :k] -= q
    return kept, draw(_at(rest, kept).clamp(min=0), draws)


def count_leading(fits: Tensor) -> Tensor:
    """How many columns of fits [B, k] are True before the first that is not: [B]."""
    return fits.long().cumprod(1).sum(1)


def _at(x: Tensor, column: Tensor) -> Tensor:
    """x [B, n, ...] at column [B] of each row."""
    return x[torch.arange(len(column), device=x.device), column]


class SpeculativeSteps:
    """The first step reads the prompts; each further one proposes k tokens and reads them.

    Rows keep different numbers of them, so each is at a place of its own.
    """

    can_remove_rows = True

    def __init__(
        self,
        model: Model,
        draft: Model,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling,
        draws: Draws,
        *,
        proposals: int,
        copies: int,  # rows of each prompt, which is read once
        prefill_chunk_size: int,
        quantize: Quantize = None,
    ):
        self._model, self._draft, self._max_tokens, self._k = model, draft, max_tokens, proposals
        self._sampling, self._draws = sampling, draws
        # A row that has all its tokens keeps proposing more until the other rows have theirs
        self._final, chunk = max_tokens + proposals + 1, proposals + 1
        self._room = room = min(self._final, INITIAL_CAPACITY)  # tokens after the prompts
        self._reach = 1  # tokens after its prompt that a row can have before the next step
        self._cache = make_cache(model, prompt, room, chunk=chunk, quantize=quantize)
        self._draft_cache = make_cache(draft, prompt, room, chunk=chunk)
        for who, cache in (("the model", self._cache), ("assistant_model", self._draft_cache)):
            try:
                cache.check_crop()
            except ValueError as error:
                raise ValueError(f"{who} cannot drop rejected proposals: {error}") from None
        # Either vocabulary may have more padding: the draft proposes no token that the model lacks,
        # and reads its own last token in place of one that it lacks
        self._vocab, self._drafted = model.config.vocab_size, draft.config.vocab_size
        known = prompt._replace(ids=prompt.ids.clamp(max=self._drafted - 1))
        prefill(draft, self._draft_cache, known, prefill_chunk_size, copies)
        self._logits: Tensor | None = prefill(
            model, self._cache, prompt, prefill_chunk_size, copies
        )
        prompt = prompt.repeat(copies)
        b, self._t = prompt.ids.shape
        self._seen = sampling.seen(*prompt, self._vocab)
        self._tokens = torch.cat((prompt.ids, prompt.ids.new_zeros(b, room)), 1)
        self._prompts = self._cache.lengths.clone()  # [B]
        self._generated = torch.zeros_like(self._prompts)  # tokens after them
        self._replay = self._new_replay()

    def __call__(self, remaining: int) -> Tensor:
        if self._logits is None:
            self._make_room()
            return self._replay(self._step, remaining)
        logits, self._logits = self._logits, None
        new = self._sampling(logits, self._seen, self._generated, self._draws)
        nothing = new.new_zeros(len(new), self._k)
        return self._record(nothing, torch.zeros_like(new), new)

    def select(self, index: Tensor) -> None:
        index = index.to(self._tokens.device)
        for part in (self._cache, self._draft_cache, self._draws):
            part.select(index)
        self._tokens, self._prompts = self._tokens[index], self._prompts[index]
        self._generated = self._generated[index]
        self._seen = None if self._seen is None else self._seen[index]
        self._replay = self._new_replay()

    def _make_room(self) -> None:
        """Memory for a step's tokens. Only where it may be short does the host ask the device how
        many there are."""
        most = self._k + 1
        if self._room < self._final and self._reach + most > self._room:
            self._reach = int(self._generated.max())
            if self._reach + most > self._room:
                more = min(self._final - self._room, self._t + self._room)
                self._room += more
                for cache in (self._cache, self._draft_cache):
                    cache.grow(cache.capacity + more)
                zeros = self._tokens.new_zeros(len(self._tokens), more)
                self._tokens = torch.cat((self._tokens, zeros), 1)
                self._replay = self._new_replay()
        self._reach += most

    def _step(self) -> Tensor:
        proposed, q, seen = self._propose()
        held = self._prompts + self._generated
        self._cache.crop(held - 1)  # all but the last token
        out = self._model(
            torch.cat((self._recent(1), proposed), 1), past_key_values=self._cache, logits_to_keep=0
        )
        b, n, v = out.logits.shape
        flat_seen = None if seen is None else seen.flatten(0, 1)
        generated = (self._generated[:, None] + torch.arange(n, device=held.device)).flatten()
        scores = self._sampling.scores(out.logits.flatten(0, 1), flat_seen, generated).view(b, n, v)
        if q is None:
            choice = argmax(scores)
            kept = count_leading(choice[:, :-1] == proposed)
            return self._record(proposed, kept, _at(choice, kept))
        return self._record(
            proposed, *accept_proposals(scores.softmax(-1), q, proposed, self._draws)
        )

    def _propose(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Proposals [B, k]; if sampled, from which q [B, k, V]; seen [B, k + 1, V] before each."""
        sampling = self._sampling
        # The draft has not read its own last proposal: the last two tokens are new to it then
        self._draft_cache.crop(self._prompts + self._generated - 2)
        new, seen = self._recent(2), self._seen
        proposed, q, all_seen = [], [], [] if seen is None else [seen]
        for i in range(self._k):
            known = new.clamp(max=self._drafted - 1)
            out = self._draft(known, past_key_values=self._draft_cache, logits_to_keep=1)
            scores = sampling.scores(self._fit(out.logits[:, -1]), seen, self._generated + i)
            if sampling.do_sample:
                q.append(scores.softmax(-1))
                new = draw(q[-1], self._draws).clamp(min=0)[:, None]
            else:
                new = scores.argmax(-1, keepdim=True)
            if seen is not None:
                seen = seen.scatter(1, new, True)
                all_seen.append(seen)
            proposed.append(new)
        return (
            torch.cat(proposed, 1),
            torch.stack(q, 1) if q else None,
            torch.stack(all_seen, 1) if all_seen else None,
        )

    def _fit(self, logits: Tensor) -> Tensor:
        """The draft's logits [B, any] as [B, V] of the model, cut or continued."""
        lacking = self._vocab - self._drafted
        return functional.pad(logits, (0, lacking), value=float("-inf")) if lacking else logits

    def _recent(self, n: int) -> Tensor:
        """The last n tokens of every row: [B, n]."""
        at = self._t + self._generated[:, None] + torch.arange(-n, 0, device=self._generated.device)
        return self._tokens.gather(1, at)

    def _record(self, proposed: Tensor, kept: Tensor, last: Tensor) -> Tensor:
        """Keep so many proposals and the token after them: [B, k + 1], ABSENT behind it."""
        column = torch.arange(self._k + 1, device=kept.device)
        new = torch.cat((proposed, last[:, None]), 1)
        new = torch.where(column == kept[:, None], last[:, None], new)
        real = column <= kept[:, None]
        tokens = new.clamp(min=0)
        self._tokens.scatter_(1, self._t + self._generated[:, None] + column, tokens)
        if self._seen is not None:
            self._seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), True)
        self._generated.add_(kept + 1).clamp_(max=self._max_tokens)
        return new.masked_fill(~real, ABSENT)

    def _new_replay(self) -> Replay:
        return Replay(next(self._model.parameters()), self._draws.generator)
