import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tokenizer.chat_templates import TEMPLATES
from tigon.tokenizer import Tokenizer

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


def test_a_tool_of_another_type(byte_level):
    tokenizer = Tokenizer.from_pretrained(byte_level)
    with pytest.raises(ValueError, match="a tool must be a function or its JSON schema, got 5"):
        tokenizer.apply_chat_template(CHATS["one"], tools=[5], chat_template="{{ tools }}")


def test_a_function_as_a_tool_needs_transformers(byte_level, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(ImportError, match=r"pip install 'tigon\[transformers\]'"):
        Tokenizer.from_pretrained(byte_level).apply_chat_template(
            CHATS["one"], tools=[add], chat_template="{{ tools }}"
        )


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
