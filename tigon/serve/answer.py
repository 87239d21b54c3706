"""A text that is being written: tokens go in on one thread, and text comes out on another."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tigon.generation.settings import GenerationSettings
from tigon.kernels.loss.argmax import NOT_FINITE
from tigon.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class ScoredToken(NamedTuple):
    """A token with its log-probability."""

    token: int
    text: str
    logprob: float
    top: list[tuple[str, float]]  # the likeliest tokens, as text with their log-probabilities
    offset: int  # characters of the answer before it
    end: int  # and with it


@dataclass
class Piece:
    """What has been written since the last one was taken."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""  # why the answer ends here

    @property
    def last(self) -> bool:
        """Returns whether nothing follows."""
        return self.finish_reason is not None or bool(self.error)


class StopFilter:
    """Passes text on, but for what may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]):
        self.strings = strings
        self.pending = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Takes more text; returns what is certain to come before any stop string.

        Of two stop strings the one that ends first counts. Nothing follows one that was `found`.
        """
        text = self.pending + text
        ends = [(at + len(s), at) for s in self.strings if (at := text.find(s)) >= 0]
        if ends:
            self.pending, self.found = "", True
            return text[: min(ends)[1]]
        longest = max((_overlap(text, s) for s in self.strings), default=0)
        self.pending = text[len(text) - longest :]
        return text[: len(text) - longest]

    def finish(self) -> str:
        """Returns the text that was held back: no stop string has come of it."""
        pending, self.pending = self.pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of a text that a stop string begins with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


class TokenTexts:
    """The texts of single tokens as they are inside of a text, kept once they are known."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._known = tokenizer, dict[int, str]()
        # Decoders treat the first token of a text in another way
        self._first = tokenizer.encode("a", add_special_tokens=False)
        self._start = len(tokenizer.decode(self._first))

    def __call__(self, token: int) -> str:
        """Returns a token's text, with U+FFFD for a part of a character."""
        if token not in self._known:
            self._known[token] = self._tokenizer.decode([*self._first, token])[self._start :]
        return self._known[token]


class Answer:
    """What one answer is made of, and what is written of it.

    The engine calls `append` and `fail`; its reader is told by `notify` that there is something to
    `take`, each time where it `streams`, else at the end. What is not taken yet is kept: at most
    `max_tokens` tokens. A reader that goes away calls `cancel`.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        max_tokens: int,
        tokenizer: Tokenizer,
        *,
        adapter: str | None = None,  # of the model's
        texts: TokenTexts | None = None,  # where log-probabilities are asked for
        top: int = 0,
        streams: bool = False,
        notify: Callable[[], None] = lambda: None,
    ):
        self.prompt, self.settings, self.max_tokens = prompt, settings, max_tokens
        self.adapter = adapter
        self.started = 0  # steps that write a token of it
        self.tokens = 0  # tokens that were written
        self.cancelled, self.created = False, time.monotonic()
        self._texts, self._top, self._streams, self._notify = texts, top, streams, notify
        special = {s: tokenizer.special_id(s) for s in settings.stop_strings}
        self._ends = {*settings.eos_token_id, *special.values()} - {None}
        self._filter = StopFilter([s for s, token in special.items() if token is None])
        self._stream = tokenizer.decode_stream(skip_special_tokens=True)
        self._decoded = self._shown = 0  # characters, with those held back and without
        self._scored: list[ScoredToken] = []  # held back with their text
        self._lock, self._piece, self.ended = threading.Lock(), Piece(), False

    @property
    def logprobs(self) -> bool:
        """Returns whether log-probabilities are asked for."""
        return self._texts is not None

    def append(self, output: Sequence[float]) -> None:
        """Takes the next token, a row of `DecodeBatch.step`, unless the answer has ended."""
        if self.ended:
            return
        token = int(output[0])
        self.tokens += 1
        if token == NOT_FINITE:
            self.fail(
                f"the scores of token {self.tokens - 1} after the prompt are not finite: look for "
                "nan, inf or huge values in the weights"
            )
        elif token in self._ends:
            self._write(self._finish_text(), "stop")
        else:
            text = self._stream.step(token) or ""
            before = self._decoded
            self._count_characters(text)
            if self._texts is not None:
                self._scored.append(self._score(token, output, before))
            shown = self._filter.feed(text)
            if self._filter.found:
                self._write(shown, "stop")
            elif self.tokens == self.max_tokens:
                self._write(shown + self._finish_text(), "length")
            elif shown or self._scored:
                self._write(shown, None)

    def fail(self, error: str) -> None:
        """Ends the answer by an error."""
        if not self.ended:
            with self._lock:
                self.ended, self._piece.error = True, error
            self._notify()

    def take(self) -> Piece:
        """Returns what was written since the last call."""
        with self._lock:
            piece, self._piece = self._piece, Piece()
        return piece

    def cancel(self) -> None:
        """Tells that nobody reads on: its row is free after the next step."""
        self.cancelled = True

    def _finish_text(self) -> str:
        """Returns the end of the text: a character that was cut off, and what was held back."""
        rest = self._stream.finish()
        self._count_characters(rest)
        shown = self._filter.feed(rest)
        return shown if self._filter.found else shown + self._filter.finish()

    def _count_characters(self, text: str) -> None:
        """Adds to the decoded text; held back tokens without a text are a part of its first
        character, which may belong to a stop string."""
        if text:
            start = self._decoded
            self._scored = [
                s._replace(end=start + 1) if s.offset == start else s for s in self._scored
            ]
        self._decoded += len(text)

    def _write(self, text: str, finish_reason: FinishReason | None) -> None:
        """Adds text to what the reader can take, with the scores of the tokens that end in it."""
        self._shown += len(text)
        last = finish_reason is not None
        # A token that ends in a character's beginning has no text yet
        count = sum(s.end <= self._shown and (last or s.end > s.offset) for s in self._scored)
        with self._lock:
            self._piece.text += text
            self._piece.scored += self._scored[:count]
            self._piece.finish_reason = finish_reason
            self.ended = finish_reason is not None
        del self._scored[:count]
        if self._streams or self.ended:
            self._notify()

    def _score(self, token: int, output: Sequence[float], offset: int) -> ScoredToken:
        """Returns a token's log-probability and those of the likeliest ones from a step's row."""
        assert self._texts is not None
        half = len(output) // 2 + 1
        likeliest = zip(output[2 : 2 + self._top], output[half : half + self._top], strict=True)
        top = [(self._texts(int(other)), logprob) for other, logprob in likeliest]
        return ScoredToken(token, self._texts(token), output[1], top, offset, self._decoded)
