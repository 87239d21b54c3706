"""Rows that mean the same are the same tokens, however they spell it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.data.stock_templates import STEMS, read_template
from tigon.data import (
    ChatEncoder,
    Encoder,
    Format,
    LabelledEncoder,
    PairEncoder,
    RewardedEncoder,
    find_sources,
)
from tigon.data.answers import parse_pair
from tigon.data.formats import WeightedChat, WeightedText, parse_chat

Messages = list[dict[str, Any]]
ARGUMENTS = {"city": "Rome", "größe": [1, {"a": None}]}
TEXT = json.dumps(ARGUMENTS)
ASK = {"role": "user", "content": "hi"}
DONE = {"role": "assistant", "content": "done"}
RESULT = {"role": "tool", "content": "4", "name": "weather", "tool_call_id": "abcdefghi"}
SCHEMA = {"name": "weather", "description": "?", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}

_TURNS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}\
{%- for call in message.tool_calls or [] %}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_TOOLS = "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
TEMPLATES = {
    name: _TOOLS + _TURNS.replace("CALL", call)
    for name, call in {
        "qwen": "{{ call.function.name }} {{ call.function.arguments | tojson }}",
        "deepseek": "{{ call['type'] + call.function.name + call.function.arguments }}",
        "printed": "{{ call.function.name }} {{ call.function.arguments }}",
        "mistral": "{% if call.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "{{ call.function | tojson }}",
        "xml": "{{ call.function.name }}{% for k, v in call.function.arguments.items() %}"
        "<{{ k }}>{{ v | tojson }}{% endfor %}",
    }.items()
}
PARTS = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}\
{%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}\
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tokenizer):
    tokenizer.special_tokens["bos_token"] = "<|endoftext|>"
    return tokenizer


@pytest.fixture
def encode(encode, tokenizer):
    """Encode a row by a template: offsets, text and what is learned."""

    def run(kind: type[Encoder], template: str, row: dict[str, Any], **options: Any) -> Any:
        tokenizer.chat_template = template
        examples = encode(kind(tokenizer, **options), row)
        text = tokenizer.decode(examples.tokens)
        return examples.offsets.tolist(), text, examples.supervised.tolist()

    return run


def called(call: Any, **more: Any) -> Messages:
    return [ASK, {"role": "assistant", "tool_calls": [call], **more}, RESULT, DONE]


def function(arguments: Any, **more: Any) -> dict[str, Any]:
    inner = {"name": "weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": inner, **more}


def unwrapped(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"name": "weather", "arguments": arguments, "id": "abcdefghi", **more}


CALLS = {
    "object": called(function(ARGUMENTS)),
    "text": called(function(TEXT), content=None),
    "empty content": called(function(ARGUMENTS), content=""),
    "empty parts": called(function(ARGUMENTS), content=[]),
    "nulls": called(function(ARGUMENTS, index=None), refusal=None, function_call=None),
    "keys in another order": called(
        {
            "function": {"description": None, "arguments": ARGUMENTS, "name": "weather"},
            "type": "function",
            "id": "abcdefghi",
        }
    ),
    "no wrapper": called(unwrapped(ARGUMENTS)),
    "no wrapper, text": called(unwrapped(TEXT, type="function")),
    "the call as text": called(json.dumps(unwrapped(TEXT))),
}
CALLS["all calls as text"] = [
    ASK,
    {"role": "assistant", "tool_calls": json.dumps([function(TEXT)])},
    RESULT,
    DONE,
]
CALLS["parts"] = [
    ASK | {"content": [{"type": "text", "text": "h", "image": None}, {"text": "i"}]},
    *CALLS["text"][1:-1],
    DONE | {"content": [{"type": "text", "text": "done"}]},
]
SHAREGPT = [
    {"from": "human", "value": "hi"},
    {"from": "function_call", "value": json.dumps(unwrapped(ARGUMENTS))},
    {"from": "observation", "value": "4", "name": "weather", "tool_call_id": "abcdefghi"},
    {"from": "gpt", "value": "done"},
]
CHATS = {name: {"messages": messages} for name, messages in CALLS.items()}
CHATS |= {
    "sharegpt": {"conversations": SHAREGPT},
    "sharegpt, text": {
        "conversation": [
            SHAREGPT[0],
            {"from": "tool_call", "value": json.dumps([unwrapped(TEXT)])},
            *SHAREGPT[2:],
        ]
    },
    "sharegpt as text": {"conversations": json.dumps(SHAREGPT)},
    "messages as text": {"messages": json.dumps(CALLS["object"], indent=1)},
    "tools as text": {"messages": CALLS["object"], "tools": json.dumps([TOOL])},
}
LEGACY = {"role": "assistant", "content": None}
LEGACY |= {"function_call": {"name": "weather", "arguments": TEXT}}
OLD_ROLES = {"tool": "function", "user": "human", "assistant": "gpt"}
CHATS["older roles"] = {
    "messages": [m | {"role": OLD_ROLES[m["role"]]} for m in CALLS["object"]],
    "tools": None,
    "functions": [SCHEMA],
}
SPELLED_TOOLS = [[TOOL], json.dumps([TOOL]), [SCHEMA], [json.dumps(TOOL)]]
SPELLED_TOOLS += [
    [{**TOOL, "function": {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}}]
]
for i, tools in enumerate(SPELLED_TOOLS):
    CHATS[f"tools {i}"] = {"messages": CALLS["object"], "tools": tools}
# DeepSeek-R1's asks for null content, and writes no call of a message with empty content
TEMPLATES["null"] = _TOOLS + _TURNS.replace("CALL", "").replace(
    "{{ '<|im_end|>",
    "{% if message.content is none %}{% for call in message.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}{% endif %}{{ '<|im_end|>",
)


def written(text: str) -> bool:
    """Whether an object in the text is the arguments, or has them."""
    for start in (i for i, character in enumerate(text) if character == "{"):
        try:
            found = json.JSONDecoder().raw_decode(text, start)[0]
        except ValueError:
            continue
        if ARGUMENTS in (found, found.get("arguments")):
            return True
    return False


def spelled(messages: Messages) -> Messages:
    """The same in other words: content as parts, arguments as text, nulls, JSON as text."""
    return [
        {
            "name": None,
            **message,
            **(
                {"content": [{"type": "text", "text": message["content"]}]}
                if "content" in message
                else {}
            ),
            **({"tool_calls": [unwrapped(TEXT)]} if "tool_calls" in message else {}),
        }
        for message in messages
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_of_a_tool_call(encode, template, name):
    def run(row: Any) -> Any:
        return encode(ChatEncoder, TEMPLATES[template], {"tools": [TOOL], **row}, must_end=False)

    expected = run(CHATS["object"])
    assert run(CHATS[name]) == expected
    text = expected[1]
    assert text.startswith(json.dumps(TOOL) + "<|im_start|>user")
    assert written(text) or (template == "xml" and '<city>"Rome"<größe>[1, {"a": null}]' in text)


@pytest.mark.parametrize("result", [{"t": None}, [{"t": "größe"}]])
def test_of_what_a_tool_returns(encode, result):
    """As JSON, which servers get, and not as Python's repr; a template that writes JSON itself gets
    the object."""

    def run(result: Any, write: str) -> Any:
        template = TEMPLATES["qwen"].replace("+ (message.content or '')", f"~ {write}")
        messages = [
            m if m is not RESULT else {**RESULT, "content": result} for m in CALLS["object"]
        ]
        return encode(ChatEncoder, template, {"tools": [TOOL], "messages": messages})

    text = json.dumps(result, ensure_ascii=False)
    printed = "(message.content or '')"
    assert run(result, printed) == run(text, printed)
    assert f"tool\n{text}<|im_end|>" in run(result, printed)[1]
    kind = f"('object: ' + message.content | tojson if message.content is mapping else {printed})"
    expected = f"object: {text}" if isinstance(result, dict) else text
    assert f"tool\n{expected}<|im_end|>" in run(result, kind)[1]


def test_no_tools(encode):
    expected = encode(ChatEncoder, TEMPLATES["qwen"], CHATS["object"])
    for none in (None, [], "", "[]"):
        assert encode(ChatEncoder, TEMPLATES["qwen"], CHATS["object"] | {"tools": none}) == expected


@pytest.mark.parametrize("stem", STEMS)
def test_of_templates_that_trl_ships(encode, stem):
    template = read_template(stem)

    def run(row: Any) -> Any:
        return encode(ChatEncoder, template, row, train_on="all", must_end=False)

    expected = run({"messages": [ASK, DONE]})
    assert "hi" in expected[1] and "done" in expected[1]
    assert run({"messages": spelled([ASK, DONE])}) == expected
    if "tool_calls" not in template:
        return
    rows = [*({"messages": messages} for messages in CALLS.values()), CHATS["sharegpt"]]
    expected = run(rows[0] | {"tools": [TOOL]})
    for row in rows:
        assert run(row | {"tools": [TOOL]}) == expected, row
    assert all(word in expected[1] for word in ("weather", "Rome", "größe"))
    assert '\\"' not in expected[1] and "'city':" not in expected[1]


HELLO = [{"role": "assistant", "content": "hello"}]
TRIP = [*CALLS["object"][:2]]
OTHER = [{"role": "assistant", "content": "no"}]
PREFERENCES = [
    (PairEncoder, {"prompt": [ASK], "chosen": TRIP[1:], "rejected": OTHER}),
    (PairEncoder, {"chosen": [*TRIP], "rejected": [ASK, *OTHER]}),
    (LabelledEncoder, {"prompt": [ASK], "completion": TRIP[1:], "label": True}),
    (RewardedEncoder, {"prompt": [ASK], "completions": [TRIP[1:], OTHER], "rewards": [1, 0]}),
    (ChatEncoder, {"prompt": [ASK], "completion": TRIP[1:]}),
]


@pytest.mark.parametrize("template", ["qwen", "deepseek"])
@pytest.mark.parametrize(("kind", "row"), PREFERENCES)
def test_of_messages_in_each_format(encode, kind, row, template):
    expected = encode(kind, TEMPLATES[template], row | {"tools": [TOOL]})
    assert written(expected[1])

    def change(by: Callable[[Messages], Any]) -> dict[str, Any]:
        changed = {k: by(v) for k, v in row.items() if k not in ("completions", "rewards", "label")}
        if "completions" in row:
            changed["completions"] = [by(messages) for messages in row["completions"]]
        return row | changed

    others = [change(by) for by in (spelled, json.dumps, lambda m: json.dumps(spelled(m)))]
    if "completions" in row:
        others.append(row | {"completions": json.dumps(change(spelled)["completions"])})
    if "chosen" in row:  # one answer in two spellings
        others.append(row | {"chosen": spelled(row["chosen"])})
    for other in others:
        other |= {"tools": json.dumps([SCHEMA])}
        assert encode(kind, TEMPLATES[template], other) == expected, other


@pytest.mark.parametrize(
    ("template", "row", "other"),
    [
        # Given text, a template that goes through parts would write none of it, without an error
        (PARTS, {"messages": [ASK, DONE]}, {"messages": spelled([ASK, DONE])}),
        (
            TEMPLATES["qwen"],
            {"messages": [ASK, DONE]},
            {"conversations": [{"from": "Human", "value": "hi"}, {"from": "GPT", "value": "done"}]},
        ),
        (TEMPLATES["qwen"], CHATS["object"], {"messages": [ASK, LEGACY, RESULT, DONE]}),
        # Qwen3.8's writes an empty block in front of reasoning that is in the content
        (
            read_template("qwen3_8"),
            {"messages": [ASK, DONE | {"reasoning_content": "hm"}]},
            {"messages": [ASK, DONE | {"content": "<think>\nhm\n</think>\n\ndone"}]},
        ),
    ],
)
def test_templates_get_the_content_that_they_take(encode, template, row, other):
    expected = encode(ChatEncoder, template, row)
    assert encode(ChatEncoder, template, other) == expected
    assert "hi<|im_end|>\n<|im_start|>assistant\n" in expected[1] and "done" in expected[1]
    assert expected[1].count("<think>") == ("hm" in expected[1])


def test_nulls_in_arguments_are_kept_where_they_are_written(tmp_path):
    """Arrow gives all calls the same keys: there, a null means that the key is absent."""
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table
    calls = [{"city": "Rome"}, {"zip": None}]
    rows = [{"messages": [ASK, *called(function(c))[1:2]]} for c in calls]
    assert [as_arguments(row) for row in rows] == calls
    parquet.write_table(table({"messages": [r["messages"] for r in rows]}), tmp_path / "a.parquet")
    (source,) = find_sources(str(tmp_path / "a.parquet"))
    assert [as_arguments(row) for _, row in source.rows()] == [{"city": "Rome"}, {}]
    texts = [{"messages": [ASK, *called(function(json.dumps(c)))[1:2]]} for c in calls]
    parquet.write_table(table({"messages": [r["messages"] for r in texts]}), tmp_path / "b.parquet")
    (source,) = find_sources(str(tmp_path / "b.parquet"))
    assert [as_arguments(row) for _, row in source.rows()] == calls


def as_arguments(row: Any) -> Any:
    chat = parse_chat(row, Format().detect(row, ("messages",)))
    assert isinstance(chat, WeightedChat)
    return chat.messages[1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"tool_calls": [function("{")]}, r"\['tool_calls'\]\[0\]: 'arguments' is text, but not v"),
        ({"tool_calls": [function("[1]")]}, r"\[0\]: 'arguments' must be an object.*not \[1\]"),
        (
            {"tool_calls": [function(json.dumps(TEXT))]},
            r"'arguments' must be an object or its JSON",
        ),
        ({"tool_calls": [function({}), {"id": 1}]}, r"\['tool_calls'\]\[1\] must be an object wit"),
        ({"tool_calls": ["x"]}, r"\['tool_calls'\]\[0\] is text, but not valid JSON"),
        ({"tool_calls": {"a": 1}}, r"messages\[1\]\['tool_calls'\] must be a list, not {'a': 1}"),
        ({"function_call": 1}, r"messages\[1\]\['function_call'\] must be an object with the name"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image", "image": None}]},
            r"messages\[1\]\['content'\]\[1\] has the type 'image': Tigon trains on text",
        ),
        ({"content": [{"type": "text", "text": 1}]}, r"\['content'\]\[0\]\['text'\] must be text"),
        ({"content": ["a"]}, r"\['content'\] must be text, or parts such as {'type': 'text'"),
        ({"content": [{"type": "text"}]}, r"\['text'\] must be text, not None"),
    ],
)
def test_what_has_no_meaning_is_a_bad_row(message, error):
    row = {"messages": [ASK, {"role": "assistant", **message}]}
    with pytest.raises(ValueError, match=error):
        parse_chat(row, Format().detect(row, ("messages",)))
    with pytest.raises(ValueError, match=error.replace(r"messages\[1\]", r"chosen\[0\]")):
        row = {"prompt": [ASK], "chosen": [{"role": "assistant", **message}], "rejected": OTHER}
        parse_pair(row, Format("preference"))


def test_texts_that_are_no_messages_stay_texts():
    for text in ('[{"a": 1}]', "[]", "[{", '{"role": "user"}', "[1, 2]", "[{" * 100_000):
        row = {"prompt": "Write JSON: ", "completion": text}
        assert parse_chat(row, Format().detect(row, ("prompt_completion",))) == WeightedText(
            text, "Write JSON: "
        )


def test_a_greeting_is_a_prompt():
    greeted = {"conversations": [{"from": "gpt", "value": "hello"}, *SHAREGPT]}
    for row, prompt in (
        (greeted, 1),
        ({"messages": HELLO}, 0),  # and nothing that could be learned in its place
        ({"messages": [{"role": "system", "content": "be"}, *HELLO, ASK, DONE]}, 0),
    ):
        chat = parse_chat(row, Format().detect(row, ("messages", "sharegpt")))
        assert isinstance(chat, WeightedChat) and chat.prompt == prompt
