"""Which tokens of a conversation the assistant says: those that fine-tuning learns."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from tigon.tokenizer.chat import Message, Rendered, render

Spans = list[tuple[int, int]]

_ADVICE = (
    "mark what the assistant says in the template with {% generation %}...{% endgeneration %} "
    "(chat_template= takes the new template, in training its file)"
)


def assistant_spans(template: str, messages: Sequence[Message], **given: Any) -> tuple[str, Spans]:
    """The conversation's text, and the character ranges in it that the assistant says.

    Those are the template's {% generation %} blocks. Without any, a turn is the text that follows
    the prompt for it; ValueError if the template renders an earlier turn, or a prompt, differently
    in the whole conversation.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages have no turn of the role 'assistant': nothing to learn")
    full = render(template, messages, **given)
    if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template):
        return full.text, _block_spans(full)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if "add_generation_prompt" not in template:
        _check_end(template, messages[: turns[0] + 1], given)
    return full.text, [_turn_span(template, messages, i, full.text, given) for i in turns]


def token_mask(offsets: list[tuple[int, int]], spans: Spans) -> list[bool]:
    """Which tokens have a character in a span; a token across its edge counts."""
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    mask = [False] * len(offsets)
    for start, end in filter(lambda span: span[0] < span[1], spans):
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        mask[first:last] = [True] * (last - first)
    return mask


def _block_spans(full: Rendered) -> Spans:
    for start, text in full.generations:
        if not full.text.startswith(text, start):
            raise ValueError(
                "the chat template's {% generation %} block is inside a macro, a filter or a "
                "{% set %} block, where its place in the text is unknown: move it out"
            )
    return [(start, start + len(text)) for start, text in full.generations]


def _check_end(template: str, messages: Sequence[Message], given: dict[str, Any]) -> None:
    """Refuses a template that ends in the prompt for another turn, asked for or not."""
    text = render(template, messages, **given).text
    try:
        longer = render(template, [*messages, {"role": "user", "content": "?"}], **given).text
    except ValueError:
        return
    end = text[_common_prefix(text, longer) :]
    if end and longer.endswith(end):
        raise ValueError(
            f"the chat template ends in a prompt for another turn, ...{end!r}, which would pass "
            "for what the assistant says: put it into {% if add_generation_prompt %}...{% endif %}"
        )


def _common_prefix(a: str, b: str) -> int:
    return next((n for n, c in enumerate(a) if not b.startswith(c, n)), len(a))


def _turn_span(
    template: str, messages: Sequence[Message], i: int, full: str, given: dict[str, Any]
) -> tuple[int, int]:
    try:
        turn = render(template, messages[: i + 1], **given).text
        prompt = render(template, messages[:i], add_generation_prompt=True, **given).text
    except ValueError as error:
        raise ValueError(
            f"cannot tell what the assistant says in messages[{i}], because the conversation up to "
            f"there does not render: {error}; {_ADVICE}"
        ) from error
    if not full.startswith(turn):
        raise ValueError(
            f"the chat template rewrites messages[{i}] when turns follow (for instance, it drops "
            f"the reasoning of earlier turns), so what the assistant says there is unclear: "
            f"{_ADVICE}, or make each turn an example of its own"
        )
    if not turn.startswith(prompt):
        n = _common_prefix(turn, prompt)
        raise ValueError(
            f"the chat template's prompt for messages[{i}] is not what it writes in the "
            f"conversation: after {turn[:n][-20:]!r} one goes on {prompt[n : n + 40]!r}, the other "
            f"{turn[n : n + 40]!r}: {_ADVICE}, or make the message fit the prompt"
        )
    return len(prompt), len(turn)
