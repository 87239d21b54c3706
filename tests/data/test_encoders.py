"""Rows to examples: which tokens are learned, with what weight, and what is reported."""

import json
import re
from typing import Any

import numpy as np
import pytest

from tests.support.examples import fingerprint
from tests.support.small import CHATML, write_tokenizer
from tests.tokenizer.chat_templates import QWEN3
from tigon.data import (
    ChatEncoder,
    Encoder,
    Example,
    Examples,
    Format,
    TextEncoder,
    examples,
    find_sources,
    sources,
)
from tigon.tokenizer import Tokenizer

HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
SO, BYE = {"role": "user", "content": "so"}, {"role": "assistant", "content": "bye"}
CHAT = [HI, HO, SO, BYE]
CRITIC = CHATML + "{# critic #}"


def said(tokenizer: Tokenizer, examples: Examples) -> list[tuple[str, float]]:
    """Each run of tokens that are learned alike, and its weight."""
    ones = np.ones(len(examples.tokens), dtype=np.float32)
    weights = np.where(examples.supervised, examples.per_token.get("loss_weights", ones), 0)
    edges = np.flatnonzero(np.diff(weights)) + 1
    runs = zip(np.split(examples.tokens, edges), np.split(weights, edges), strict=True)
    return [(tokenizer.decode(ids), float(weight[0])) for ids, weight in runs if weight[0]]


def test_text_ends_with_eos_and_knows_its_line(tokenizer, encode):
    rows = {"text": "the model"}, "", {"text": "whoever<|endoftext|>", "id": 7, "weight": 0.5}
    examples = encode(TextEncoder, *rows)
    eos = tokenizer.eos_token_id
    first, second = tokenizer.encode("the model"), tokenizer.encode("whoever")
    assert examples.tokens.tolist() == [*first, eos, *second, eos]
    assert examples.offsets.tolist() == [0, len(first) + 1, len(first) + len(second) + 2]
    assert said(tokenizer, examples) == [
        ("the model<|endoftext|>", 1),
        ("whoever<|endoftext|>", 0.5),
    ]
    places = [examples.location(p).rpartition("/")[2] for p in (0, len(first), len(first) + 1)]
    assert places == ["a.jsonl:1", "a.jsonl:1", "a.jsonl:3"]
    assert examples.report.ignored_keys == ("id",) and examples.report.rows == 2


@pytest.mark.parametrize(
    ("train_on", "messages", "expected"),
    [
        ("assistant", CHAT, [("ho<|im_end|>\n", 1), ("bye<|im_end|>\n", 1)]),
        ("assistant", [HI, HO, SO, BYE | {"train": False}], [("ho<|im_end|>\n", 1)]),
        (
            "assistant",
            [HI, HO | {"weight": 0.5}, SO, BYE | {"weight": 2}],
            [("ho<|im_end|>\n", 0.5), ("bye<|im_end|>\n", 2)],
        ),
        (
            "last",
            [HI, HO | {"train": True}, SO, BYE],
            [("ho<|im_end|>\n", 1), ("bye<|im_end|>\n", 1)],
        ),
        (
            "all",
            [HI, HO | {"weight": 0}, SO],
            [
                ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 1),
                ("<|im_start|>user\nso<|im_end|>\n", 1),
            ],
        ),
    ],
)
def test_what_is_learned_and_with_what_weight(tokenizer, encode, train_on, messages, expected):
    encoder = ChatEncoder(tokenizer, train_on=train_on)
    examples = encode(encoder, {"messages": messages})
    assert said(tokenizer, examples) == expected
    assert set(examples.per_token) == {
        "supervised",
        *(["loss_weights"] if {w for _, w in expected} - {1} else []),
    }
    plain = [{k: v for k, v in m.items() if k not in ("weight", "train")} for m in messages]
    assert tokenizer.decode(examples.tokens) == tokenizer.apply_chat_template(plain, tokenize=False)
    halved = encode(encoder, {"messages": messages, "weight": 0.5})
    assert said(tokenizer, halved) == [(text, weight / 2) for text, weight in expected]


def test_prompts_are_learned_only_with_train_on_all(tokenizer, encode):
    """And so are chats without an answer."""
    rows = [
        {"prompt": CHAT[:3], "completion": [BYE]},
        {"prompt": "the model ", "completion": "says"},
        {"messages": [HI]},
    ]
    answers, everything = (ChatEncoder(tokenizer, train_on=on) for on in ("assistant", "all"))
    assert said(tokenizer, encode(answers, rows[0])) == [("bye<|im_end|>\n", 1)]
    assert said(tokenizer, encode(answers, rows[1])) == [(" says<|endoftext|>", 1)]
    for row in rows:
        examples = encode(everything, row)
        assert said(tokenizer, examples) == [(tokenizer.decode(examples.tokens), 1)]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: prompt and completion must be texts"):
        encode(answers, rows[1], rows[0])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: prompt and completion must be lists of mes"):
        encode(answers, rows[0], rows[1])


def test_columns_that_some_blocks_lack_are_filled(tokenizer, encode, monkeypatch):
    rows = [{"messages": CHAT, **more} for more in ({}, {"weight": 0.5}, {}, {"weight": 1})]
    whole = encode(ChatEncoder, *rows)
    assert [weight for _, weight in said(tokenizer, whole)] == [1, 1, 0.5, 0.5, 1, 1, 1, 1]
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1)  # a block for each row
    blocks = encode(ChatEncoder, *rows)
    assert fingerprint(whole) == fingerprint(blocks) and whole.report == blocks.report
    np.testing.assert_array_equal(whole.origin, blocks.origin)
    np.testing.assert_array_equal(whole.offsets, blocks.offsets)
    assert blocks.per_token["loss_weights"].dtype == np.float32


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TURNS = [{"from": "human", "value": "hi", "role": 1}, {"from": "gpt", "value": "ho"}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (
            {"messages": [HI | {"id": 1}, HO | {"wieght": 0}], "source": "x", "weight": None},
            ("messages.id", "messages.wieght", "source"),
        ),
        ({"chat": TURNS}, ("chat.role",)),
        (
            {"messages": CHAT, "tools": [TOOL], "chat_template_kwargs": {"thinks": False}},
            ("chat_template_kwargs.thinks", "tools"),
        ),
        ({"messages": CHAT, "tools": [], "chat_template_kwargs": None}, ()),
    ],
)
def test_keys_that_nothing_reads_are_named(encode, row, keys):
    columns = {"messages": "chat"} if "chat" in row else {}
    report = encode(ChatEncoder, row, columns=columns).report
    assert report.ignored_keys == keys


def test_misspelled_roles_are_named(encode):
    def rows(*roles):
        return [{"messages": [*CHAT, {"role": role, "content": "x"}]} for role in roles]

    usual = rows("user", "tool", "developer", "human", "function")
    assert encode(ChatEncoder, *usual).report.unknown_roles == {}
    assert encode(ChatEncoder, *rows("critic"), template=CRITIC).report.unknown_roles == {}
    blocks = encode(ChatEncoder, *usual, *rows("asistant", "critic")).report
    blocks += encode(ChatEncoder, *rows("critic", "asistant")).report
    first, second = blocks.lines()
    assert re.fullmatch(
        r".*a\.jsonl:6 has a message of the role 'asistant', .*did you mean 'assistant'\?", first
    )
    assert re.fullmatch(r".*a\.jsonl:7 has .* 'critic', .*: the usual ones are system, .*", second)


def test_turns_that_the_template_rewrites_are_examples_of_their_own(tokenizer, encode, monkeypatch):
    rows = [{"messages": CHAT, "weight": 0.5}, {"messages": CHAT[:2]}]
    few = encode(ChatEncoder, *rows, template=QWEN3)
    assert said(tokenizer, few) == [("bye<|im_end|>\n", 0.5), ("ho<|im_end|>\n", 1)]
    assert (few.report.rewritten, few.report.extra, len(few)) == (1, 0, 2)
    assert few.report.lines() == [
        "1 turn of the assistant not learned, as the chat template writes it differently when "
        "others follow: train_on=all_turns learns each in an example of its own"
    ]
    options = {"template": QWEN3, "train_on": "all_turns"}
    every = encode(ChatEncoder, *rows, **options)
    learned = [("bye<|im_end|>\n", 0.5), ("ho<|im_end|>\n", 0.5), ("ho<|im_end|>\n", 1)]
    assert said(tokenizer, every) == learned
    assert (every.report.rewritten, every.report.extra, len(every)) == (0, 1, 3)
    assert every.report.lines()[0].startswith("1 extra example, for turns")
    assert every.groups is None and every.origin[:, 1].tolist() == [1, 1, 2]
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1)  # a block for each row
    blocks = encode(ChatEncoder, *rows, **options)
    assert fingerprint(blocks) == fingerprint(every) and blocks.report == every.report
    stable = [ChatEncoder(tokenizer, train_on=t) for t in ("assistant", "all_turns")]
    assert len({fingerprint(encode(encoder, *rows)) for encoder in stable}) == 1
    assert len({encoder.digest() for encoder in stable}) == 2


def test_an_empty_block_of_reasoning_is_learned_if_asked(tokenizer, encode):
    for asked, start in ((False, ""), (True, "<think>\n\n</think>\n\n")):
        options = {"template": QWEN3, "train_on_empty_thinking": asked}
        examples = encode(ChatEncoder, {"messages": CHAT[:2]}, **options)
        assert said(tokenizer, examples) == [(f"{start}ho<|im_end|>\n", 1)]


def test_prompts_that_open_reasoning_are_said(tokenizer, encode):
    template = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    examples = encode(ChatEncoder, {"messages": CHAT}, {"messages": CHAT}, template=template)
    assert said(tokenizer, examples) == [("ho<|im_end|>\n", 1), ("bye<|im_end|>\n", 1)] * 2
    (line,) = examples.report.lines()
    assert line.startswith(r"the chat template's prompt ends in '<think>\n'")


BAD = (
    ({"messages": [HI]}, "no turn of the role 'assistant': nothing to learn of 'user'"),
    ('{"messages": ', "not valid JSON"),
    ({"messages": CHAT, "weight": -1}, "'weight' must be a finite number"),
    ({"prompt": "x"}, "needs a list of messages 'messages'"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": []}, "messages"),
    ({"messages": [HI, {"role": "assistant", "content": "a\ud800b"}]}, r"lone surrogate '\\ud800'"),
    ({"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "'chat_template_kwargs' must be an"),
)


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_named_with_its_place(encode, row, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        encode(ChatEncoder, {"messages": CHAT}, row)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: "):
        encode(ChatEncoder, row, {"messages": CHAT})


def test_bad_rows_are_skipped_and_counted(tokenizer, encode):
    rows = [row for row, _ in BAD]
    encoder = ChatEncoder(tokenizer, skip_bad_rows=True)
    examples = encode(encoder, *rows, {"messages": CHAT}, {"messages": CHAT, "weight": 0})
    good = encode(encoder, {"messages": CHAT})
    assert examples.tokens.tolist() == good.tokens.tolist()
    report = examples.report
    assert (report.rows, report.skipped, report.unlearned) == (10, 8, 1)
    assert len(report.errors) == 5 and "a.jsonl:2: not valid JSON" in report.errors[1]
    assert "8 of 10 rows skipped as bad:\n  " in report.lines()[0]
    with pytest.raises(ValueError, match=r"has no good row of 8: .*a\.jsonl:1: "):
        encode(encoder, *rows)


@pytest.mark.parametrize("place", [0, 2])
def test_a_surrogate_in_a_text(encode, place):
    rows = [{"text": "good"}] * 4
    rows[place] = {"text": "not \udc00"}
    with pytest.raises(ValueError, match=rf"a\.jsonl:{place + 1}: has the lone surrogate .*'not '"):
        encode(TextEncoder, *rows)
    examples = encode(TextEncoder, *rows, skip_bad_rows=True)
    assert len(examples) == 3 and examples.report.skipped == 1


def test_sources_without_anything_to_learn(encode):
    for encoder in (ChatEncoder, TextEncoder):
        with pytest.raises(ValueError, match=r"a\.jsonl has no rows"):
            encode(encoder, "", " ")
    row = {"messages": [HI, HO | {"weight": 0}]}
    with pytest.raises(ValueError, match=r"nothing to learn: the weights are 0 in 2 of 2 rows"):
        encode(ChatEncoder, row, row)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: its keys 'messages' are those of task=sft"):
        encode(TextEncoder, {"messages": CHAT})


def test_a_digest_for_everything_that_changes_examples(tokenizer, tmp_path):
    other = Tokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    assert ChatEncoder(tokenizer).digest() == ChatEncoder(other).digest()
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    other.use_chat_template(tmp_path / "t.jinja")
    digests = {
        ChatEncoder(tokenizer).digest(),
        ChatEncoder(other).digest(),
        ChatEncoder(tokenizer, train_on="last").digest(),
        TextEncoder(tokenizer).digest(),
    }
    assert len(digests) == 4


def test_another_eos_changes_only_digests_of_texts(tokenizer, tmp_path):
    """As when a run goes on, whose tokenizer got the end of a turn as eos."""
    other = Tokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer"))
    before = TextEncoder(other)
    other.use_eos(2)
    other.save_pretrained(tmp_path / "tokenizer")
    other = Tokenizer.from_pretrained(tmp_path / "tokenizer")
    assert other.eos_token_id == 2
    assert ChatEncoder(other).digest() == ChatEncoder(tokenizer).digest()
    assert before.digest() == TextEncoder(tokenizer).digest() != TextEncoder(other).digest()
    digests = set()
    for name, row in (("chat", {"messages": CHAT}), ("text", {"prompt": "a", "completion": "b"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        (source,) = find_sources(f"{tmp_path}/{name}.jsonl")
        digests |= {ChatEncoder(t).open(source).digest() for t in (other, tokenizer)}
    assert len(digests) == 3
    special = write_tokenizer(tmp_path / "special")
    (special / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[1].content }}")
    reads = [Tokenizer.from_pretrained(special) for _ in range(2)]
    reads[1].use_eos(2)
    assert len({t.digest() for t in reads}) == 2


class Pairs(Encoder):
    """Two examples a row."""

    per_token = {"supervised": bool, "logprobs": np.float32}
    per_example = {"reward": np.float32}

    def row(self, row: dict[str, Any], format: Format) -> list[Example]:
        columns = {"supervised": [False, True], "logprobs": [-1.5, -row["x"]]}
        return [
            Example([1, 2], columns, {"reward": 0.5}),
            Example([3, 4], columns, {"reward": row["x"]}),
        ]


def test_named_columns_and_groups(encode):
    examples = encode(Pairs(), {"x": 0}, {"x": 1})
    assert len(examples) == 4 and examples.groups.tolist() == [0, 2, 4]
    assert examples.supervised.tolist() == [False, True] * 4
    assert examples.per_token["logprobs"].tolist() == [-1.5, 0, -1.5, 0, -1.5, -1, -1.5, -1]
    assert examples.per_example["reward"].tolist() == [0.5, 0, 0.5, 1]
    assert examples.location(5).endswith("a.jsonl:2")


class Given(Encoder):
    """Examples as a row says."""

    per_token = {"supervised": bool, "x": np.float32}

    def row(self, row: dict[str, Any], format: Format) -> list[Example]:
        return [Example(row["ids"], row["columns"])]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([{"supervised": [True], "x": [0, 0]}], r":1: supervised has 1 values for 2 tokens"),
        ([{"supervised": [True]}], r":1: has the columns supervised, and not supervised, x"),
        ([{"supervised": [1, 1], "x": [0, 0], "y": [0, 0]}], r"columns supervised, x, y, and not"),
        (
            [
                {"supervised": [1, 1], "x": [[1.0, 2.0]] * 2},
                {"supervised": [1, 1], "x": [[1.0]] * 2},
            ],
            r":2: a value of x has shape \(1,\), not \(2,\) as before",
        ),
    ],
)
def test_columns_that_do_not_fit_are_named(encode, columns, message):
    with pytest.raises(ValueError, match=message):
        encode(Given(), *({"ids": [1, 2], "columns": column} for column in columns))


def test_keys_that_would_write_to_a_terminal(encode):
    row = {"text": "a", "\x1b[31m": 1, "\ud800": 2, **{f"k{i}": 0 for i in range(2000)}}
    lines = encode(TextEncoder, row, {"text": "b", **{f"l{i}": 0 for i in range(999)}})
    text = "\n".join(lines.report.lines())
    assert r"\x1b[31m" in text and "\x1b" not in text
    assert text.isascii() and len(text) < 2000
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .{,1100}$"):
        encode(TextEncoder, {"x" * 100_000: 1})


def test_rows_too_large_for_a_tokenizer_are_bad(encode, monkeypatch):
    """And those whose lists are small as bytes only."""
    monkeypatch.setattr(sources, "LARGE_ROW_BYTES", 1000)
    monkeypatch.setattr(sources, "MAX_CONTAINERS", 100)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: has more than 100 lists and objects"):
        encode(TextEncoder, '{"text": "a", "x": [' + "[]," * 500 + "[]]}")
    monkeypatch.setattr(examples, "MAX_ROW_CHARS", 10)
    rows = [{"text": "a"}, {"text": "b" * 6, "more": ["c" * 6]}]
    with pytest.raises(ValueError, match=r":2: has 12 characters, and tokenizing takes at most 10"):
        encode(TextEncoder, *rows)
    report = encode(TextEncoder, *rows, skip_bad_rows=True).report
    assert report.skipped == 1 and "has 12 characters" in report.errors[0]
