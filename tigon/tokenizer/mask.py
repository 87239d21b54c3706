"""How much each token of a conversation counts: which fine-tuning learns, and with what weight."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from tigon.tokenizer.chat import Message, Rendered, check_messages, render
from tigon.tokenizer.turns import Conversation, behind_empty_thinking

TrainOn = Literal["assistant", "all_turns", "last", "all"]


class Span(NamedTuple):
    """Characters of the conversation's text that count alike."""

    start: int
    stop: int
    weight: float


class WeightedRows(NamedTuple):
    """Texts of one conversation, each with the spans that are learned of it."""

    rows: list[tuple[str, list[Span]]]
    rewritten: int  # turns that are learned in no row, as they are written differently there
    missing_opener: str  # of reasoning, which inference's prompts have and the texts do not


UNMARKED = "the chat template marks no token as the assistant's in this chat"


def learned_messages(
    messages: Sequence[Message], train_on: TrainOn, weights: Sequence[float | None] | None = None
) -> dict[int, float]:
    """The messages that are learned for their role or weight, and how much each counts.

    With train_on=all, those that have a weight of their own.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns and train_on != "all":
        raise ValueError("messages have no turn of the role 'assistant': nothing to learn")
    learned = {"last": turns[-1:], "all": []}.get(train_on, turns)
    chosen = dict.fromkeys(learned, 1.0)
    chosen |= {i: weight for i, weight in enumerate(weights or ()) if weight is not None}
    if train_on != "all":  # what is not learned needs no place
        chosen = {i: weight for i, weight in chosen.items() if weight}
    return chosen


def learned_turns(
    messages: Sequence[Message], train_on: TrainOn, weights: Sequence[float | None]
) -> list[int]:
    """The turns of the assistant that are learned; ValueError if it is no conversation."""
    check_messages(messages)
    learned = learned_messages(messages, train_on, weights)
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
    """The conversation's text, and the character ranges in it that are learned.

    The assistant's are the template's {% generation %} blocks. Without any, a turn is the text that
    follows the prompt for it, if the text begins with the conversation up to that turn. `train_on`:
    every such turn; every turn, for which there are more rows, each the conversation up to a turn;
    the last turn; or all of the text. `weights` has one for each message, which counts in place of
    what `train_on` says of it; None: as that says. ValueError where a place is unclear.
    """
    chosen = learned_messages(messages, train_on, weights)
    conversation = Conversation(template, messages, variables, special_tokens)
    if train_on == "all":
        found = _all_of(conversation, chosen)
    else:
        found = _turns_of(conversation, chosen, train_on)
    if train_on_empty_thinking or train_on == "all":
        return found
    rows = []
    for text, spans in found.rows:
        starts = [behind_empty_thinking(text, span.start) for span in spans]
        moved = [s._replace(start=start) for s, start in zip(spans, starts, strict=True)]
        rows.append((text, moved))
    return found._replace(rows=rows)


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


def _all_of(conversation: Conversation, chosen: Mapping[int, float]) -> WeightedRows:
    """All of the text, but for the messages that have weights of their own."""
    text = conversation.whole.text
    said = [i for i in conversation.turns if i in chosen]
    spans = _others(conversation, chosen, text)
    if said and conversation.marked:
        spans += _marked(conversation, said, chosen)
    elif said:
        conversation.check_end()
        for i in said:
            stop = conversation.stop(i, text)
            if stop is None:
                raise ValueError(
                    f"messages[{i}] has a weight of its own, but the chat template rewrites it "
                    "when turns follow (for instance, it drops the reasoning of earlier turns): "
                    "weigh it like the others, or train on turns alone (train_on=all_turns)"
                )
            spans.append(Span(conversation.start(i), stop, chosen[i]))
    rest, at = [], 0
    for start, stop, _ in sorted(spans):
        rest.append(Span(at, start, 1.0))
        at = max(at, stop)
    rest.append(Span(at, len(text), 1.0))
    return WeightedRows([(text, spans + rest)], 0, conversation.missing_opener)


def _turns_of(
    conversation: Conversation, chosen: Mapping[int, float], train_on: TrainOn
) -> WeightedRows:
    """Rows in which the chosen turns are learned, and the other chosen messages in the first."""
    said = [i for i in conversation.turns if i in chosen]
    rendered = _first_row(conversation, chosen, train_on)
    spans = _others(conversation, chosen, rendered.text)
    if not said:
        return WeightedRows([(rendered.text, spans)], 0, "")
    whole = rendered is conversation.whole
    if conversation.marked and train_on != "all_turns" and whole:
        spans += _marked(conversation, said, chosen)
        return WeightedRows([(rendered.text, spans)], 0, "")
    conversation.check_end()
    rows, left = [], said[::-1]
    while True:
        pending, left, end = left, [], len(rendered.text)
        for i in pending:
            stop = conversation.stop(i, rendered.text)
            if stop is None or stop > end:
                left.append(i)
                continue
            end = conversation.start(i)
            ranges = _blocks(rendered, end, stop) if conversation.marked else [(end, stop)]
            spans += [Span(*place, chosen[i]) for place in ranges]
        rows.append((rendered.text, spans))
        if not left or train_on != "all_turns":
            break
        rendered, spans = conversation.until(left[0]), []
    if not any(spans for _, spans in rows):
        raise ValueError(UNMARKED)
    return WeightedRows(rows, len(left), conversation.missing_opener)


def _first_row(
    conversation: Conversation, chosen: Mapping[int, float], train_on: TrainOn
) -> Rendered:
    """The conversation, or up to its last learned turn if that would be rewritten in it."""
    said = [i for i in conversation.turns if i in chosen]
    whole = conversation.whole
    if not said or (conversation.marked and train_on == "assistant"):
        return whole
    if conversation.marked and train_on == "last" and said[-1] == len(conversation.messages) - 1:
        return whole
    if conversation.stop(said[-1], whole.text) is not None:
        return whole
    if max(chosen) > said[-1]:
        raise _unclear(max(chosen))
    return conversation.until(said[-1])


def _marked(
    conversation: Conversation, said: Sequence[int], chosen: Mapping[int, float]
) -> list[Span]:
    """The {% generation %} blocks of these turns in the whole conversation."""
    turns, blocks = conversation.turns, _blocks(conversation.whole)
    if len(said) == len(turns) and len({chosen[i] for i in turns}) == 1:
        found = {said[-1]: blocks}  # it does not matter whose they are
    else:
        found = {i: _blocks_of_turn(blocks, conversation, i) for i in said}
    if not any(found.values()):
        raise ValueError(UNMARKED)
    return [Span(*place, chosen[i]) for i, places in found.items() for place in places]


def _blocks(rendered: Rendered, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """The {% generation %} blocks that have text between these places."""
    for at, text in rendered.generations:
        if not rendered.text.startswith(text, at):
            raise ValueError(
                "the chat template's {% generation %} block is inside a macro, a filter or a "
                "{% set %} block, where its place in the text is unknown: move it out"
            )
    blocks = [(at, at + len(text)) for at, text in rendered.generations]
    if stop is None:
        return blocks
    return [(first, min(last, stop)) for first, last in blocks if start < last and first < stop]


def _blocks_of_turn(
    blocks: list[tuple[int, int]], conversation: Conversation, i: int
) -> list[tuple[int, int]]:
    """Those of the turn i: a turn may have several, or none."""
    turns = conversation.turns
    at = turns.index(i)
    first, last = 0, len(blocks)
    try:
        if at:
            first = _count_blocks(conversation, turns[at - 1])
        if i != turns[-1]:
            last = _count_blocks(conversation, i)
    except ValueError as error:
        raise ValueError(
            f"the chat template has {len(blocks)} {{% generation %}} blocks for {len(turns)} turns "
            f"of the assistant, and which are whose is unclear: {error}"
        ) from error
    return blocks[first:last]


def _count_blocks(conversation: Conversation, i: int) -> int:
    """How many blocks the conversation up to messages[i] has in the whole text."""
    full = conversation.whole
    begin = render(conversation.template, conversation.messages[: i + 1], **conversation.variables)
    if full.text.startswith(begin.text):
        return sum(start < len(begin.text) for start, _ in full.generations)
    # Earlier turns are written anew, such as without their reasoning, if they are still the same
    both = list(zip(begin.generations, full.generations, strict=False))
    if len(both) < len(begin.generations) or not all(a.endswith(b) for (_, a), (_, b) in both):
        raise ValueError(
            f"it writes messages[{i}] differently when turns follow. Weigh all turns alike "
            "(train_on=assistant), or learn each in its own context (train_on=all_turns)"
        )
    return len(both)


def _others(conversation: Conversation, chosen: Mapping[int, float], whole: str) -> list[Span]:
    """Of messages that are not the assistant's: what each adds to the messages before it."""
    spans = []
    for i in sorted(chosen.keys() - set(conversation.turns)):
        messages, given = conversation.messages, conversation.variables
        try:
            before = render(conversation.template, messages[:i], **given).text if i else ""
            text = render(conversation.template, messages[: i + 1], **given).text
        except ValueError as error:
            raise ValueError(
                f"messages[{i}] has a weight of its own, but where it is in the text is unclear, "
                f"because the conversation up to there does not render: {error}"
            ) from error
        if not (text.startswith(before) and whole.startswith(text)):
            raise _unclear(i)
        spans.append(Span(len(before), len(text), chosen[i]))
    return spans


def _unclear(i: int) -> ValueError:
    return ValueError(
        f"messages[{i}] has a weight of its own, but where it is in the text is unclear: the "
        "chat template writes what is before differently in the whole conversation"
    )
