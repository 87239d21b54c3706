"""Speculative decoding: a draft proposes tokens, and the model scores them all in one pass.

The text is distributed as if the model had generated it token by token; greedily, it is the same.
Source: Leviathan et al. (arXiv 2211.17192), for every row of a batch on its own.

# B rows, T prompt tokens, k proposed tokens, V vocab
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tigon.generation.loop import ABSENT
from tigon.generation.sampling import Draws, sample_columns
from tigon.generation.steps import INITIAL_CAPACITY, Call, GraphedStep
from tigon.kernels.loss.argmax import argmax
from tigon.layers import StaticCache


def accept_proposals(p: Tensor, q: Tensor, proposed: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Samples by rejection: returns the numbers of accepted proposals [B], and the next tokens [B].

    `proposed` [B, k] are samples of the draft's probabilities q [B, k, V]; p [B, k + 1, V] are the
    model's. Accepts each with probability p / q up to the first rejection, which is replaced by a
    sample of p - q where positive.
    """
    k = proposed.shape[1]
    target, draft = (x.gather(2, proposed[..., None]).squeeze(2) for x in (p[:, :k], q))
    accepted = count_leading(draws.uniform(k) * draft < target)
    residual = p.clone()
    residual[:, :k] -= q
    return accepted, sample_columns(_select_column(residual, accepted).clamp(min=0), draws)


def count_leading(accept: Tensor) -> Tensor:
    """Returns the number of leading True columns in each row of `accept` [B, k]: [B]."""
    return accept.long().cumprod(1).sum(1)


def _select_column(x: Tensor, column: Tensor) -> Tensor:
    """Returns the column `column` [B] of each row of x [B, n, ...]."""
    return x[torch.arange(len(column), device=x.device), column]


class SpeculativeSteps:
    """Steps of which each proposes k tokens and scores them; the first samples one token alone.

    The prompts are read before it, by the constructor. Rows accept different numbers of tokens, so
    their lengths differ.
    """

    def __init__(self, call: Call, draws: Draws):
        model, draft, prompt = call.model, call.assistant, call.prompt
        assert draft is not None
        self._k = proposals = call.settings.num_assistant_tokens
        self._model, self._draft = model, draft
        self._sampling, self._draws = call.sampling, draws
        # A row that has all its tokens keeps proposing more until the other rows have theirs
        self._final, chunk = call.max_tokens + proposals + 1, proposals + 1
        self._capacity = capacity = min(self._final, INITIAL_CAPACITY)  # tokens after the prompts
        self._max_generated = 1  # an upper bound of `_generated` before the next step
        options = {"chunk": max(16, chunk), "rollback": chunk}
        self._cache = call.make_cache(capacity, **options)
        self._draft_cache = call.make_empty_cache(draft, capacity, **options)
        if self._cache.chunk < chunk:
            raise ValueError(
                f"past_key_values takes chunk={self._cache.chunk} tokens at a time, and "
                f"num_assistant_tokens={proposals} need {chunk}: give static_cache chunk="
            )
        for name, state in (("the model", self._cache), ("assistant_model", self._draft_cache)):
            try:
                state.check_crop(chunk)
            except ValueError as error:
                raise ValueError(f"{name} cannot drop rejected proposals: {error}") from None
        # Either vocabulary may have more padding: the draft cannot propose tokens beyond the
        # model's, and reads its last token in place of those beyond its own
        self._vocab, self._draft_vocab = model.config.vocab_size, draft.config.vocab_size
        draft_prompt = prompt._replace(ids=prompt.ids.clamp(max=self._draft_vocab - 1))
        call.prefill(draft, self._draft_cache, draft_prompt)
        self._logits: Tensor | None = call.prefill(model, self._cache, prompt)
        prompt = call.rows
        b, self._t = prompt.ids.shape
        self._seen = call.sampling.seen(*prompt, self._vocab)
        self._tokens = torch.cat((prompt.ids, prompt.ids.new_zeros(b, capacity)), 1)
        self._prompt_lengths = self._cache.lengths.clone()  # [B]
        self._generated = torch.zeros_like(self._prompt_lengths)  # [B], tokens after the prompts
        self._limits = torch.full_like(self._generated, call.max_tokens)  # [B], of `_generated`
        self._replay = GraphedStep(self._model, self._draws.generator)

    def __call__(self, remaining: int) -> Tensor:
        """Returns the next tokens [b, k + 1] of each row, ABSENT behind those that are accepted."""
        if self._logits is None:
            self._grow()
            return self._replay(self._step, remaining)
        logits, self._logits = self._logits, None
        new = self._sampling(logits, self._seen, self._generated, self._draws)
        no_proposals = new.new_zeros(len(new), self._k)
        return self._append(no_proposals, torch.zeros_like(new), new)

    def select(self, index: Tensor) -> None:
        """Keeps the rows of the index, in both caches."""
        index = index.to(self._tokens.device)
        for state in (self._cache, self._draft_cache, self._draws):
            state.select(index)
        self._tokens, self._prompt_lengths = self._tokens[index], self._prompt_lengths[index]
        self._generated, self._limits = self._generated[index], self._limits[index]
        self._seen = None if self._seen is None else self._seen[index]
        self._replay = GraphedStep(self._model, self._draws.generator)

    def hold(self, ended: Mapping[int, int]) -> None:
        """Lets these rows propose the same again and again."""
        self._limits[list(ended)] = self._limits.new_tensor(list(ended.values()))
        self._generated.clamp_(max=self._limits)

    def finish(self, tokens: Sequence[int]) -> StaticCache:
        """Returns the model's cache, in which each row has its own length."""
        self.hold(dict(enumerate(tokens)))
        self._cache.crop(self._prompt_lengths + self._generated - 1)
        self._cache.refresh()
        return self._cache

    def _grow(self) -> None:
        """Allocates memory for more tokens if a step's may not fit; only then the host waits for
        the device, to learn how many there are."""
        new = self._k + 1
        if self._capacity < self._final and self._max_generated + new > self._capacity:
            self._max_generated = int(self._generated.max())
            if self._max_generated + new > self._capacity:
                more = min(self._final - self._capacity, self._t + self._capacity)
                self._capacity += more
                for cache in (self._cache, self._draft_cache):
                    cache.grow(cache.capacity + more)
                zeros = self._tokens.new_zeros(len(self._tokens), more)
                self._tokens = torch.cat((self._tokens, zeros), 1)
                self._replay = GraphedStep(self._model, self._draws.generator)
        self._max_generated += new

    def _step(self) -> Tensor:
        """Proposes with the assistant and verifies; returns new tokens [B, k + 1]."""
        proposed, q, seen = self._propose()
        lengths = self._prompt_lengths + self._generated
        self._cache.crop(lengths - 1)  # all but the last token
        ids = torch.cat((self._last_tokens(1), proposed), 1)
        out = self._model(ids, past_key_values=self._cache, logits_to_keep=0)
        b, n, v = out.logits.shape
        flat_seen = None if seen is None else seen.flatten(0, 1)
        generated = (self._generated[:, None] + torch.arange(n, device=lengths.device)).flatten()
        scores = self._sampling.scores(out.logits.flatten(0, 1), flat_seen, generated).view(b, n, v)
        if q is None:
            choice = argmax(scores)
            accepted = count_leading(choice[:, :-1] == proposed)
            return self._append(proposed, accepted, _select_column(choice, accepted))
        accepted, last = accept_proposals(scores.softmax(-1), q, proposed, self._draws)
        return self._append(proposed, accepted, last)

    def _propose(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Proposals [B, k], their q [B, k, V] if sampled, and tokens seen before [B, k + 1, V]."""
        sampling = self._sampling
        # The draft has not read its last proposal, so up to two tokens are new to it
        self._draft_cache.crop(self._prompt_lengths + self._generated - 2)
        new, seen = self._last_tokens(2), self._seen
        proposed, q, all_seen = [], [], [] if seen is None else [seen]
        for i in range(self._k):
            ids = new.clamp(max=self._draft_vocab - 1)
            out = self._draft(ids, past_key_values=self._draft_cache, logits_to_keep=1)
            logits = out.logits[:, -1]
            if missing := self._vocab - self._draft_vocab:  # padding with nothing copies, too
                logits = functional.pad(logits, (0, missing), value=float("-inf"))
            scores = sampling.scores(logits, seen, self._generated + i)
            if sampling.settings.do_sample:
                q.append(scores.softmax(-1))
                new = sample_columns(q[-1], self._draws).clamp(min=0)[:, None]
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

    def _last_tokens(self, n: int) -> Tensor:
        """Returns the last n tokens of every row: [B, n]."""
        at = self._t + self._generated[:, None] + torch.arange(-n, 0, device=self._generated.device)
        return self._tokens.gather(1, at)

    def _append(self, proposed: Tensor, accepted: Tensor, last: Tensor) -> Tensor:
        """Appends accepted proposals and the token after; returns [B, k + 1], ABSENT-padded."""
        column = torch.arange(self._k + 1, device=accepted.device)
        new = torch.cat((proposed, last[:, None]), 1)
        new = torch.where(column == accepted[:, None], last[:, None], new)
        real = column <= accepted[:, None]
        tokens = new.clamp(min=0)
        self._tokens.scatter_(1, self._t + self._generated[:, None] + column, tokens)
        if self._seen is not None:
            self._seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), True)
        self._generated.add_(accepted + 1).clamp_(max=self._limits)
        return new.masked_fill(~real, ABSENT)
