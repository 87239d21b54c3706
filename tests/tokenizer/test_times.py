"""Which times a chat template writes, and what fixes them."""

from datetime import datetime
from typing import Any

import pytest

from tigon.tokenizer import Tokenizer

MESSAGES = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
LLAMA = """\
{%- if not date_string is defined %}{%- if strftime_now is defined %}\
{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{% set date_string = "26 Jul 2024" %}\
{%- endif %}{%- endif %}{{ "Today Date: " + date_string }}"""
GPT_OSS = "{{ 'Current date: ' + strftime_now('%Y-%m-%d') }}"
DAY, SAME_DAY, NEXT = (datetime(2026, 5, *at) for at in ((1, 9, 30), (1, 23, 59), (2, 9, 30)))


def rendered(tokenizer: Tokenizer, **variables: Any) -> Any:
    chat = [{"role": "user", "content": "a"}]
    return tokenizer.apply_chat_template(chat, tokenize=False, **variables)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("", {}),
        ("{# strftime_now('%Y') #}{{ 1 if strftime_now is defined }}", {}),
        (LLAMA, {"%d %b %Y": "01 May 2026"}),
        (GPT_OSS, {"%Y-%m-%d": "2026-05-01"}),
        ("{{ strftime_now( \"%H\" ) }}{{ strftime_now('%Y') }}", {"%H": "09", "%Y": "2026"}),
        ("{% set f = '%Y' %}{{ strftime_now(f) }}", {"%Y": "2026"}),
        ("{% set now = strftime_now %}", {}),
        ("{% if messages[2] %}{{ strftime_now('%Y') }}{% endif %}", {"%Y": "2026"}),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}", {"%Y": "2026"}),
        ("{{ strftime_now('%Y') }}{{ raise_exception('no') if tools }}", {"%Y": "2026"}),
    ],
)
def test_the_times_that_a_template_writes(tokenizer, template, written):
    tokenizer.chat_template, tokenizer.strftime_now = template + MESSAGES, DAY
    assert tokenizer.template_times() == written
    tokenizer.chat_template = {"default": MESSAGES, "tool_use": template}
    assert tokenizer.template_times() == written


@pytest.mark.parametrize("template", [LLAMA, GPT_OSS, ""])
def test_digests_change_with_what_is_written(tokenizer, template):
    tokenizer.chat_template = template + MESSAGES
    digests, texts, alone = [], [], set()
    for tokenizer.strftime_now in (DAY, SAME_DAY, NEXT):
        digests.append(tokenizer.digest())
        texts.append(rendered(tokenizer))
        alone.add(tokenizer.digest(chats=False))
    assert digests[0] == digests[1] and texts[0] == texts[1] and len(alone) == 1
    assert (digests[1] != digests[2]) == (texts[1] != texts[2]) == bool(template)


def test_a_variable_pins_the_time(tokenizer):
    tokenizer.chat_template = LLAMA + MESSAGES
    tokenizer.use_chat_template_kwargs({"date_string": "26 Jul 2024"})
    digests = set()
    for tokenizer.strftime_now in (DAY, NEXT, None):
        assert tokenizer.template_times() == {}
        digests.add(tokenizer.digest())
        assert rendered(tokenizer) == "Today Date: 26 Jul 2024usera"
    assert len(digests) == 1
    tokenizer.use_chat_template_kwargs({"date_string": "27 Jul 2024"})
    assert tokenizer.digest() not in digests
    tokenizer.chat_template = LLAMA + GPT_OSS + MESSAGES  # of which it pins one alone
    assert tokenizer.template_times()
    tokenizer.chat_template = LLAMA.replace("system_message", "x") + MESSAGES
    tokenizer.chat_template_kwargs = {"other": 1}
    assert tokenizer.template_times()


def test_without_a_time_it_is_now(tokenizer):
    tokenizer.chat_template = GPT_OSS
    assert rendered(tokenizer) == f"Current date: {datetime.now():%Y-%m-%d}"
    tokenizer.strftime_now = DAY
    assert rendered(tokenizer) == "Current date: 2026-05-01"


def test_variables_of_all_chats_and_of_one(tokenizer):
    tokenizer.chat_template = "{{ think }}{{ date }}"
    tokenizer.use_chat_template_kwargs({"think": False, "date": "x"})
    assert rendered(tokenizer) == "Falsex"
    assert rendered(tokenizer, think=True) == "Truex"
    for variables, template, message in (
        ({"thinking": 1}, "{{ think }}", "'thinking', which the chat template does not read"),
        ({"tools": []}, "{{ tools }}", "must be an object of the chat template's own variables"),
        ({"think": 1}, None, "the tokenizer has no chat template"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=message):
            tokenizer.use_chat_template_kwargs(variables)
