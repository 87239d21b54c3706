"""Checks that no answer of a conversation is empty and that its chat template writes all of it."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from tigon.tokenizer import REASONING, THINKING, Tokenizer

MAX_SHAPES = 4096  # of conversations, that are remembered
# Appended to texts, to look for it in what a template makes of them; digits survive most filters
_MARK = "80417392650{:06d}7716"
_ADVICE = {
    "content": "use a template that writes it, or leave it out",
    "reasoning": "use a template that writes reasoning, or leave it out",
    "tool_calls": "use a template that knows tools, or leave the message out",
}
_CLOSERS = re.compile("|".join(re.escape(closer) for _, closer in THINKING))
_OPENERS = re.compile("|".join(re.escape(opener) for opener, _ in THINKING))

Message = Mapping[str, Any]


class EmptyAnswer(ValueError):
    """An answer without content, reasoning or tool calls."""


class _MarkedText(NamedTuple):
    """A text of a message with the mark that is put into it."""

    message: int
    place: str  # as in "['content']"
    kind: str  # a key of _ADVICE
    text: str
    words: Sequence[str]  # any of them shows that it is written: the mark, or those of the text

    def is_in(self, rendered: str) -> bool:
        """Whether a rendered conversation has any of the `words`, so that the text was written."""
        return any(word in rendered for word in self.words)


class ContentCheck:
    """Refuses conversations of which the tokenizer's chat template leaves something out.

    Each conversation is rendered once more with a mark in every text. As what a template leaves out
    depends on which messages have what, and not on their texts, this is done once for all
    conversations of the same shape.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[Any, tuple[int, str] | None] = {}

    def check(
        self,
        messages: Sequence[Message],
        learned: Collection[int],
        names: Sequence[str],
        /,
        **options: Any,
    ) -> None:
        """Raises ValueError for an empty answer among `learned` (EmptyAnswer), or for content that
        is not written.

        Reasoning has to be written of the turns in `learned` alone, and at the end of the
        conversation up to each: of earlier turns, templates drop it. `names` are those of the
        messages in their row; `options` are those of `apply_chat_template`.
        """
        for i in learned:
            if all(_is_blank(messages[i].get(k)) for k in ("content", "tool_calls", *REASONING)):
                raise EmptyAnswer(
                    f"{names[i]} is an empty answer, without content, reasoning or tool calls"
                )
        variables = sorted((k, repr(v)) for k, v in options.items() if k != "tools")
        context = frozenset(learned), bool(options.get("tools")), *variables
        # What a template may branch on: roles, keys, types of values, blocks of reasoning
        shape = [tuple((k, _value_shape(v, k)) for k, v in sorted(m.items())) for m in messages]
        key = tuple(shape), context
        if key in self._known:
            problem = self._known[key]
        else:
            texts: list[_MarkedText] = []
            marked = [_mark_message(i, message, texts) for i, message in enumerate(messages)]
            try:
                problem = self._find_unwritten(marked, texts, learned, options)
                if len(self._known) == MAX_SHAPES:
                    self._known.clear()
                self._known[key] = problem
            except ValueError:  # with marks, the template refuses it; others may have its words
                texts = [text._replace(words=text.text.split()) for text in texts]
                try:
                    problem = self._find_unwritten(messages, texts, learned, options)
                except ValueError:  # whoever encodes it will say why
                    return
        if problem:
            raise ValueError(f"{names[problem[0]]}{problem[1]}")

    def _find_unwritten(
        self,
        messages: Sequence[Message],
        texts: Sequence[_MarkedText],
        learned: Collection[int],
        options: dict[str, Any],
    ) -> tuple[int, str] | None:
        """Finds the first text that is neither in the rendered conversation nor in that up to its
        message, where reasoning that is learned has to be.

        Returns the index of its message, and what to say of it; None if all texts are written.
        """

        @cache
        def render(count: int) -> str:
            prefix = messages[:count]
            return str(self.tokenizer.apply_chat_template(prefix, tokenize=False, **options))

        full = render(len(messages))
        for text in texts:
            if text.kind == "reasoning" and text.message not in learned:
                continue
            if text.kind != "reasoning" and text.is_in(full):
                continue
            try:
                shown = render(text.message + 1)
            except ValueError:  # then only whole conversations tell
                shown = full
            if not text.is_in(shown):
                return text.message, _explain(text, messages)
        return None


def _explain(text: _MarkedText, messages: Sequence[Message]) -> str:
    """Say which text of a message the chat template leaves out, and what to do."""
    in_content = text.kind == "reasoning" and text.place.startswith("['content']")
    subject = "its reasoning" if in_content else "it"
    return (
        f"{text.place} (role {messages[text.message]['role']!r:.40}): the chat template writes "
        f"nothing of {subject}: {_ADVICE[text.kind]}"
    )


def _is_blank(value: Any) -> bool:
    """Whether a value is empty, or nothing but an empty block of reasoning."""
    if isinstance(value, str):
        return not _CLOSERS.sub("", _OPENERS.sub("", value)).strip()
    if isinstance(value, list | tuple):
        return all(map(_is_blank, value))
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return _is_blank(value["text"])
    return not value


def _mark_message(i: int, message: Message, texts: list[_MarkedText]) -> dict[str, Any]:
    """Copies a message with a mark in each of its texts, which are appended to `texts`."""
    copy = dict(message)

    def mark(place: str, kind: str, text: str) -> str:
        if not text.strip():
            return ""
        texts.append(_MarkedText(i, place, kind, text, [_MARK.format(len(texts))]))
        return texts[-1].words[0]

    def mark_content(place: str, text: str) -> str:
        closer = _CLOSERS.search(text) if message["role"] == "assistant" else None
        if closer is None:
            marked = mark(place, "content", text)
            return text + marked if marked else text  # which may be a text that "is none"
        before, after = text[: closer.start()], text[closer.start() :]
        before += mark(place, "reasoning", _OPENERS.split(before)[-1])
        return before + after + mark(place, "content", _CLOSERS.split(after)[-1])

    content = message.get("content")
    if isinstance(content, str):
        copy["content"] = mark_content("['content']", content)
    elif isinstance(content, list | tuple):
        copy["content"] = parts = list(content)
        for n, part in enumerate(parts):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts[n] = {**part, "text": mark_content(f"['content'][{n}]", part["text"])}
    key = next((key for key in REASONING if message.get(key) is not None), None)
    if key and isinstance(message[key], str):
        copy[key] = message[key] + mark(f"[{key!r}]", "reasoning", message[key])
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        copy["tool_calls"] = calls = list(calls)
        for n, call in enumerate(calls):
            place = f"['tool_calls'][{n}]" if len(calls) > 1 else "['tool_calls']"
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                name = function["name"]
                function_copy = {**function, "name": name + mark(place, "tool_calls", name)}
                calls[n] = (
                    {**call, "function": function_copy} if "function" in call else function_copy
                )
    return copy


def _value_shape(value: Any, key: str = "") -> Any:
    """Reduces a message's value to what a template may branch on: roles, keys, types, and which
    texts, before and after a block of reasoning, are blank."""
    if isinstance(value, str) and key != "role":
        closer = _CLOSERS.search(value)
        if closer is None:
            return str, bool(value.strip())
        before, after = value[: closer.start()], value[closer.end() :]
        texts = _OPENERS.split(before)[-1], _CLOSERS.split(after)[-1]
        return (str, *(bool(text.strip()) for text in texts))
    if isinstance(value, list | tuple):
        return (list, *map(_value_shape, value))
    if isinstance(value, Mapping):
        if key == "arguments":  # written as they are
            return dict
        return (dict, *((k, _value_shape(v, k)) for k, v in sorted(value.items())))
    return value if isinstance(value, str | bool | None) else type(value)
