"""How much each token of a conversation counts: which fine-tuning learns, and with what weight."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from tigon.tokenizer.chat import Message, Rendered, render

TrainOn = Literal["assistant", "last", "all"]


class Span(NamedTuple):
    """Characters of the conversation's text that count alike."""

    start: int
    stop: int
    weight: float


UNMARKED = "the chat template marks no token as the assistant's in this chat"
_ADVICE = (
    "mark what the assistant says in the template with {% generation %}...{% endgeneration %} "
    "(chat_template= takes the new template, in training its file)"
)


def weighted_spans(
    template: str,
    messages: Sequence[Message],
    *,
    train_on: TrainOn = "assistant",
    weights: Sequence[float | None] | None = None,
    **given: Any,
) -> tuple[str, list[Span]]:
    """The conversation's text, and the character ranges in it that are learned.

    The assistant's are the template's {% generation %} blocks. Without any, a turn is the text that
    follows the prompt for it; ValueError if the template renders an earlier turn, or a prompt,
    differently in the whole conversation. `train_on`: every turn of the assistant, its last one, or
    all of the text. `weights` has one for each message, which counts in place of what `train_on`
    says of it; None: as that says.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns and train_on != "all":
        raise ValueError("messages have no turn of the role 'assistant': nothing to learn")
    learned = {"assistant": turns, "last": turns[-1:], "all": []}[train_on]
    chosen = dict.fromkeys(learned, 1.0)
    chosen |= {i: weight for i, weight in enumerate(weights or ()) if weight is not None}
    if train_on != "all":  # what is not learned needs no place
        chosen = {i: weight for i, weight in chosen.items() if weight}
    full = render(template, messages, **given)
    spans = [
        Span(start, stop, chosen[i])
        for i, ranges in _ranges(template, messages, turns, chosen, full, given).items()
        for start, stop in ranges
    ]
    if train_on == "all":
        spans += _rest(spans, len(full.text))
    return full.text, spans


def token_weights(offsets: list[tuple[int, int]], spans: Sequence[Span]) -> list[float]:
    """The weight of each token: the largest of the spans that have one of its characters."""
    weights = [0.0] * len(offsets)
    for start, end, weight in sorted(spans, key=lambda span: span.weight):
        if start < end:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            weights[first:last] = [weight] * (last - first)
    return weights


def never_ends(end: str, after: str) -> ValueError:
    """The error for a turn that ends in the text `end`, with `after` behind it."""
    where = f", and what follows, {after!r:.40}, is not learned" if after.strip() else ""
    return ValueError(
        f"the chat template ends what the assistant says in ...{end!r}, which is not a special "
        f"token{where}: the model would never learn to stop. End these turns in one token, such as "
        "{{ eos_token }}, inside {% generation %} if there is one (chat_template= takes the new "
        "template, in training its file)"
    )


def _rest(spans: Sequence[Span], length: int) -> list[Span]:
    """The text between the spans, which counts fully."""
    rest, at = [], 0
    for start, stop, _ in sorted(spans):
        rest.append(Span(at, start, 1.0))
        at = max(at, stop)
    return [*rest, Span(at, length, 1.0)]


def _ranges(
    template: str,
    messages: Sequence[Message],
    turns: Sequence[int],
    chosen: Mapping[int, float],
    full: Rendered,
    given: dict[str, Any],
) -> dict[int, list[tuple[int, int]]]:
    """Where each of the chosen messages is in the text."""
    said = [i for i in turns if i in chosen]
    if not said:
        found = {}
    elif re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template):
        alike = len(said) == len(turns) and len({chosen[i] for i in turns}) == 1
        blocks = _blocks(full)
        if alike:  # it does not matter whose they are
            found = {said[-1]: blocks}
        else:
            found = {i: _own(blocks, template, messages, turns, i, full, given) for i in said}
        if not any(found.values()):
            raise ValueError(UNMARKED)
    else:
        if "add_generation_prompt" not in template:
            _check_end(template, messages[: turns[0] + 1], given)
        found = {i: [_turn_range(template, messages, i, full.text, given)] for i in said}
    others = [i for i in chosen if i not in turns]
    return found | {i: [_message_range(template, messages, i, full.text, given)] for i in others}


def _blocks(full: Rendered) -> list[tuple[int, int]]:
    """The {% generation %} blocks."""
    for start, text in full.generations:
        if not full.text.startswith(text, start):
            raise ValueError(
                "the chat template's {% generation %} block is inside a macro, a filter or a "
                "{% set %} block, where its place in the text is unknown: move it out"
            )
    return [(start, start + len(text)) for start, text in full.generations]


def _own(
    blocks: list[tuple[int, int]],
    template: str,
    messages: Sequence[Message],
    turns: Sequence[int],
    i: int,
    full: Rendered,
    given: dict[str, Any],
) -> list[tuple[int, int]]:
    """Those of the turn i: a turn may have several, or none."""
    at = turns.index(i)
    first, last = 0, len(blocks)
    try:
        if at:
            first = _count_blocks(template, messages[: turns[at - 1] + 1], full, given)
        if i != turns[-1]:
            last = _count_blocks(template, messages[: i + 1], full, given)
    except ValueError as error:
        raise ValueError(
            f"the chat template has {len(blocks)} {{% generation %}} blocks for {len(turns)} turns "
            f"of the assistant, and which are whose is unclear: {error}"
        ) from error
    return blocks[first:last]


def _count_blocks(
    template: str, messages: Sequence[Message], full: Rendered, given: dict[str, Any]
) -> int:
    """How many blocks the first messages of the conversation have in its text."""
    begin = render(template, messages, **given)
    if full.text.startswith(begin.text):
        return sum(start < len(begin.text) for start, _ in full.generations)
    # Earlier turns are written anew, such as without their reasoning, if they are still the same
    both = list(zip(begin.generations, full.generations, strict=False))
    if len(both) < len(begin.generations) or not all(a.endswith(b) for (_, a), (_, b) in both):
        raise ValueError(
            f"it writes messages[{len(messages) - 1}] differently when turns follow. Weigh all "
            "turns alike (train_on=assistant), or make each turn an example of its own"
        )
    return len(both)


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


def _message_range(
    template: str, messages: Sequence[Message], i: int, full: str, given: dict[str, Any]
) -> tuple[int, int]:
    """Of a message that is not the assistant's: what it adds to the messages before it."""
    try:
        before = render(template, messages[:i], **given).text if i else ""
        text = render(template, messages[: i + 1], **given).text
    except ValueError as error:
        raise ValueError(
            f"messages[{i}] has a weight of its own, but where it is in the text is unclear, "
            f"because the conversation up to there does not render: {error}"
        ) from error
    if not (text.startswith(before) and full.startswith(text)):
        raise ValueError(
            f"messages[{i}] has a weight of its own, but where it is in the text is unclear: the "
            "chat template writes what is before differently in the whole conversation"
        )
    return len(before), len(text)


def _turn_range(
    template: str, messages: Sequence[Message], i: int, full: str, given: dict[str, Any]
) -> tuple[int, int]:
    try:
        whole = i + 1 == len(messages)
        turn = full if whole else render(template, messages[: i + 1], **given).text
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
