"""Rows in the forms that people have them, to conversations and texts."""

from typing import Any

import pytest

from tigon.data import Format
from tigon.data.formats import CHAT_FORMATS, WeightedChat, WeightedText, parse_chat, parse_text
from tigon.data.sources import open_file

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SYSTEM = {"role": "system", "content": "be"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def chat(row: dict[str, Any], **columns: str) -> WeightedChat | WeightedText:
    return parse_chat(row, Format(None, columns).detect(row, CHAT_FORMATS))


@pytest.mark.parametrize(
    ("row", "kind", "messages"),
    [
        ({"messages": HI}, "messages", HI),
        ({"conversations": HI}, "messages", HI),
        ({"messages": HI, "system": "be"}, "messages", [SYSTEM, *HI]),
        ({"messages": HI, "prompt": "hi", "text": "hi ho"}, "messages", HI),
        ({"messages": HI, "prompt": "hi", "completion": None}, "messages", HI),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            "sharegpt",
            HI,
        ),
        (
            {
                "system": "be",
                "conversations": [
                    {"from": "user", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "4"},
                    {"from": "gpt", "value": "ho", "extra": 1},
                ],
            },
            "sharegpt",
            [
                SYSTEM,
                HI[0],
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "4"},
                {**HI[1], "extra": 1},
            ],
        ),
        ({"prompt": HI[:1], "completion": HI[1:]}, "prompt_completion", HI),
        ({"instruction": "hi", "output": "ho", "text": "x"}, "instruction", HI),
        ({"instruction": "hi", "output": "ho", "history": None}, "instruction", HI),
        (
            {"instruction": "a", "output": "b", "history": [["hi", "ho"]], "system": "be"},
            "instruction",
            [SYSTEM, *HI, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            {"instruction": "hi", "input": "", "output": "ho", "history": '[["hi", "ho"]]'},
            "instruction",
            [*HI, *HI],
        ),
        ({"instruction": "hi", "input": "", "output": "ho"}, "instruction", HI),
        (
            {"instruction": "hi", "input": "you", "output": "ho", "system": "be"},
            "instruction",
            [SYSTEM, {"role": "user", "content": "hi\n\nyou"}, HI[1]],
        ),
    ],
)
def test_the_format_is_told_from_the_keys(row, kind, messages):
    format = Format().detect(row, CHAT_FORMATS)
    assert format.kind == kind
    found = parse_chat(row, format)
    assert isinstance(found, WeightedChat) and found.messages == messages
    assert found.weights == [None] * len(messages) and found.weight == 1 and found.tools is None
    assert found.prompt == (1 if kind == "prompt_completion" else 0)
    assert Format(kind, {}).detect(row, CHAT_FORMATS) == format


def test_other_names_for_keys():
    row = {"dialog": HI, "fns": [TOOL], "w": 0.5, "messages": 3}
    found = chat(row, messages="dialog", tools="fns", weight="w")
    assert isinstance(found, WeightedChat)
    assert (found.messages, found.tools, found.weight) == (HI, [TOOL], 0.5)
    format = Format(None, {"messages": "dialog"}).detect(row, CHAT_FORMATS)
    assert format.read_keys() >= {"dialog", "tools"} and "messages" not in format.read_keys()
    # Names that are given decide, where keys would fit several formats
    row = {"messages": HI, "prompt": "a", "completion": "b", "q": "c"}
    assert chat(row, completion="completion") == WeightedText("b", "a")
    assert chat({"q": "hi", "a": "ho"}, prompt="q", completion="a") == WeightedText("ho", "hi")
    with pytest.raises(ValueError, match=r"^dialog\[1\]\['tool_calls'\] must be"):
        chat({"dialog": [HI[0], {**HI[1], "tool_calls": 1}]}, messages="dialog")


def test_prompts_and_texts():
    assert chat({"prompt": "a", "completion": "b", "weight": 2}) == WeightedText("b", "a", 2.0)
    said = chat({"prompt": HI[:1], "completion": HI[1:], "system": "be"})
    assert isinstance(said, WeightedChat) and (said.messages, said.prompt) == ([SYSTEM, *HI], 2)
    with pytest.raises(ValueError, match="'system' needs a prompt of messages, not a text"):
        chat({"prompt": "a", "completion": "b", "system": "be"})
    row = {"text": "a", "messages": HI}
    assert parse_text(row, Format().detect(row, ("text",))) == WeightedText("a")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"^its keys are 'question', which fit no format; columns= .* The form"),
        ({}, "its keys are none"),
        ({"messages": HI, "instruction": "a", "output": "b"}, "format=messages or format=instruct"),
        ({"messages": "hi"}, "'messages' must be a list of messages, not str, which is not the JS"),
        (
            {"instruction": "a", "output": "b", "history": ["a", "b"]},
            r"history\[0\] must be two texts .*, not 'a'",
        ),
        ({"instruction": "a", "output": "b", "history": [["a", None]]}, r"history\[0\].*None\]"),
        ({"instruction": "a", "output": "b", "history": [["a", "b", "c"]]}, r"history\[0\] must"),
        ({"instruction": "a", "output": "b", "history": "a"}, "'history' is text, but not valid"),
        ({"instruction": "a", "output": "b", "history": {"a": 1}}, "'history' must be a list of"),
        ({"prompt": "a", "completion": HI}, "'prompt' must be a list of messages, not str"),
        ({"prompt": HI, "completion": []}, "'completion' has no message"),
        ({"instruction": 1, "output": "b"}, "'instruction' must be a text, not int"),
        ({"messages": HI, "tools": "[}"}, "'tools' is text, but not valid JSON"),
        ({"messages": HI, "tools": '[{"a": 1, "a": 2}]'}, "not valid JSON: it names 'a' twice"),
        ({"messages": HI, "tools": "{}"}, "'tools' must be a list or its JSON, not dict"),
        ({"messages": [SYSTEM], "system": "be"}, "both a key 'system' and a message"),
        (
            {"messages": HI, "weight": "1"},
            "'weight' must be a finite number of at least 0, not '1'",
        ),
        ({"messages": HI, "weight": -1}, "'weight' must be a finite.*not -1"),
        ({"messages": HI, "weight": float("nan")}, "'weight' must be a finite.*not nan"),
        ({"messages": HI, "weight": True}, "'weight' must be a finite.*not True"),
        ({"messages": [{**HI[0], "weight": float("inf")}]}, r"messages\[0\]\['weight'\].*not inf"),
        ({"messages": [{**HI[0], "train": 1}]}, r"messages\[0\]\['train'\] must be true or false"),
        ({"messages": [{**HI[0], "train": True, "weight": 1}]}, "both 'weight' and 'train'"),
        (
            {"conversations": [{"from": "elf", "value": ""}]},
            r"conversations\[0\]\['from'\]='elf' is not",
        ),
        ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\] needs the keys 'from' and "),
        (
            {"system": "be", "messages": [HI[0], {**HI[1], "train": 1}]},
            r"^messages\[1\]\['train'\]",
        ),
        ({"prompt": HI[:1], "completion": [{**HI[1], "weight": -1}]}, r"^completion\[0\]\['weight"),
        ({"messages": HI, "chat_template_kwargs": {"messages": 1}}, "'chat_template_kwargs' must"),
    ],
)
def test_rows_that_fit_no_format(row, message):
    with pytest.raises(ValueError, match=message):
        chat(row)


def test_later_rows_have_the_first_format():
    format = Format().detect({"conversations": [{"from": "human", "value": "x"}]}, CHAT_FORMATS)
    with pytest.raises(ValueError, match="needs the keys 'from' and 'value'"):
        parse_chat({"conversations": HI}, format)


@pytest.mark.parametrize("row", [{"text": "a"}, {"question": "a"}])
def test_a_format_of_another_task(row):
    message = "^format=text is of task=pretrain, and not one of messages, sharegpt, prompt_comple"
    with pytest.raises(ValueError, match=message):
        Format("text").detect(row, CHAT_FORMATS)


def test_names_of_columns_are_those_of_the_task():
    with pytest.raises(ValueError, match=r"as in columns=\{text: NAME\}"):
        Format().detect({"content": "a"}, ("text",))


def test_settings_that_name_nothing():
    with pytest.raises(ValueError, match="format='alpaca' is not one of messages, sharegpt"):
        Format("alpaca")
    with pytest.raises(ValueError, match="columns: write messages: dialog, the name in your"):
        Format(columns={"dialog": "messages"})
    with pytest.raises(ValueError, match="columns: 'mesages' is no key of a row that is read"):
        Format(None, {"mesages": "x"})


def test_zeros_that_are_compressed_well_do_not_fill_the_memory(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    (tmp_path / "a.zst").write_bytes(pyarrow.compress(bytes(2**29), "zstd", asbytes=True))
    assert (tmp_path / "a.zst").stat().st_size < 2**17
    size, most = 0, 0
    with open_file(str(tmp_path / "a.zst")) as file:
        while text := file.read(2**22):
            size, most = size + len(text), max(most, pyarrow.total_allocated_bytes())
    assert size == 2**29 and most < 2**26
