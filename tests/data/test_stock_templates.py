"""What is learned of conversations under the chat templates that TRL ships."""

import re
from copy import copy
from itertools import groupby
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.data.stock_templates import (
    CONVERSATIONS,
    STEMS,
    STYLES,
    TOOLS,
    TURNS,
    Style,
    read_template,
    write_tokenizer,
)
from tigon.data import ChatEncoder, Example, Format
from tigon.data.examples import EncodingReport
from tigon.tokenizer import Tokenizer

STOCK = [stem for stem in STEMS if not stem.endswith("_training")]
TRAINING = [stem for stem in STEMS if stem.endswith("_training")]
EMPTY = re.compile(r"\s*<think>\s*</think>\n*")
OPEN = re.compile(r"<think>\s*(</think>\s*)?\Z")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    pytest.importorskip("trl")
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def encoder(directory):
    shared = Tokenizer.from_pretrained(directory)

    def make(stem: str, **options: Any) -> ChatEncoder:
        tokenizer = copy(shared)
        tokenizer.chat_template = read_template(stem)
        return ChatEncoder(tokenizer, **options)

    return make


def row_of(name: str, *, parts: bool = False) -> dict[str, Any]:
    messages = CONVERSATIONS[name]
    if parts:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return {"messages": messages} | ({"tools": TOOLS} if "call" in name else {})


def encode(encoder: ChatEncoder, row: dict[str, Any]) -> list[Example]:
    encoder.pass_report = EncodingReport()
    format = encoder.detect(row, Format())
    return list(encoder.row(row, encoder.check_first_row(row, format)))


def runs(encoder: ChatEncoder, example: Example) -> list[tuple[bool, str]]:
    """The text of each run of tokens that are learned, or not."""
    pairs = zip(example.ids, example.per_token["supervised"], strict=True)
    return [
        (bool(learned), encoder.tokenizer.decode([i for i, _ in run]))
        for learned, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def learned(encoder: ChatEncoder, examples: list[Example]) -> list[list[str]]:
    return [[text for yes, text in runs(encoder, e) if yes] for e in examples]


def texts(style: Style, name: str, turns: list[int]) -> list[str]:
    found = [style.text(TURNS[name][turn], name) for turn in turns]
    return [*found[:-1], found[-1] + style.final]


def test_all_stock_templates_are_tried():
    pytest.importorskip("trl")
    assert sorted(STYLES) == STOCK


@pytest.mark.parametrize("stem", STOCK)
def test_what_is_learned(stem, encoder, theirs):
    style = STYLES[stem]
    whole, each, last = (encoder(stem, train_on=t) for t in ("assistant", "all_turns", "last"))
    tried = 0
    for name in TURNS.keys() - set(style.untried):
        row = row_of(name, parts=style.parts)
        turns = list(range(len(TURNS[name])))
        if message := style.error(name):
            for failing in (whole, each):
                with pytest.raises(ValueError, match=message):
                    encode(failing, row)
            continue
        kept = style.kept.get(name, turns)
        if not style.marks:
            assert learned(whole, encode(whole, row)) == [texts(style, name, kept)], name
            assert whole.pass_report.rewritten == len(turns) - len(kept)
        assert learned(last, encode(last, row)) == [texts(style, name, turns[-1:])], name
        rows = [kept, *([turn] for turn in reversed(turns) if turn not in kept)]
        examples = encode(each, row)
        assert learned(each, examples) == [texts(style, name, turns) for turns in rows], name
        assert (each.pass_report.rewritten, each.pass_report.extra) == (0, len(rows) - 1)
        assert set(each.pass_report.missing_openers) == ({style.opener} if style.opener else set())
        check_contexts(each, examples, row, rows, style, theirs)
        tried += 1
    assert tried >= 5 or stem == "glm4moe"


def check_contexts(
    encoder: ChatEncoder,
    examples: list[Example],
    row: dict[str, Any],
    rows: list[list[int]],
    style: Style,
    theirs: Any,
) -> None:
    """In front of each learned turn is what transformers gives to inference."""
    messages = encoder.tokenizer.convert_messages(row["messages"], row.get("tools"))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    options = {"tools": row.get("tools"), "chat_template": encoder.tokenizer.chat_template}
    for example, turns in zip(examples, rows, strict=True):
        context, place = "", iter(turns)
        for yes, text in runs(encoder, example):
            if yes:
                prompt = theirs.apply_chat_template(
                    messages[: answers[next(place)]],
                    tokenize=False,
                    add_generation_prompt=True,
                    **options,
                )
                assert OPEN.sub("", context) == OPEN.sub("", prompt)
                assert (
                    style.opener
                    or OPEN.search(prompt)
                    or context == prompt
                    or EMPTY.search(context)
                )
            context += text
        assert next(place, None) is None


@pytest.mark.parametrize("stem", TRAINING)
def test_marked_templates_as_transformers_masks_them(stem, encoder, theirs):
    style = STYLES[stem.removesuffix("_training")]
    ours = encoder(stem, must_end=False)
    each = encoder(stem, train_on="all_turns", must_end=False)
    tried = 0
    for name in TURNS.keys() - set(style.untried):
        row = row_of(name, parts=style.parts)
        try:
            (example,) = encode(ours, row)
        except ValueError as error:
            assert "writes nothing of" in str(error) or "chat template failed" in str(error)
            continue
        options = {"tools": row.get("tools"), "chat_template": ours.tokenizer.chat_template}
        expected = theirs.apply_chat_template(
            ours.tokenizer.convert_messages(row["messages"], row.get("tools")),
            return_assistant_tokens_mask=True,
            return_dict=True,
            **options,
        )
        assert list(example.ids) == expected["input_ids"]
        masks = Example(example.ids, {"supervised": expected["assistant_masks"]})
        found = [text for yes, text in runs(ours, masks) if yes]
        without = [EMPTY.sub("", text) if EMPTY.match(text) else text for text in found]
        assert learned(ours, [example]) == [without], name
        tried += 1
        if name == "text and call" and "is not what it writes" in str(style.error(name)):
            with pytest.raises(ValueError, match="is not what it writes"):
                encode(each, row)
            continue
        found = "".join(text for texts in learned(each, encode(each, row)) for text in texts)
        for turn in TURNS[name]:
            answer = turn[1] if isinstance(turn, tuple) else turn
            assert found.count(answer) == TURNS[name].count(turn) or "call" in answer
    assert tried >= 4
