from itertools import groupby
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tokenizer.chat_templates import (
    CHATML,
    COMMAND_R,
    GEMMA,
    GENERATION,
    LLAMA3,
    MISTRAL,
    QWEN3,
)
from tigon.tokenizer import Tokenizer

END = """{% for m in messages %}{{ m.content }}{% endfor %}\
{% if messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}"""
USER = {"role": "user", "content": "Hi"}
CHAT = [
    {"role": "user", "content": "Hi <|im_end|> "},
    {"role": "assistant", "content": " Hello you 😀"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye"},
]
THINK_PROMPT = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>' }}{% endif %}")
CLOSED_PROMPT = THINK_PROMPT.replace("<think>' }}", "<think></think>' }}")
FINAL_EOS = CHATML + "{% if messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}"
SAME = " Hello you 😀<|im_end|>\n"
CALL = '{"name": "f", "parameters": {"a": 1}}<|eot_id|>'
THINKING = [USER, {"role": "assistant", "content": "A", "reasoning_content": "B"}]
EDGES = "</s>{% generation %}{{ messages[0].content }}{% endgeneration %}</s>"
ACROSS = "{% for m in messages %}{{ m.content }}{{ ' ' if m.role == 'user' }}{% endfor %}"
DOCUMENTS = "{% for d in documents or [] %}{{ d.title }}{% endfor %}" + CHATML
TOOL = [
    USER,
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def learned_runs(
    tokenizer: Tokenizer, ids: list[int], weights: list[Any]
) -> list[tuple[str, float]]:
    """Return the text and the weight of each run of tokens with one weight, except for weight 0."""
    runs = groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1])
    return [(tokenizer.decode([i for i, _ in run]), weight) for weight, run in runs if weight]


@pytest.mark.parametrize("extra", ["", "{% generation %}{% endgeneration %}"])
def test_generation_blocks_equal_transformers(directory, extra):
    ours, theirs = Tokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    # Where the assistant starts with a blank, transformers finds nothing if offsets are trimmed
    full = [m | {"content": m["content"].strip()} for m in CHAT]
    for chat in (full, full[:2], full[1:], [full[0], {"role": "assistant", "content": ""}]):
        ids, mask = ours.encode_chat(chat, chat_template=GENERATION + extra)
        expected = theirs.apply_chat_template(
            chat, chat_template=GENERATION + extra, return_assistant_tokens_mask=True
        )
        assert ids == expected["input_ids"]
        assert mask == [bool(m) for m in expected["assistant_masks"]]
        assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize(
    ("template", "chat", "options", "expected"),
    [
        (CHATML, CHAT, {}, [SAME, "Bye<|im_end|>\n"]),
        (CHATML, [{"role": "system", "content": "S"}, *CHAT[:2]], {}, [SAME]),
        (LLAMA3, CHAT, {}, ["Hello you 😀<|eot_id|>", "Bye<|eot_id|>"]),
        (LLAMA3, TOOL, {}, [CALL, "It is 4.<|eot_id|>"]),
        (MISTRAL, CHAT, {}, [" Hello you 😀</s>", "Bye</s>"]),
        (GEMMA, CHAT, {}, ["Hello you 😀<end_of_turn>\n", "Bye<end_of_turn>\n"]),
        # An empty block of reasoning is not learned, whoever writes it
        (QWEN3, CHAT[:2], {}, [SAME]),
        # A turn that the template writes differently when others follow is not learned
        (QWEN3, CHAT, {}, ["Bye<|im_end|>\n"]),
        (END, [USER, *CHAT[1:]], {}, ["Bye</s>"]),
        (FINAL_EOS, CHAT, {}, [SAME, "Bye<|im_end|>\n</s>"]),
        (FINAL_EOS, [*CHAT[:2], *CHAT[:2]], {}, [SAME, SAME + "</s>"]),
        # The prompt opens reasoning that conversations do not have
        (THINK_PROMPT, CHAT, {}, [SAME, "Bye<|im_end|>\n"]),
        (QWEN3, THINKING, {}, ["<think>\nB\n</think>\n\nA<|im_end|>\n"]),
        (END, CHAT[:2], {}, [" Hello you 😀</s>"]),
        # transformers drops three of an emoji's four tokens, and blanks where offsets are trimmed
        *((EDGES, [CHAT[1] | {"content": c}], {}, [c]) for c in ("  Hello 😀", "the  ", "\n")),
        # A token across the edge is learned
        (ACROSS, [USER, {"role": "assistant", "content": "the"}], {}, [" the"]),
        # Variables and documents reach the conversation up to each turn
        (QWEN3, CHAT[:2], {"enable_thinking": False, "tools": [{"name": "f"}]}, [SAME]),
        (DOCUMENTS, CHAT[:2], {"documents": [{"title": "the fox"}]}, [SAME]),
        (GENERATION, CHAT, {}, [" Hello you 😀<|im_end|>", "Bye<|im_end|>"]),
    ],
)
def test_text_that_is_learned(tokenizer, template, chat, options, expected):
    ids, mask = tokenizer.encode_chat(chat, chat_template=template, **options)
    assert [text for text, _ in learned_runs(tokenizer, ids, mask)] == expected
    assert ids == tokenizer.apply_chat_template(chat, chat_template=template, **options)
    assert ("the fox" in tokenizer.decode(ids)) == ("documents" in options)


UNASKED = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
MACRO = """\
{% macro say(m) %}> {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}\
{% for m in messages %}{{ m.role }}{{ say(m) }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (
            CLOSED_PROMPT,
            [USER, {"role": "assistant", "content": "<think>why</think>so"}],
            r"prompt for messages\[1\].*goes on '</think>', .*'why.*turns reasoning off",
        ),
        (COMMAND_R, CHAT, r"prompt for messages\[3\].*goes on 'no custom<unk>', .*'4 assistant"),
        (CHATML, CHAT[1:], r"prompt for messages\[0\].*goes on 'assistant.*'system.*generation %"),
        (LLAMA3, CHAT[1:], r"messages\[0\].*does not render.*no element 0.*generation %"),
        (MISTRAL, [USER, *CHAT], "roles must alternate user/assistant"),
        (CHATML, [USER], "no turn of the role 'assistant'"),
        (GENERATION, [USER], "no turn of the role 'assistant'"),
        ("{{ 1 }}{% generation %}{% endgeneration %}", CHAT, "marks no token"),
        ("{{ 1 }}", CHAT, "marks no token"),
        (" t{% generation %}{% endgeneration %}he", CHAT, "marks no token"),
        (UNASKED, CHAT, "ends in a prompt for another turn.*add_generation_prompt"),
        (UNASKED, CHAT[:2], "ends in a prompt for another turn.*add_generation_prompt"),
        (MACRO, CHAT, "inside a macro"),
        ("{% if %}", CHAT, "chat template failed in line 1: Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("qwen", CHAT, "no chat template is called 'qwen'"),
        (None, CHAT, r"no chat template.*chat_template="),
    ],
)
def test_an_unclear_chat_is_refused(byte_level, template, chat, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(byte_level).encode_chat(chat, chat_template=template)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "at least one message"),
        ("Hi", "messages must be a list"),
        ([USER, "Hi"], r"messages\[1\] must be a dict, got 'Hi'"),
        ([USER, {"content": "a"}], r"messages\[1\]\['role'\].*got None"),
        ([USER, {"role": 3, "content": "a"}], r"messages\[1\]\['role'\].*got 3"),
        ([USER, {"role": "assistant"}], r"messages\[1\]\['content'\] is missing"),
        ([USER, {"role": "assistant", "content": 4}], r"messages\[1\]\['content'\].*got 4"),
        ([USER, CHAT[1] | {"at": object()}], "takes JSON, not object"),
    ],
)
def test_a_bad_row_is_named(tokenizer, chat, message):
    for call in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(ValueError, match=message):
            call(chat, chat_template=CHATML)


def test_arguments_of_transformers_are_no_variables(tokenizer):
    with pytest.raises(TypeError, match="return_tensors"):
        tokenizer.apply_chat_template(CHAT, chat_template=CHATML, return_tensors="pt")
    with pytest.raises(TypeError, match="add_generation_prompt"):
        tokenizer.encode_chat(CHAT, chat_template=CHATML, add_generation_prompt=True)
