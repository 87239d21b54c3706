"""Rows that mean the same are the same tokens, however they spell it."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tigon.data import (
    ChatEncoder,
    Encoder,
    Format,
    LabelledEncoder,
    PairEncoder,
    RewardedEncoder,
    find_sources,
)
from tigon.data.formats import WeightedChat, WeightedText, parse_chat, parse_pair
from tigon.tokenizer import Tokenizer

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


def shipped() -> Iterator[Path]:
    """The chat templates in TRL, which is not imported."""
    found = find_spec("trl")
    for folder in found.submodule_search_locations or () if found else ():
        yield from sorted(Path(folder, "chat_templates").glob("*.jinja"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.special_tokens["bos_token"] = "<|endoftext|>"
    return tokenizer


@pytest.fixture
def encode(encode: Any) -> Callable[..., Any]:
    def run(encoder: Encoder, row: dict[str, Any]) -> Any:
        examples = encode(encoder, row)
        arrays = examples.offsets, examples.tokens, examples.supervised
        return [array.tolist() for array in arrays]

    return run


def called(call: Any, **more: Any) -> Messages:
    return [ASK, {"role": "assistant", "tool_calls": [call], **more}, RESULT, DONE]


def function(arguments: Any, **more: Any) -> dict[str, Any]:
    inner = {"name": "weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": inner, **more}


def unwrapped(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"name": "weather", "arguments": arguments, "id": "abcdefghi", **more}


CALLS: dict[str, Messages] = {
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
TOOLS: list[Any] = [[TOOL], json.dumps([TOOL]), [SCHEMA], [json.dumps(TOOL)]]
TOOLS += [[{**TOOL, "function": {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}}]]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_of_a_tool_call(tokenizer: Tokenizer, encode: Any, template: str, name: str) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    encoder = ChatEncoder(tokenizer, must_end=False)
    expected = encode(encoder, {"messages": CALLS["object"], "tools": [TOOL]})
    assert encode(encoder, {"tools": [TOOL], **CHATS[name]}) == expected
    text = tokenizer.decode(expected[1])
    assert written(text) or (template == "xml" and '<city>"Rome"<größe>[1, {"a": null}]' in text)


@pytest.mark.parametrize("tools", TOOLS)
def test_of_tools(tokenizer: Tokenizer, encode: Any, tools: Any) -> None:
    tokenizer.chat_template = TEMPLATES["qwen"]
    encoder = ChatEncoder(tokenizer, must_end=False)
    found = encode(encoder, {"messages": CALLS["object"], "tools": tools})
    assert tokenizer.decode(found[1]).startswith(json.dumps(TOOL) + "<|im_start|>user")
    for none in (None, [], "", "[]"):
        found = encode(encoder, {"messages": CALLS["object"], "tools": none})
        assert found == encode(encoder, {"messages": CALLS["object"]})


@pytest.mark.parametrize("path", list(shipped()), ids=lambda path: path.stem)
def test_of_content_in_templates_that_trl_ships(
    tokenizer: Tokenizer, encode: Any, path: Path
) -> None:
    tokenizer.chat_template = path.read_text()
    encoder = ChatEncoder(tokenizer, train_on="all", must_end=False)
    expected = encode(encoder, {"messages": [ASK, DONE]})
    text = tokenizer.decode(expected[1])
    assert "hi" in text and "done" in text
    assert encode(encoder, {"messages": spelled([ASK, DONE])}) == expected


WITH_CALLS = [path for path in shipped() if "tool_calls" in path.read_text()]


@pytest.mark.parametrize("path", WITH_CALLS, ids=lambda path: path.stem)
def test_of_a_tool_call_in_templates_that_trl_ships(
    tokenizer: Tokenizer, encode: Any, path: Path
) -> None:
    tokenizer.chat_template = path.read_text()
    encoder = ChatEncoder(tokenizer, train_on="all", must_end=False)
    rows = [*({"messages": messages} for messages in CALLS.values()), CHATS["sharegpt"]]
    expected = encode(encoder, rows[0] | {"tools": [TOOL]})
    text = tokenizer.decode(expected[1])
    for row in rows:
        assert encode(encoder, row | {"tools": [TOOL]}) == expected, row
    assert "weather" in text and "Rome" in text and "größe" in text
    assert '\\"' not in text and "'city':" not in text


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


HELLO: Messages = [{"role": "assistant", "content": "hello"}]
TRIP = [*CALLS["object"][:2]]
OTHER = [{"role": "assistant", "content": "no"}]


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


PREFERENCES: list[tuple[type[Encoder], dict[str, Any]]] = [
    (PairEncoder, {"prompt": [ASK], "chosen": TRIP[1:], "rejected": OTHER}),
    (PairEncoder, {"chosen": [*TRIP], "rejected": [ASK, *OTHER]}),
    (LabelledEncoder, {"prompt": [ASK], "completion": TRIP[1:], "label": True}),
    (RewardedEncoder, {"prompt": [ASK], "completions": [TRIP[1:], OTHER], "rewards": [1, 0]}),
    (ChatEncoder, {"prompt": [ASK], "completion": TRIP[1:]}),
]


@pytest.mark.parametrize("template", ["qwen", "deepseek"])
@pytest.mark.parametrize(("kind", "row"), PREFERENCES)
def test_of_messages_in_each_format(
    tokenizer: Tokenizer, encode: Any, kind: type[Encoder], row: dict[str, Any], template: str
) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    encoder = kind(tokenizer)  # type: ignore[call-arg]
    expected = encode(encoder, row | {"tools": [TOOL]})
    assert written(tokenizer.decode(expected[1]))

    def change(by: Callable[[Messages], Any]) -> dict[str, Any]:
        return {
            key: [by(item) for item in value]
            if key == "completions"
            else by(value)
            if key in ("prompt", "chosen", "rejected", "completion")
            else value
            for key, value in row.items()
        }

    for other in (change(spelled), change(json.dumps), change(lambda m: json.dumps(spelled(m)))):
        assert encode(encoder, other | {"tools": json.dumps([SCHEMA])}) == expected, other
    if "completions" in row:
        text = json.dumps(change(spelled)["completions"])
        assert encode(encoder, row | {"tools": [TOOL], "completions": text}) == expected


def test_one_spelled_in_two_ways_is_one_prompt_and_one_answer(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = TEMPLATES["qwen"]
    encoder = PairEncoder(tokenizer)
    row = {"chosen": spelled(TRIP), "rejected": [ASK, *OTHER]}
    same = {"prompt": [ASK], "chosen": TRIP[1:], "rejected": OTHER}
    first, second = (encoder.row(r, encoder.detect(r, Format())) for r in (row, same))
    assert [e.ids for e in first] == [e.ids for e in second]
    with pytest.raises(ValueError, match="'chosen' and 'rejected' are equal"):
        row = {"prompt": [ASK], "chosen": spelled(TRIP[1:]), "rejected": TRIP[1:]}
        encoder.row(row, Format("preference"))


def test_templates_get_the_content_that_they_take(tokenizer: Tokenizer, encode: Any) -> None:
    """Given text, one that goes through parts would write none of it, without an error."""
    tokenizer.chat_template = PARTS
    encoder = ChatEncoder(tokenizer)
    expected = encode(encoder, {"messages": [ASK, DONE]})
    said = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>\n"
    assert tokenizer.decode(expected[1]) == said
    assert encode(encoder, {"messages": spelled([ASK, DONE])}) == expected


def test_null_content_beside_tool_calls(tokenizer: Tokenizer, encode: Any) -> None:
    """DeepSeek-R1's template asks for it, and writes no call of a message with empty content."""
    calls = "{% if message.content is none %}CALLS{% endif %}".replace(
        "CALLS", "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    )
    tokenizer.chat_template = (
        TEMPLATES["qwen"]
        .replace("{{ call.function.name }} {{ call.function.arguments | tojson }}", "")
        .replace("{{ '<|im_end|>", f"{calls}{{{{ '<|im_end|>")
    )
    found = [
        encode(ChatEncoder(tokenizer), CHATS[name]) for name in ("object", "text", "empty content")
    ]
    assert found[0] == found[1] == found[2] and written(tokenizer.decode(found[0][1]))


def test_nulls_in_arguments_are_kept_where_they_are_written(tmp_path: Path) -> None:
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
        ({"tool_calls": [function(json.dumps(TEXT))]}, r"'arguments' must be an object, or its JS"),
        ({"tool_calls": [function({}), {"id": 1}]}, r"\['tool_calls'\]\[1\] must be an object wit"),
        ({"tool_calls": ["x"]}, r"\['tool_calls'\]\[0\] is text, but not valid JSON"),
        ({"tool_calls": {"a": 1}}, r"messages\[1\]\['tool_calls'\] must be a list, not {'a': 1}"),
        ({"function_call": 1}, r"messages\[1\]\['function_call'\] must be an object with the name"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image", "image": None}]},
            r"messages\[1\]\['content'\]\[1\] has the type 'image': Tigon trains on text",
        ),
        ({"content": [{"type": "text", "text": 1}]}, r"\['content'\]\[0\]\['text'\] must be text"),
        ({"content": [{"type": "text"}]}, r"\['text'\] must be text, not None"),
    ],
)
def test_what_has_no_meaning_is_a_bad_row(message: dict[str, Any], error: str) -> None:
    row: dict[str, Any] = {"messages": [ASK, {"role": "assistant", **message}]}
    with pytest.raises(ValueError, match=error):
        parse_chat(row, Format().detect(row, ("messages",)))
    with pytest.raises(ValueError, match=error.replace(r"messages\[1\]", r"chosen\[0\]")):
        row = {"prompt": [ASK], "chosen": [{"role": "assistant", **message}], "rejected": OTHER}
        parse_pair(row, Format("preference"))


def test_texts_that_are_no_messages_stay_texts() -> None:
    for text in ('[{"a": 1}]', "[]", "[{", '{"role": "user"}', "[1, 2]", "[{" * 100_000):
        row = {"prompt": "Write JSON: ", "completion": text}
        assert parse_chat(row, Format().detect(row, ("prompt_completion",))) == WeightedText(
            text, "Write JSON: "
        )


def test_openai_and_legacy_function_call(tokenizer: Tokenizer, encode: Any) -> None:
    tokenizer.chat_template = TEMPLATES["qwen"]
    old = {"role": "assistant", "content": None}
    old["function_call"] = {"name": "weather", "arguments": TEXT}  # type: ignore[assignment]
    rows = [{"messages": [ASK, old, RESULT, DONE]}, CHATS["text"]]
    first, second = (encode(ChatEncoder(tokenizer), row) for row in rows)
    assert first == second


def test_a_greeting_is_a_prompt() -> None:
    row = {"conversations": [{"from": "gpt", "value": "hello"}, *SHAREGPT]}
    chat = parse_chat(row, Format().detect(row, ("sharegpt",)))
    assert (
        isinstance(chat, WeightedChat) and chat.messages[:2] == [*HELLO, ASK] and chat.prompt == 1
    )
    row = {"messages": HELLO}  # and nothing that could be learned in its place
    assert parse_chat(row, Format().detect(row, ("messages",))).prompt == 0  # type: ignore[union-attr]
    row = {"messages": [{"role": "system", "content": "be"}, *HELLO, ASK, DONE]}
    assert parse_chat(row, Format().detect(row, ("messages",))).prompt == 0  # type: ignore[union-attr]


def test_older_names_of_roles_and_tools(tokenizer: Tokenizer, encode: Any) -> None:
    tokenizer.chat_template = TEMPLATES["qwen"]
    encoder = ChatEncoder(tokenizer)
    new = {"messages": CALLS["object"], "tools": [TOOL]}
    roles = {"tool": "function", "user": "human", "assistant": "gpt"}
    old = [message | {"role": roles[message["role"]]} for message in CALLS["object"]]
    functions = {"messages": old, "functions": [TOOL["function"]]}
    assert encode(encoder, functions) == encode(encoder, new)
    capitals = [
        {"from": speaker, "value": text} for speaker, text in (("Human", "hi"), ("GPT", "ho"))
    ]
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert encode(encoder, {"conversations": capitals}) == encode(encoder, {"messages": plain})


def test_reasoning_in_tags_where_a_template_reads_a_key(tokenizer: Tokenizer, encode: Any) -> None:
    """Qwen3.8's writes an empty block in front of reasoning that is in the content."""
    (path,) = (path for path in shipped() if path.stem == "qwen3_8")
    tokenizer.chat_template = path.read_text()
    encoder = ChatEncoder(tokenizer)
    ask = {"role": "user", "content": "why?"}
    key = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    tags = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
    found = [encode(encoder, {"messages": [ask, answer]}) for answer in (key, tags)]
    assert found[0] == found[1]
    assert tokenizer.decode(found[0][1]).count("<think>") == 1
