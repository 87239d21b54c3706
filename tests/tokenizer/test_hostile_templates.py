"""Templates that others have written: no way out of the sandbox, limited sizes, one error."""

import copy

import pytest

from tigon.tokenizer import chat_template
from tigon.tokenizer.chat_template import render

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    "template",
    [
        # Jinja writes an attribute that it refuses as nothing, and fails where it is used
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ['']|map(attribute='__class__')|list }}",
        "{{ messages|selectattr('__class__')|list }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0.__class__}'['format']('') }}",
        "{{ ('{0.__class__}'|attr('format'))('') }}",
        "{{ '{a.__class__}'.format_map({'a': ''}) }}",
        "{{ ('{0.__class__}'|safe).format('') }}",
        "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ range.__globals__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
        "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
        "{{ ([1]|map('string')).gi_frame.f_globals }}",
        "{{ ([1]|map('string')).gi_code }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].setdefault('a', 1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 'a'.upper %}{{ ns|e }}",
        "{{ namespace(__html__=''.upper)|e }}",
        "{% include 'x' %}",
        "{% include ['x'] ignore missing %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_no_way_out(template):
    chat = copy.deepcopy(CHAT)
    try:
        text = render(template, chat).text
    except ValueError as error:
        assert str(error).startswith("the chat template failed in line 1: ")
    else:
        assert text in ("", "[]", "[Undefined]")
    assert chat == CHAT


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n\n{{ 1 / 0 }}", "in line 3: ZeroDivisionError: division by zero"),
        ("\n{{ 2.0 ** 5000 }}", "in line 2: OverflowError"),
        ("\n{% set a = 1e999 %}", "in line 2: NameError"),
        ("\n{{ [1, 'a']|sort }}", "in line 2: '<' not supported"),
        (
            "{% macro m() %}\n{{ nothing.at.all }}{% endmacro %}\n\n{{ m() }}",
            "in line 2: 'nothing' is",
        ),
        ("\n{{ messages[5].role }}", "in line 2: list object has no element 5"),
        ("\n{% for a, b in [1] %}{% endfor %}", "in line 2: cannot unpack"),
        ("\n{% for a, b in [[1]] %}{% endfor %}", "in line 2: ValueError: not enough values"),
        ("\n{{ raise_exception('No \x1b[31msystem.') }}", r"in line 2: No \\x1b\[31msystem\."),
        ("\n{{ raise_exception('x' * 100000) }}", r"in line 2: x{1000}\.\.\.$"),
        ("\n{% for loop in [1] %}{% endfor %}", "in line 2: Can't assign to special loop variable"),
        ("\n{{ strftime_now('\\ud800') }}", "surrogate"),
        ("\n{{ " + "1" * 5000 + " }}", "ValueError: Exceeds the limit"),
        ("a{{ '\\ud800' }}", r"the lone surrogate '\\ud800' behind 'a'"),
        ("{{ " + "(" * 5000, "RecursionError"),
        ("{{ a" + ".a" * 5000 + " }}", "RecursionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "in line 1: RecursionError"),
        ("{% if a %}" * 150 + "{% endif %}" * 150, "(Indentation|Syntax)Error"),
    ],
)
def test_one_error_with_the_line(template, message):
    with pytest.raises(ValueError, match=message):
        render(template, CHAT)


def test_sizes_are_limited(monkeypatch):
    with pytest.raises(ValueError, match="has over 65536 characters: 65537"):
        render("x" * 65537, CHAT)
    assert render("{{ 'x' * 9 }}" * 11, CHAT).text == "x" * 99
    monkeypatch.setattr(chat_template, "MAX_TEXT", 98)
    with pytest.raises(ValueError, match="failed: it writes more than 98 characters"):
        render("{{ 'x' * 9 }}" * 11, CHAT)
    with pytest.raises(ValueError, match="failed: it writes more than 98 characters"):
        render(
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", CHAT
        )


def test_deep_messages():
    deep = "x"
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        render("{{ messages }}", [{"role": "user", "content": deep}])
