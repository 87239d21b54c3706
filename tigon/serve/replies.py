"""The bodies of OpenAI's protocol: completions, chunks of a stream, errors."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tigon.serve.answer import Answer, Piece, ScoredToken
from tigon.serve.protocol import ChatRequest, Request, RequestError

STATUS_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(error: RequestError) -> dict[str, Any]:
    """Returns the body of a refusal."""
    server = error.status >= 500
    kind = STATUS_TYPES.get(error.status, "server_error" if server else "invalid_request_error")
    values = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": values}


def event(body: dict[str, Any]) -> bytes:
    """Returns an event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


@dataclass
class Reply:
    """Makes the bodies of one request's reply, of one choice for each answer."""

    request: Request
    model: str
    answers: Sequence[Answer]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Returns whether it is a reply to messages."""
        return isinstance(self.request, ChatRequest)

    def completion(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the body of a reply that comes at once, from each answer's only piece."""
        choices = []
        for i, piece in enumerate(pieces):
            text: dict[str, Any] = {"text": piece.text}
            if self.chat:
                text = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
            choices.append(self._choice(i, text, piece))
        return self._body(choices, "") | {"usage": self._usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Returns the chunks that begin a stream: in a chat, who speaks."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(i, delta, Piece()) for i in range(len(self.answers)) if self.chat]

    def chunks(self, choice: int, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a piece: its text, and at the end in a chat why it ends."""
        if not self.chat:
            return [self._chunk(choice, {"text": piece.text}, piece)]
        chunks = []
        if piece.text or piece.scored:
            text = Piece(piece.text, piece.scored)
            chunks.append(self._chunk(choice, {"delta": {"content": piece.text}}, text))
        if piece.finish_reason is not None:
            end = Piece(finish_reason=piece.finish_reason)
            chunks.append(self._chunk(choice, {"delta": {}}, end))
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """Returns the chunk with the counts of tokens, if it was asked for."""
        return [self._body([], ".chunk") | {"usage": self._usage()}] if self._counts else []

    @property
    def _counts(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    def _chunk(self, choice: int, text: dict[str, Any], piece: Piece) -> dict[str, Any]:
        body = self._body([self._choice(choice, text, piece)], ".chunk")
        return body | ({"usage": None} if self._counts else {})

    def _body(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        """Returns what surrounds the choices."""
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": f"chat.completion{kind}" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: dict[str, Any], piece: Piece) -> dict[str, Any]:
        """Returns one choice with these parts."""
        logprobs = None
        if self.request.top is not None and (piece.scored or not self.request.stream):
            make = _chat_logprobs if self.chat else _text_logprobs
            logprobs = make(piece.scored)
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _usage(self) -> dict[str, int]:
        """Returns the counts of tokens; the prompt of several choices counts once."""
        prompts = sum(len(answer.prompt) for answer in self.answers[:: self.request.n])
        written = sum(answer.tokens for answer in self.answers)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
        }


def _chat_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """Returns the log-probabilities of a chat's tokens."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        bytes_ = None if "\ufffd" in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": bytes_}

    content = [
        entry(token.text, token.logprob) | {"top_logprobs": [entry(*other) for other in token.top]}
        for token in scored
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """Returns the log-probabilities of a text's tokens."""
    return {
        "tokens": [token.text for token in scored],
        "token_logprobs": [max(token.logprob, -9999.0) for token in scored],
        "top_logprobs": [{text: max(p, -9999.0) for text, p in token.top} for token in scored],
        "text_offset": [token.offset for token in scored],
    }
