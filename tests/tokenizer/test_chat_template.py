import enum
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from tests.tokenizer.chat_templates import TEMPLATES
from tigon.tokenizer import Tokenizer
from tigon.tokenizer.tool_schema import tool_schema

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<é> & 'b'"}}}
CHATS = {
    "one": [{"role": "user", "content": "What is <2 & 2>? 'é'"}],
    "two": [
        {"role": "user", "content": "  Hi there \n"},
        {"role": "assistant", "content": " Hello, you 😀 ", "tool_calls": None},
    ],
    "long": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nHello!", "name": None},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Bye.", "reasoning": "Short."},
    ],
    "tool": [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": '{"sum": 4}'},
        {"role": "assistant", "content": "4"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("b ", " c ")]},
        {
            "role": "user",
            "content": ({"text": "d"}, {"type": "text", "text": " e "}, {"type": "x"}),
        },
    ],
}
DOCUMENTS = [{"title": f"T{i}", "text": "x", "b": 1} for i in range(4)]
OPTIONS = {
    "plain": {},
    "prompt": {"add_generation_prompt": True},
    "continue": {"continue_final_message": True},
    "both": {"add_generation_prompt": True, "continue_final_message": True},
    "variables": {
        "enable_thinking": False,
        "date_string": "1 Jan",
        "custom": 1.5,
        "bos_token": "B",
    },
    "documents": {"documents": DOCUMENTS, "add_generation_prompt": True},
}


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


def add(a: int, b: float = 1.5, *, names: list[str] | None = None) -> dict[str, int]:
    """
    Adds two numbers,
    and says so.

    Args:
        a: The first one: an integer
        b: The second one (choices: [1.5, 2.5])
        names: What to call them,
            in order

    Returns:
        The sum
    """
    return {}


def many(
    a: Union[int, str, None],  # noqa: UP007
    b: Optional[list[dict[str, float]]],  # noqa: UP045
    c: Literal["x", "y", 3],
    d: tuple[int, str],
    e: Unit,
    f: list | dict[str, int],
    g: Any = None,
) -> "Path":
    """Many types.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G (choices: ["p ", "q"])
    """
    return Path()


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except Exception:
        return "an error"


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tools", [None, [add, {"type": "function"}]], ids=["", "tools"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_equals_transformers(byte_level, template, tools, options):
    ours, theirs = Tokenizer.from_pretrained(byte_level), AutoTokenizer.from_pretrained(byte_level)
    arguments = {"tools": tools, "chat_template": TEMPLATES[template], **OPTIONS[options]}
    texts = {}
    for name, chat in CHATS.items():
        for tokenize in (False, True):
            kwargs = {**arguments, "tokenize": tokenize}
            got = outcome(ours.apply_chat_template, chat, **kwargs)
            expected = outcome(theirs.apply_chat_template, chat, return_dict=False, **kwargs)
            assert got == expected, name
            texts[name] = got
    # A chat that neither renders shows nothing, so some must
    assert options == "both" or any(text != "an error" for text in texts.values())


@pytest.mark.parametrize("function", [add, many])
def test_tool_schema_equals_transformers(function):
    # As JSON, because templates write the keys in their order
    assert json.dumps(tool_schema(function)) == json.dumps(get_json_schema(function))


@pytest.mark.parametrize(
    ("doc", "hints", "message"),
    [
        (None, {"a": int}, "tool f has no docstring"),
        ("Does.", {"a": int}, "tool f does not describe a"),
        ("Does.\n\nArgs:\n    a: A", {}, "argument a of tool f has no type hint"),
        ("Does.\n\nArgs:\n    a: A", {"a": Path}, "argument a of tool f has type .*Path"),
    ],
)
def test_a_function_that_makes_no_tool(doc, hints, message):
    def f(a: Any) -> None: ...

    f.__doc__, f.__annotations__ = doc, hints
    with pytest.raises(ValueError, match=message):
        tool_schema(f)


def test_a_tool_of_another_type():
    wrong = 5
    with pytest.raises(ValueError, match="a tool must be a function or its JSON schema"):
        tool_schema(wrong)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "{{ 'config' }}"}},
        {
            "tokenizer_config.json": {"chat_template": "{{ 'config' }}"},
            "chat_template.jinja": "j\n",
        },
        {
            "tokenizer_config.json": {
                "chat_template": [
                    {"name": "default", "template": "{{ 'd' }}"},
                    {"name": "tool_use", "template": "{{ 't' }}"},
                ]
            }
        },
        {
            "tokenizer_config.json": {"chat_template": "{{ 'config' }}"},
            "chat_template.jinja": "{{ 'd' }}",
            "additional_chat_templates/rag.jinja": "{{ 'r' }}",
            "additional_chat_templates/tool_use.jinja": "{{ 't' }}",
        },
        {"additional_chat_templates/rag.jinja": "{{ 'r' }}"},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "d {{"}]}},
        {},
    ],
)
def test_template_is_found_as_in_transformers(byte_level, tmp_path, files):
    shutil.copy(byte_level / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    ours, theirs = Tokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == theirs.chat_template
    for tools in (None, [add]):
        for chosen in (None, "rag", "tool_use", "{{ messages[0].role }}"):
            arguments = {"tools": tools, "chat_template": chosen, "tokenize": False}
            expected = outcome(theirs.apply_chat_template, CHATS["one"], **arguments)
            if expected == chosen:  # transformers takes an unknown name for a template
                expected = "an error"
            assert outcome(ours.apply_chat_template, CHATS["one"], **arguments) == expected
