"""Messages that the chat template leaves out, and answers that say nothing, are bad rows."""

import re
from typing import Any

import pytest

from tests.support.small import CHATML
from tests.tokenizer.chat_templates import LLAMA3, QWEN3
from tigon.data import ChatEncoder, Examples, LabelledEncoder, PairEncoder, RewardedEncoder
from tigon.tokenizer import Tokenizer

HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4"}
DEVELOPER = {"role": "developer", "content": "be brief"}
EMPTY = {"role": "assistant", "content": " \n"}
THINKS = {"role": "assistant", "content": "ho", "reasoning_content": "hm"}
# As Qwen2.5's: other roles are written as nothing
FOUR_ROLES = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}",
)
DROPS_TO_ANSWER = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
ONE_CALL = LLAMA3.replace("{%- if not message.tool_calls|length == 1 %}", "{%- if false %}")
NO_DIGITS = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if '8041' in m.content %}{{ raise_exception('no') }}{% endif %}",
)
ROWS = [
    (
        CHATML,
        [HI, CALLS, RESULT, HO],
        r"messages\[1\]\['tool_calls'\] \(role 'assistant'\).*a template that knows tools",
    ),
    (ONE_CALL, [HI, CALLS | {"tool_calls": [CALL, CALL]}], r"messages\[1\]\['tool_calls'\]\[1\]"),
    (FOUR_ROLES, [DEVELOPER, HI, HO], r"messages\[0\]\['content'\] \(role 'developer'\)"),
    (FOUR_ROLES, [HI, HO, RESULT, HO], r"messages\[2\]\['content'\] \(role 'tool'\)"),
    (CHATML, [HI, THINKS], r"messages\[1\]\['reasoning_content'\]"),
    (
        DROPS_TO_ANSWER,
        [HI, HO | {"content": "<think>hm</think>ho"}],
        r"messages\[1\]\['content'\].*nothing of its reasoning",
    ),
    # A template that refuses marks: words tell
    (NO_DIGITS, [HI, CALLS, HO], r"messages\[1\]\['tool_calls'\]"),
]


@pytest.fixture
def encode(encode, directory):
    def run(kind: Any, template: str, *rows: dict[str, Any], **options: Any) -> Examples:
        tokenizer = Tokenizer.from_pretrained(directory)
        tokenizer.chat_template = template
        return encode(kind(tokenizer, **options), *rows)

    return run


@pytest.mark.parametrize(("template", "messages", "message"), ROWS)
def test_content_that_a_template_leaves_out(encode, template, messages, message):
    good = {"messages": [HI, HO]}
    options = {"must_end": False}
    assert len(encode(ChatEncoder, template, good, **options)) == 1
    for rows in ([{"messages": messages}], [good, {"messages": messages}]):
        with pytest.raises(ValueError, match=rf"a\.jsonl:{len(rows)}: {message}"):
            encode(ChatEncoder, template, *rows, **options)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (QWEN3, [HI, THINKS, HI, THINKS]),  # drops the reasoning of the first, which is written
        (QWEN3, [HI, CALLS, RESULT, HO]),
        (QWEN3, [HI, HO | {"content": "<think>\nhm\n</think>\n\nho"}]),
        (QWEN3, [HI, HO | {"content": "<think>\n\n</think>\n\nho"}]),
        (DROPS_TO_ANSWER, [HI, HO | {"content": "<think>hm</think>ho", "weight": 0}, HI, HO]),
        (DROPS_TO_ANSWER, [HI | {"content": "what is <think>x</think>?"}, HO]),
        (CHATML, [HI | {"content": ""}, HO]),
        (CHATML, [HI, THINKS | {"train": False}, HI, HO]),
        (CHATML, [HI, EMPTY | {"train": False}, HI, HO]),
        (CHATML.replace("m['content']", "m['content'] | upper | replace('O', '0')"), [HI, HO]),
        (NO_DIGITS, [HI | {"content": "?"}, HO]),
    ],
)
def test_content_that_is_written_or_not_learned(encode, template, messages):
    # The names of variables are no arguments on the way
    row = {"messages": messages, "chat_template_kwargs": {"name": "x", "learned": 1}}
    assert len(encode(ChatEncoder, template, row)) == 1


CHAT = {"messages": [HI, HO]}
ANSWER = "is an empty answer"


@pytest.mark.parametrize(
    ("good", "row", "message"),
    [
        (CHAT, {"messages": [HI, EMPTY]}, ANSWER),
        (CHAT, {"messages": [HI, HO, HI, EMPTY | {"content": "\t"}]}, ANSWER),
        (CHAT, {"messages": [HI, EMPTY | {"content": "<think>\n\n</think>\n\n"}]}, ANSWER),
        ({"instruction": "hi", "output": "ho"}, {"instruction": "hi", "output": ""}, ANSWER),
        ({"prompt": [HI], "completion": [HO]}, {"prompt": [HI], "completion": [EMPTY]}, ANSWER),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "a", "completion": " "},
            "the completion is",
        ),
    ],
)
def test_an_empty_answer_is_an_error_or_counted(encode, good, row, message):
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        encode(ChatEncoder, CHATML, good, row)
    report = encode(ChatEncoder, CHATML, good, row, row, skip_bad_rows=True).report
    assert (report.rows, report.skipped, report.empty) == (3, 2, 2)
    assert "2 rows with an empty answer, of those skipped" in report.lines()
    assert encode(ChatEncoder, CHATML, good, row | {"weight": 0}).report.unlearned == 1


HA = HO | {"content": "ha"}


@pytest.mark.parametrize(
    ("kind", "row", "name"),
    [
        (ChatEncoder, {"prompt": [HI], "completion": [CALLS]}, "completion[0]"),
        (ChatEncoder, {"prompt": [HI, CALLS, RESULT], "completion": [HO]}, "prompt[1]"),
        (ChatEncoder, {"system": "s", "messages": [HI, CALLS]}, "messages[1]"),
        (PairEncoder, {"prompt": [HI], "chosen": [HO], "rejected": [CALLS]}, "rejected[0]"),
        (PairEncoder, {"chosen": [HI, CALLS], "rejected": [HI, HO]}, "chosen[1]"),
        (PairEncoder, {"prompt": [HI], "chosen": [HI, CALLS], "rejected": [HI, HO]}, "chosen[1]"),
        (
            PairEncoder,
            {"system": "s", "prompt": [HI, CALLS, RESULT], "chosen": [HO], "rejected": [HA]},
            "prompt[1]",
        ),
        (
            LabelledEncoder,
            {"prompt": [HI], "completion": [HO, HI, CALLS], "label": True},
            "completion[2]",
        ),
        (
            RewardedEncoder,
            {"prompt": [HI], "completions": [[HO], [CALLS]], "rewards": [0, 1]},
            "completions[1][0]",
        ),
    ],
)
def test_messages_are_named_as_rows_name_them(encode, kind, row, name):
    message = rf"jsonl:1: {re.escape(name)}\['tool_calls'\].*writes nothing"
    with pytest.raises(ValueError, match=message):
        encode(kind, CHATML, row)


def test_one_shape_is_rendered_once(encode, monkeypatch):
    calls = []
    apply = Tokenizer.apply_chat_template
    monkeypatch.setattr(
        Tokenizer, "apply_chat_template", lambda *a, **k: calls.append(a) or apply(*a, **k)
    )
    rows = [{"messages": [HI | {"content": f"hi {n}"}, HO]} for n in range(50)]
    assert len(encode(ChatEncoder, CHATML, *rows)) == 50 and len(calls) == 1


def test_what_is_learned_is_of_the_shape(encode):
    silent = {"messages": [HI, THINKS | {"weight": 0}, HI, HO]}
    loud = {"messages": [HI, THINKS, HI, HO]}
    with pytest.raises(ValueError, match=r"a\.jsonl:2: messages\[1\]\['reasoning_content'\]"):
        encode(ChatEncoder, CHATML, silent, loud)
