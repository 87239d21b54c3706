"""Computes the loss weight of each token of a conversation: 0 where fine-tuning learns nothing."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from tigon.tokenizer.chat_template import Message, RenderedChat, check_messages
from tigon.tokenizer.turns import Conversation, skip_empty_thinking

TrainOn = Literal["assistant", "all_turns", "last", "all"]
UNMARKED = "the chat template marks no token as the assistant's in this chat"


class Span(NamedTuple):
    """A range of characters of a text, with one loss weight."""

    start: int
    stop: int
    weight: float


class WeightedRows(NamedTuple):
    """The texts of one conversation, each with its learned spans: one row, or one a turn."""

    rows: list[tuple[str, list[Span]]]
    rewritten: int  # turns in no row: the chat template writes them differently when others follow
    missing_opener: str  # of reasoning: ends the prompts of inference, but is not in the texts


def message_weights(
    messages: Sequence[Message], train_on: TrainOn, weights: Sequence[float | None] | None
) -> dict[int, float]:
    """Returns the loss weights of the learned messages by index: 1 for the turns of `train_on`,
    unless `weights` has a number for a message; messages of weight 0 are left out.

    With train_on=all, only those in `weights`, also if they are 0: the rest of the text has weight
    1. Otherwise raises ValueError if there is no turn of the assistant.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns and train_on != "all":
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        raise ValueError(
            f"messages have no turn of the role 'assistant': nothing to learn of {roles:.100}"
        )
    chosen = dict.fromkeys({"last": turns[-1:], "all": []}.get(train_on, turns), 1.0)
    chosen |= {i: weight for i, weight in enumerate(weights or ()) if weight is not None}
    if train_on == "all":
        return chosen
    return {i: weight for i, weight in chosen.items() if weight}


def learned_turns(
    messages: Sequence[Message], train_on: TrainOn, weights: Sequence[float | None]
) -> list[int]:
    """Returns the indices of the learned turns of the assistant; ValueError if no conversation."""
    check_messages(messages)
    learned = message_weights(messages, train_on, weights)
    if train_on == "all":
        learned = {i: 1.0 for i, weight in enumerate(weights) if weight != 0}
    return [i for i in learned if messages[i]["role"] == "assistant"]


def weighted_rows(
    template: str,
    messages: Sequence[Message],
    special_tokens: Collection[str] = (),
    /,
    *,
    train_on: TrainOn = "assistant",
    weights: Sequence[float | None] | None = None,
    train_on_empty_thinking: bool = False,
    **variables: Any,
) -> WeightedRows:
    """Renders a conversation, and locates the characters that are learned.

    Takes the arguments of `Tokenizer.encode_chat_rows`. Raises ValueError if the position of a
    learned message is ambiguous.
    """
    chosen = message_weights(messages, train_on, weights)
    conversation = Conversation(template, messages, variables, special_tokens)
    if train_on == "all":
        return _weigh_all(conversation, chosen)
    result = _weigh_turns(conversation, chosen, train_on)
    if train_on_empty_thinking:
        return result
    rows = [
        (text, [s._replace(start=skip_empty_thinking(text, s.start)) for s in spans])
        for text, spans in result.rows
    ]
    return result._replace(rows=rows)


def token_weights(offsets: list[tuple[int, int]], spans: Sequence[Span]) -> list[float]:
    """Returns the weight of each token: the largest of the spans that overlap it, or 0."""
    weights = [0.0] * len(offsets)
    for start, stop, weight in sorted(spans, key=lambda span: span.weight):
        if start < stop:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, stop, key=itemgetter(0))
            weights[first:last] = [weight] * (last - first)
    return weights


def _weigh_all(conversation: Conversation, chosen: Mapping[int, float]) -> WeightedRows:
    """Gives all of the text the weight 1, except for the chosen messages."""
    text = conversation.full.text
    turns = [i for i in conversation.turns if i in chosen]
    spans = _message_spans(conversation, chosen, text)
    if turns:
        conversation.check_end()
    for i in turns:
        stop = conversation.turn_end(i, text)
        if stop is None:
            raise ValueError(
                f"messages[{i}] has a weight of its own, but the chat template rewrites it "
                "when turns follow (for instance, it drops the reasoning of earlier turns): "
                "weigh it like the others, or train on turns alone (train_on=all_turns)"
            )
        spans += _turn_spans(conversation, i, conversation.full, stop, chosen[i])
    gaps, end = [], 0
    for start, stop, _ in sorted(spans):
        gaps.append(Span(end, start, 1.0))
        end = max(end, stop)
    gaps.append(Span(end, len(text), 1.0))
    return WeightedRows([(text, spans + gaps)], 0, conversation.missing_opener)


def _weigh_turns(
    conversation: Conversation, chosen: Mapping[int, float], train_on: TrainOn
) -> WeightedRows:
    """Makes rows until each chosen turn is learned; other chosen messages are in the first."""
    turns = [i for i in conversation.turns if i in chosen]
    full = row = conversation.full
    if not turns:
        return WeightedRows([(full.text, _message_spans(conversation, chosen, full.text))], 0, "")
    is_end = turns[-1] == len(conversation.messages) - 1
    has_all = train_on == "assistant" or (train_on == "last" and is_end)
    are_alike = turns == conversation.turns and len({chosen[i] for i in turns}) == 1
    if conversation.has_generation and has_all and are_alike:  # all blocks, whichever turn's
        spans = [Span(*bounds, chosen[turns[0]]) for bounds in _blocks(full, 0, len(full.text))]
        if not spans:
            raise ValueError(UNMARKED)
        spans += _message_spans(conversation, chosen, full.text)
        return WeightedRows([(full.text, spans)], 0, "")
    if conversation.turn_end(turns[-1], full.text) is None:
        # What follows would change how this turn is written: the row ends with it
        if max(chosen) > turns[-1]:
            raise _ambiguous(max(chosen))
        row = conversation.turn(turns[-1]).rendered
    spans = _message_spans(conversation, chosen, row.text)
    conversation.check_end()
    rows, remaining = [], turns[::-1]
    while True:
        pending, remaining, end = remaining, [], len(row.text)
        for i in pending:
            stop = conversation.turn_end(i, row.text)
            if stop is None or stop > end:
                remaining.append(i)
                continue
            end = conversation.turn(i).start
            spans += _turn_spans(conversation, i, row, stop, chosen[i])
        rows.append((row.text, spans))
        if not remaining or train_on != "all_turns":
            break
        row, spans = conversation.turn(remaining[0]).rendered, []
    if not any(spans for _, spans in rows):
        raise ValueError(UNMARKED)
    return WeightedRows(rows, len(remaining), conversation.missing_opener)


def _turn_spans(
    conversation: Conversation, i: int, row: RenderedChat, stop: int, weight: float
) -> list[Span]:
    """Returns what is learned of the turn messages[i], which ends at `stop` in a row: its
    {% generation %} blocks, or all of it if the template has none."""
    start = conversation.turn(i).start
    ranges = _blocks(row, start, stop) if conversation.has_generation else [(start, stop)]
    return [Span(*bounds, weight) for bounds in ranges]


def _blocks(rendered: RenderedChat, start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the bounds of the {% generation %} blocks that overlap a range."""
    for at, text in rendered.generations:
        if not rendered.text.startswith(text, at):
            raise ValueError(
                "the chat template's {% generation %} block is inside a macro, a filter or a "
                "{% set %} block, where its place in the text is unknown: move it out"
            )
    blocks = [(at, at + len(text)) for at, text in rendered.generations]
    return [(first, min(last, stop)) for first, last in blocks if start < last and first < stop]


def _message_spans(
    conversation: Conversation, chosen: Mapping[int, float], full: str
) -> list[Span]:
    """Returns the spans of the chosen messages that are not the assistant's."""
    spans = []
    for i in sorted(chosen.keys() - set(conversation.turns)):
        messages = conversation.messages
        try:
            before = conversation.render(messages[:i]).text if i else ""
            text = conversation.render(messages[: i + 1]).text
        except ValueError as error:
            raise ValueError(
                f"messages[{i}] has a weight of its own, but where it is in the text is unclear, "
                f"because the conversation up to there does not render: {error}"
            ) from error
        if not (text.startswith(before) and full.startswith(text)):
            raise _ambiguous(i)
        spans.append(Span(len(before), len(text), chosen[i]))
    return spans


def _ambiguous(i: int) -> ValueError:
    """Makes the error for a message whose place in the text is unclear."""
    return ValueError(
        f"messages[{i}] has a weight of its own, but where it is in the text is unclear: the "
        "chat template writes what is before differently in the whole conversation"
    )
