"""Text of tokens that come one at a time."""

import re

import tokenizers

from tigon.tokenizer.files import library_errors

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class DecodeStream:
    """Decodes tokens one at a time: the joined pieces equal `decode` of all tokens.

    A piece never ends inside a character: text comes late rather than wrong.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, ignored_ids: frozenset[int], error_message: str
    ) -> None:
        self._backend = backend
        self._ignored_ids = ignored_ids
        self._error_message = error_message
        # Only the end of a run of byte tokens shows whether it is text or one U+FFFD a byte
        decoder = backend.decoder
        self._byte_fallback = decoder is not None and b"ByteFallback" in decoder.__getstate__()
        # With the tokens of the last piece, as decoders treat the start of a text specially
        self._ids: list[int] = []
        self._num_context = 0  # tokens of the last piece
        self._num_returned = 0  # characters of the text that were returned

    def step(self, token_id: int) -> str | None:
        """Decodes one more token, and returns the text that it completes, if any."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._ignored_ids:
            return None
        self._ids.append(token_id)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return None
        text = self._text()
        # An unfinished character decodes to one U+FFFD
        certain = len(text) - text.endswith("\ufffd")
        if certain <= self._num_returned:
            return None
        piece = text[self._num_returned : certain]
        self._num_returned = certain
        if certain == len(text):
            del self._ids[: self._num_context]
            self._num_context = len(self._ids)
            self._num_returned = len(self._text())
        return piece

    def finish(self) -> str:
        """Returns the rest of the text, with U+FFFD if the tokens end inside a character."""
        rest = self._text()[self._num_returned :]
        self._ids, self._num_context, self._num_returned = [], 0, 0
        return rest

    def _text(self) -> str:
        """Decodes the tokens that are kept, those of the last piece included."""
        with library_errors(self._error_message):
            return self._backend.decode(self._ids, skip_special_tokens=False)
