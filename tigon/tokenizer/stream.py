"""Text of a growing token sequence, as soon as it is certain."""

import re

import tokenizers

from tigon.tokenizer.failures import Failures

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class DecodeStream:
    """The joined results of `step` and `finish` equal `decode` of all the tokens.

    A piece never ends inside a character: text comes late rather than wrong.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, ignored: frozenset[int], failures: Failures
    ) -> None:
        self._backend = backend
        self._ignored = ignored
        self._failures = failures
        # A run of byte tokens is text, or one U+FFFD a byte; which, is known only at its end
        decoder = backend.decoder
        self._byte_fallback = decoder is not None and b"ByteFallback" in decoder.__getstate__()
        # The tokens of the last piece are kept: decoders treat the start of a text specially
        self._ids: list[int] = []
        self._context = 0  # how many of them are the last piece's
        self._returned = 0  # characters of their text that were returned

    def step(self, token_id: int) -> str | None:
        """The text that the token completes, if any."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._ignored:
            return None
        self._ids.append(token_id)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return None
        text = self._text()
        # An unfinished character decodes to one U+FFFD
        certain = len(text) - text.endswith("\ufffd")
        if certain <= self._returned:
            return None
        piece = text[self._returned : certain]
        self._returned = certain
        if certain == len(text):
            del self._ids[: self._context]
            self._context = len(self._ids)
            self._returned = len(self._text())
        return piece

    def finish(self) -> str:
        """The text still held back; one U+FFFD or more where the tokens end inside a character."""
        rest = self._text()[self._returned :]
        self._ids, self._context, self._returned = [], 0, 0
        return rest

    def _text(self) -> str:
        with self._failures:
            return self._backend.decode(self._ids, skip_special_tokens=False)
