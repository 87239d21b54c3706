"""Locates the assistant's turns in the text of a conversation.

A turn is what the chat template adds to the prompt from which a model would generate it.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tigon.tokenizer.chat_template import Message, RenderedChat, render

# What chat templates write around reasoning
THINKING = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_OPENERS = "|".join(re.escape(opener) for opener, _ in THINKING)
_EMPTY = "|".join(rf"{re.escape(opener)}\s*{re.escape(closer)}" for opener, closer in THINKING)
_STARTS_OPEN = re.compile(rf"\s*(?:{_OPENERS})")
_ENDS_OPEN = re.compile(rf"(?:{_OPENERS})\s*\Z")
_ENDS_IN_THINKING = re.compile(rf"(?:{_EMPTY}|{_OPENERS})\s*\Z")
_EMPTY_BLOCK = re.compile(rf"\s*(?:{_EMPTY})[\r\n]*")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

ADVICE = (
    "mark what the assistant says in the template with {% generation %}...{% endgeneration %} "
    "(chat_template= takes the new template, in training its file)"
)


def skip_empty_thinking(text: str, start: int) -> int:
    """Returns the end of an empty block of reasoning that begins or is open at `start`.

    Returns `start` if there is no such block.
    """
    opened = _ENDS_OPEN.search(text, max(0, start - 64), start)
    block = _EMPTY_BLOCK.match(text, opened.start() if opened else start)
    return max(start, block.end()) if block else start


class Turn(NamedTuple):
    """A turn of the assistant."""

    rendered: RenderedChat  # the conversation up to the turn
    start: int  # where the turn begins in it: the length of its prompt


class Conversation:
    """Renders a conversation up to each turn once; `special_tokens` may end a turn."""

    def __init__(
        self,
        template: str,
        messages: Sequence[Message],
        variables: dict[str, Any],
        special_tokens: Collection[str] = (),
    ) -> None:
        self.template, self.messages, self.variables = template, messages, variables
        self.special_tokens = tuple(special_tokens)
        self.turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self.has_generation = _GENERATION.search(template) is not None
        self.full = self.render(messages)
        self.missing_opener = ""  # of reasoning: ends prompts, but is not in conversations
        self._prefixes = {len(messages) - 1: self.full}
        self._turns: dict[int, Turn] = {}

    def render(self, messages: Sequence[Message], **options: Any) -> RenderedChat:
        return render(self.template, messages, **options, **self.variables)

    def turn(self, i: int) -> Turn:
        """Returns the turn messages[i]: the conversation up to its end, and where it begins, in
        most templates at the end of its prompt; ValueError where that is ambiguous."""
        if i not in self._turns:
            prompt = self._render_prefix(i, self.messages[:i], add_generation_prompt=True).text
            rendered = self._prefix(i)
            follows = rendered.text.startswith(prompt)
            self._turns[i] = (
                Turn(rendered, len(prompt)) if follows else self._align(i, prompt, rendered)
            )
        return self._turns[i]

    def turn_end(self, i: int, text: str) -> int | None:
        """Returns where the turn ends in `text`, which may go on; None if it differs there.

        A special token that ends the full conversation may be missing in `text`, if the token in
        front of it is one that ends messages.
        """
        if i in self._turns and text.startswith(self.turn(i).rendered.text):
            return len(self.turn(i).rendered.text)
        turn = self._prefix(i)
        end = len(turn.text) if text.startswith(turn.text) else self._end_without_token(i, text)
        return end if end is not None and self.turn(i).rendered is turn else None

    def _end_without_token(self, i: int, text: str) -> int | None:
        """Returns where the turn ends in `text` if special tokens at the end of it are missing
        there; None if it differs otherwise."""
        turn = self._prefix(i).text
        end = turn.rstrip()
        while token := self._last_token(end):
            end = end.removesuffix(token)
            shorter = end.rstrip()
            if not (token := self._last_token(shorter)):
                return None
            if text.startswith(shorter):
                start = self.turn(i).start
                ends_messages = token in turn[:start] and start < len(shorter)
                return common_prefix_length(text[: len(end)], end) if ends_messages else None
            end = shorter
        return None

    def check_end(self) -> None:
        """Raises ValueError if the template always ends in the prompt for another turn."""
        if self.has_generation or "add_generation_prompt" in self.template or not self.turns:
            return
        messages = self.messages[: self.turns[0] + 1]
        text = self.render(messages).text
        try:
            longer = self.render([*messages, {"role": "user", "content": "?"}]).text
        except ValueError:
            return
        end = text[common_prefix_length(text, longer) :]
        if end and longer.endswith(end):
            raise ValueError(
                f"the chat template ends in a prompt for another turn, ...{end!r}, which would "
                "pass for what the assistant says: put it into {% if add_generation_prompt %}..."
                "{% endif %}"
            )

    def _prefix(self, i: int) -> RenderedChat:
        """Renders the conversation up to messages[i]."""
        if i not in self._prefixes:
            self._prefixes[i] = self._render_prefix(i, self.messages[: i + 1])
        return self._prefixes[i]

    def _align(self, i: int, prompt: str, turn: RenderedChat) -> Turn:
        """Locates a turn whose text does not begin with its prompt, since reasoning or earlier
        messages are written differently; ValueError if neither explains it."""
        common = common_prefix_length(turn.text, prompt)
        thinking = _ENDS_IN_THINKING.search(prompt)
        start = thinking.start() if thinking else len(prompt)
        if thinking and turn.text.startswith(prompt[:start]):
            if _EMPTY_BLOCK.match(turn.text, start):
                return Turn(turn, common)
            if not _STARTS_OPEN.match(turn.text, start):
                self.missing_opener = prompt[start:]
                return Turn(turn, start)
            if self.has_generation:  # whose blocks are learned of the turn
                return Turn(turn, common)
        if moved := self._move_after_prompt(i, prompt, turn):
            return Turn(moved, len(prompt))
        if thinking and not _ENDS_OPEN.search(prompt):
            advice = (
                "the prompt turns reasoning off, and the message has some: turn it on with "
                "chat_template_kwargs (most templates read enable_thinking), or leave it out"
            )
        else:
            advice = f"{self._advice}, or make the message fit the prompt"
        raise ValueError(
            f"the chat template's prompt for messages[{i}] is not what it writes in the "
            f"conversation: after {turn.text[:common][-20:]!r} one goes on "
            f"{prompt[common : common + 40]!r}, the other {turn.text[common : common + 40]!r}: "
            f"{advice}"
        )

    def _move_after_prompt(self, i: int, prompt: str, turn: RenderedChat) -> RenderedChat | None:
        """Puts a turn that changes earlier messages behind its prompt; None if it cannot."""
        if i == 0:
            return None
        before = self._render_prefix(i, self.messages[: i - 1]).text if i > 1 else ""
        last_message = prompt.removeprefix(before)
        position = turn.text.rfind(last_message)
        if not prompt.startswith(before) or not last_message.strip() or position < 0:
            return None
        start = position + len(last_message)
        blocks = [
            (max(at, start) - start + len(prompt), text[max(0, start - at) :])
            for at, text in turn.generations
            if at + len(text) > start
        ]
        return RenderedChat(prompt + turn.text[start:], blocks)

    def _render_prefix(self, i: int, messages: Sequence[Message], **options: Any) -> RenderedChat:
        """Renders messages up to messages[i]; its error says that the turn there cannot be told."""
        try:
            return self.render(messages, **options)
        except ValueError as error:
            raise ValueError(
                f"cannot tell what the assistant says in messages[{i}], because the conversation "
                f"up to there does not render: {error}; {self._advice}"
            ) from error

    @property
    def _advice(self) -> str:
        """Says what makes turns clear whose prompts do not tell where they begin."""
        return "learn all turns alike (train_on=assistant)" if self.has_generation else ADVICE

    def _last_token(self, text: str) -> str:
        """Returns the longest special token in which the text ends, or an empty text."""
        tokens = [token for token in self.special_tokens if text.endswith(token)]
        return max(tokens, key=len, default="")


def common_prefix_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the number of characters, tokens or messages with which both begin."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
