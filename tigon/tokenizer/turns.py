"""Where the assistant's turns are in the text of a conversation, each as inference shows it."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from tigon.tokenizer.chat import Message, Rendered, render

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
_OPENS = re.compile(rf"\s*(?:{_OPENERS})")
_ENDS_OPEN = re.compile(rf"(?:{_OPENERS})\s*\Z")
_ENDS_IN_THINKING = re.compile(rf"(?:{_EMPTY}|{_OPENERS})\s*\Z")
_EMPTY_BLOCK = re.compile(rf"\s*(?:{_EMPTY})[\r\n]*")

ADVICE = (
    "mark what the assistant says in the template with {% generation %}...{% endgeneration %} "
    "(chat_template= takes the new template, in training its file)"
)


def behind_empty_thinking(text: str, start: int) -> int:
    """`start`, or the end of the empty block of reasoning that it is in or in front of."""
    opened = _ENDS_OPEN.search(text, max(0, start - 64), start)
    block = _EMPTY_BLOCK.match(text, opened.start() if opened else start)
    return max(start, block.end()) if block else start


class Conversation:
    """A conversation as a chat template writes it, whole and up to each turn of the assistant.

    `special_tokens` are the texts of the tokens that may end a turn.
    """

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
        self.marked = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None
        self.whole = render(template, messages, **variables)
        self.missing_opener = ""  # in which prompts end, and which conversations do not have
        self._written = {len(messages) - 1: self.whole}
        self._found: dict[int, tuple[Rendered, int]] = {}

    def until(self, i: int) -> Rendered:
        """The conversation up to the turn messages[i], as inference shows it."""
        return self._find(i)[0]

    def start(self, i: int) -> int:
        """Where inference's prompt for the turn ends there."""
        return self._find(i)[1]

    def stop(self, i: int, text: str) -> int | None:
        """Where the turn ends in `text`, which goes on behind it; None if it is rewritten there.

        A special token that ends the whole conversation may be missing in the longer text, if in
        front of it is one that ends messages.
        """
        if i in self._found and text.startswith(self.until(i).text):
            return len(self.until(i).text)
        turn = self._write(i)
        end = len(turn.text) if text.startswith(turn.text) else self._stop_before_end(i, text)
        return end if end is not None and self.until(i) is turn else None

    def _stop_before_end(self, i: int, text: str) -> int | None:
        turn = self._write(i).text
        end = turn.rstrip()
        while token := self._last_token(end):
            end = end.removesuffix(token)
            shorter = end.rstrip()
            if not (token := self._last_token(shorter)):
                return None
            if text.startswith(shorter):
                start = self.start(i)
                ends_messages = token in turn[:start] and start < len(shorter)
                return common_length(text[: len(end)], end) if ends_messages else None
            end = shorter
        return None

    def check_end(self) -> None:
        """ValueError for a template that ends in the prompt for another turn, asked for or not."""
        if self.marked or "add_generation_prompt" in self.template or not self.turns:
            return
        messages = self.messages[: self.turns[0] + 1]
        text = render(self.template, messages, **self.variables).text
        try:
            more = [*messages, {"role": "user", "content": "?"}]
            longer = render(self.template, more, **self.variables).text
        except ValueError:
            return
        end = text[common_length(text, longer) :]
        if end and longer.endswith(end):
            raise ValueError(
                f"the chat template ends in a prompt for another turn, ...{end!r}, which would "
                "pass for what the assistant says: put it into {% if add_generation_prompt %}..."
                "{% endif %}"
            )

    def _write(self, i: int) -> Rendered:
        """The conversation up to messages[i], as the template writes it."""
        if i not in self._written:
            self._written[i] = self._render(i, self.messages[: i + 1])
        return self._written[i]

    def _find(self, i: int) -> tuple[Rendered, int]:
        if i not in self._found:
            prompt = self._render(i, self.messages[:i], add_generation_prompt=True).text
            turn = self._write(i)
            same = turn.text.startswith(prompt)
            self._found[i] = (turn, len(prompt)) if same else self._part(i, prompt, turn)
        return self._found[i]

    def _part(self, i: int, prompt: str, turn: Rendered) -> tuple[Rendered, int]:
        """The same where the template's conversation does not begin with its prompt."""
        common = common_length(turn.text, prompt)
        thinking = _ENDS_IN_THINKING.search(prompt)
        at = thinking.start() if thinking else len(prompt)
        if thinking and turn.text.startswith(prompt[:at]):
            if _EMPTY_BLOCK.match(turn.text, at):
                return turn, common
            if not _OPENS.match(turn.text, at):
                self.missing_opener = prompt[at:]
                return turn, at
            if self.marked:  # the marks say what is learned of the turn
                return turn, common
        if behind := self._behind(i, prompt, turn):
            return behind, len(prompt)
        if thinking and not _ENDS_OPEN.search(prompt):
            advice = (
                "the prompt turns reasoning off, and the message has some: turn it on with "
                "chat_template_kwargs (most templates read enable_thinking), or leave it out"
            )
        else:
            advice = f"{ADVICE}, or make the message fit the prompt"
        raise ValueError(
            f"the chat template's prompt for messages[{i}] is not what it writes in the "
            f"conversation: after {turn.text[:common][-20:]!r} one goes on "
            f"{prompt[common : common + 40]!r}, the other {turn.text[common : common + 40]!r}: "
            f"{advice}"
        )

    def _behind(self, i: int, prompt: str, turn: Rendered) -> Rendered | None:
        """The turn behind its prompt, where it makes the template write earlier messages
        differently, but the last one in front of it the same."""
        if i == 0:
            return None
        before = self._render(i, self.messages[: i - 1]).text if i > 1 else ""
        last = prompt.removeprefix(before)
        at = turn.text.rfind(last)
        if not prompt.startswith(before) or not last.strip() or at < 0:
            return None
        start = at + len(last)
        blocks = [
            (max(place, start) - start + len(prompt), text[max(0, start - place) :])
            for place, text in turn.generations
            if place + len(text) > start
        ]
        return Rendered(prompt + turn.text[start:], blocks)

    def _render(self, i: int, messages: Sequence[Message], **more: Any) -> Rendered:
        try:
            return render(self.template, messages, **more, **self.variables)
        except ValueError as error:
            raise ValueError(
                f"cannot tell what the assistant says in messages[{i}], because the conversation "
                f"up to there does not render: {error}; {ADVICE}"
            ) from error

    def _last_token(self, text: str) -> str:
        """The special token that the text ends in, or nothing."""
        if not text.endswith(self.special_tokens):
            return ""
        return max((t for t in self.special_tokens if text.endswith(t)), key=len)


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many characters, tokens or messages both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
