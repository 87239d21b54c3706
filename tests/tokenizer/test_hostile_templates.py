# ruff: noqa: E501
"""Templates that would run for ever, take all memory, or get out: one error each, and soon."""

import resource
import time
from typing import Any

import pytest

from tests.tokenizer.chat_templates import TEMPLATES
from tigon.tokenizer.chat_template import render

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes."}]
FAST = 10.0  # seconds of this process; the slowest take two on a fast machine, most some hundredths
SMALL = 512 * 2**20  # bytes by which its peak of memory may grow

BLOCK = "{%% set ns = namespace(x=%s) %%}{%% for i in range(100000) %%}%s{%% endfor %%}"


def loop(start: str, body: str) -> str:
    return BLOCK % (start, body)


ENDLESS = {
    "nested ranges": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "no output": "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = j %}{% endfor %}"
    "{% endfor %}",
    "range too long": "{% for i in range(10**9) %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "power of powers": loop("2", "{% set ns.x = ns.x ** 2 %}"),
    "product": loop("3", "{% set ns.x = ns.x * ns.x %}"),
    "letters": "{{ 'x' * 2147483648 }}",
    "letters from the right": "{{ 2147483648 * 'x' }}",
    "items": "{{ ([1] * 2147483648)|length }}",
    "constant": "{% if 'x' * 2147483648 %}{% endif %}",
    "doubling": loop("'x'", "{% set ns.x = ns.x + ns.x %}"),
    "doubling by ~": loop("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling in a block": loop("'x'", "{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = b %}"),
    "doubling by a filter": loop("'x'", "{% set ns.x = [ns.x, ns.x]|join %}"),
    "doubling by a method": loop("'x'", "{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    "doubling by a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + loop("'x'", "{% set ns.x = m(ns.x) %}"),
    "doubling by replace": loop("'x'", "{% set ns.x = ns.x|replace('x', 'xx') %}"),
    "doubling by .replace": loop("'x'", "{% set ns.x = ns.x.replace('x', 'xx') %}"),
    "doubling by %": loop("'x'", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    "doubling by |format": loop("'x'", "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}"),
    "doubling by .format": loop("'x'", "{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    "doubling lists": loop("[1]", "{% set ns.x = ns.x + ns.x %}"),
    "doubling Markup": loop("'x'|safe", "{% set ns.x = ns.x + ns.x %}"),
    "a list of itself": loop("[1]", "{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x }}",
    "a tuple of itself": loop("(1,)", "{% set ns.x = (ns.x, ns.x) %}") + "{{ {ns.x: 1} }}",
    "a dict of itself": loop("1", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}") + "{{ ns.x|tojson }}",
    "equal lists": loop("[1]", "{% set ns.x = [ns.x, ns.x] %}{% set y = [ns.x] == [[ns.x[0]]] %}"),
    "varargs of itself": "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    + loop("1", "{{ m(ns.x, ns.x) }}") + "{{ ns.x }}",
    "batches of itself": loop("[1]", "{% set ns.x = [1]|batch(9, ns.x)|list %}") + "{{ ns.x }}",
    "map of itself": loop("[1]", "{% set ns.x = [none, none]|map('default', ns.x, true)|list %}"),
    "cyclers": loop("1", "{% set ns.x = cycler(ns.x, ns.x).items %}") + "{{ ns.x }}",
    "namespaces": loop("1", "{% set n = namespace(a=ns.x, b=ns.x) %}{% set ns.x = n %}") + "{{ [ns.x] }}",
    "namespaces in each other": "".join(f"{{% set n{i} = namespace() %}}" for i in range(40))
    + "".join(f"{{% set n{i}.a = n{i - 1} %}}{{% set n{i}.b = n{i - 1} %}}" for i in range(1, 40))
    + "{% for i in range(1000000) %}{{ n39 }}{% endfor %}",
    "items of a type": loop("1", "{% set ns.x = dict[ns.x, ns.x] %}") + "{{ ns.x }}",
    "a test without items": loop("'x' * 1000000", "{% for c in ns.x if false %}{% endfor %}"),
    "defaults of a macro": "{% macro f(a=[" + "1," * 5000 + "]) %}{% endmacro %}" + loop("", "{{ f() }}"),
    "deep JSON": loop("[range(100000)|list] * 10", "{% if i < 200 %}{% set ns.x = [ns.x] %}{% else %}{{ ns.x|tojson(indent=0) }}{% endif %}"),
    "attributes behind each other": loop("'.' * 1000000", "{% set y = []|join(attribute=ns.x) %}"),
    "indented lines": "{{ ('a\\r' * 500000)|indent(20000) }}",
    "many beginnings": "{% macro m() %}{% for i in range(100000) %}{{ ''.startswith(varargs) }}{% endfor %}{% endmacro %}"
    "{{ m(*(['b'] * 50000)) }}",
    "many arguments": loop("['upper'] + [1] * 50000", "{% set y = []|map(*ns.x) %}"),
    "equal Markup": "{% set x = 'a' * 3000000 %}{% set y = x|safe %}{% set z = 'a' * 3000000 %}"
    "{% for i in range(100000) %}{% set k = y == z %}{% endfor %}",
    "padded time": loop("", "{% set x = strftime_now('" + "%9999d" * 160 + "') %}"),
    "a deep list in an error": "{% set ns = namespace(x=[]) %}{% for i in range(3000) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ raise_exception(ns.x) }}",
    "scoped blocks": "{% for " + ",".join(f"a{i:x}" for i in range(6000)) + " in [] %}"
    + "".join("{% block b" + str(i) + " scoped %}{% endblock %}" for i in range(900)) + "{% endfor %}",
    "names times blocks": "{% set " + ",".join(f"a{i:x}" for i in range(6000)) + " = 1 %}" + "{% if x %}{% endif %}" * 1500,
    "a chain of comparisons": "{{ 1" + " < messages" * 6000 + " }}",
    "a growing list": loop("[]", "{% set ns.x = ns.x + ['a' * 1000] %}"),
    "long output": "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    "output again": "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "center": "{{ 'x'|center(10 ** 10) }}",
    ".center": "{{ 'x'.center(10 ** 10) }}",
    ".ljust": "{{ 'x'.ljust(10 ** 10) }}",
    ".zfill": "{{ 'x'.zfill(width) if false else '1'.zfill(10 ** 10) }}",
    ".expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\\ny'|indent(10 ** 10) }}",
    "indented JSON": "{{ messages|tojson(indent=10 ** 9) }}",
    "separated JSON": "{{ messages|tojson(separators=['x' * 100000, 'y']) }}",
    "% pads": "{{ '%1000000000d' % 1 }}",
    "% pads by a value": "{{ '%*d' % (1000000000, 1) }}",
    "% with a nested key": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "format pads": "{{ '{:1000000000}'.format(1) }}",
    "format pads by a value": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format_map pads": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "odd text": "{{ '%1000000000d' is odd }}",
    "divisible text": "{{ '%1000000000d' is divisibleby(3) }}",
    "rounding": "{{ 5|round(-1000000000) }}",
    "rounding text": "{{ 'x'|round(9, 'ceil') }}",
    "batch": "{{ [1]|batch(10 ** 9, 0)|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list }}",
    "sum of lists": "{{ (range(100000)|batch(1)|list * 10)|sum(start=[]) }}",
    "lorem ipsum": "{{ lipsum(n=1000000) }}",
    "colliding numbers": "{{ range(0, 100000 * (2**61 - 1), 2**61 - 1)|unique|list }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(100) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
    "calls": "{% macro m(n) %}{{ caller() }}{% endmacro %}{% for i in range(100000) %}"
    "{% call m(1) %}{% for j in range(1000) %}{% endfor %}{% endcall %}{% endfor %}",
    "search": "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{{ 'y' in x }}{% endfor %}",
    "search from the right": "{% set x = 'x' * 2000000 %}{{ x.rfind('y' + x[:1000000]) }}",
    "stripping": "{% set x = 'x' * 2000000 %}{{ x.strip('y' * 1000000 + 'x') }}",
    "comparing": "{% set x = 'x' * 1000000 %}{% set y = 'x' * 1000000 %}{% for i in range(100000) %}"
    "{{ x == y }}{% endfor %}",
    "slicing": "{% set x = 'x' * 1000000 %}{% for i in range(100000) %}{% set y = x[1:] %}{% endfor %}",
    "maps": "{% for i in range(100000) %}{% set x = range(100000)|map('string')|list %}{% endfor %}",
    "paths": "{{ range(100000)|map(attribute='a.' * 100000)|list }}",
    "marks": "{% for i in range(100000) %}{% generation %}{{ 'x' * 1000 }}{% endgeneration %}{% endfor %}",
    "dates": "{% for i in range(100000) %}{{ strftime_now('%c' * 499) }}{% endfor %}",
    "a long date": "{{ strftime_now('%c' * 100000) }}",
    "a long template": "{{ 'a' }}" * 2**15,
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_not_end(name: str) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="the chat template failed"):
        print(len(render(ENDLESS[name], CHAT).text))
    assert time.process_time() - start < FAST
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < SMALL


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ['']|map(attribute='__class__')|list }}",
        "{{ messages|selectattr('__class__')|list }}",
        "{{ messages|sort(attribute='__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__}'['format']('') }}",
        "{{ ('{0.__class__}'|attr('format'))('') }}",
        "{{ '{a.__class__}'.format_map({'a': ''}) }}",
        "{{ ('{0.__class__}'|safe).format('') }}",
        "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f('') }}",
        "{{ ['{0.__class__.__mro__}']|map(attribute='format')|first('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ range.__globals__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
        "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
        "{% for x in [1]|map('string') %}{{ loop.__init__.__globals__ }}{% endfor %}",
        "{{ ([1]|map('string')).gi_frame.f_globals }}",
        "{{ ([1]|map('string')).gi_code }}",
        "{{ ([1]|map('string')).throw(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].setdefault('a', 1) }}",
        "{{ 'a'.encode('punycode') }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ {}.fromkeys(range(100000)) }}",
        "{{ 'a'.maketrans({'a': 'b'}) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 'a'.upper %}{{ ns|e }}",
        "{{ namespace(__html__=''.upper)|e }}",
        "{% include 'x' %}",
        "{% include ['x'] ignore missing %}",
        "{% import 'x' as y %}",
        "{% from 'x' import y %}",
        "{% extends '/etc/passwd' %}",
        "{% autoescape true %}{{ '<' }}{% endautoescape %}",
        "{{ ''|urlize }}",
    ],
)
def test_no_way_out(template: str) -> None:
    with pytest.raises(ValueError, match=r"the chat template failed in line 1: "):
        print(render(template, CHAT).text)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n\n{{ 1 / 0 }}", "in line 3: ZeroDivisionError: division by zero"),
        ("\n{{ 2.0 ** 5000 }}", "in line 2: OverflowError"),
        ("\n{% set a = 1e999 %}", "in line 2: NameError"),
        ("\n{{ [1, 'a']|sort }}", "in line 2: '<' not supported"),
        ("{% macro m() %}\n{{ nothing.at.all }}{% endmacro %}\n\n{{ m() }}", "in line 2: 'nothing' is"),
        ("\n{{ messages[5].role }}", "in line 2: list object has no element 5"),
        ("\n{{ {}[[]] }}{{ {[]: 1} }}", "in line 2: unhashable"),
        ("\n{{ {(-1,): 1, (-2,): 2} }}", "in line 2: a tuple is no key"),
        ("\n{{ dict([((-1,), 1)]) }}", "in line 2: a tuple is no key"),
        ("\n{{ {}[(-1,)] }}", "in line 2: a tuple is no key"),
        ("\n{{ [(-1,), (-2,)]|unique|list }}", "in line 2: a tuple is no key"),
        ("\n{% for a, b in [1] %}{% endfor %}", "in line 2: cannot unpack"),
        ("\n{% for a, b in [[1]] %}{% endfor %}", "in line 2: ValueError: not enough values"),
        ("\n{{ [] | max }}{{ range(1, 2, 0) }}", "in line 2: ValueError"),
        ("\n{{ raise_exception('No \x1b[31msystem.') }}", r"in line 2: No \\x1b\[31msystem\."),
        ("\n{{ raise_exception('x' * 100000) }}", r"in line 2: x{1000}\.\.\.$"),
        ("\n{% for loop in [1] %}{% endfor %}", "in line 2: Can't assign to special loop variable"),
        ("\n{{ " + "1" * 5000 + " }}", "failed: ValueError: Exceeds the limit"),
        ("a{{ '\\ud800' }}", r"failed: its text has the lone surrogate '\\ud800' behind 'a'"),
        ("{{ '%c' % 56320 }}", r"failed: its text has the lone surrogate '\\udc00' behind ''"),
        ("{{ " + "(" * 5000, "failed: RecursionError"),
        ("{{ " + "not " * 5000 + "1 }}", "failed: RecursionError"),
        ("{{ a" + ".a" * 5000 + " }}", "failed: its expressions are nested deeper than 256"),
        ("{{ " + "a == (" * 300 + "1" + ")" * 300 + " }}", "failed"),
        ("{% if a %}" * 150 + "{% endif %}" * 150, "failed: (Indentation|Syntax)Error"),
        ("{% for a in b %}" * 50 + "{% endfor %}" * 50, "failed: SyntaxError"),
        ("{% if a %}" + "{% elif a %}" * 9000 + "{% endif %}", "failed"),
        ("{% block a %}{% endblock %}{% block a %}{% endblock %}", "failed in line 1: block 'a' defined twice"),
    ],
)  # fmt: skip
def test_one_error_with_the_line(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template (failed )?{message}"):
        print(render(template, CHAT).text)


def test_deep_messages() -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        render("{{ messages }}", [{"role": "user", "content": deep}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_long_conversations_are_no_attack(name: str) -> None:
    """Neither many turns nor a long text: what may be done grows with what there is."""
    many = [m for _ in range(1500) for m in CHAT]
    long = [{"role": "user", "content": "a <b>\n" * 10**6}, CHAT[1]]
    for chat in (many, long):
        text = render(
            TEMPLATES[name], chat, bos_token="B", eos_token="E", documents=[{"title": "T"}]
        ).text
        assert len(text) > 0.8 * sum(len(m["content"]) for m in chat)


def test_each_rendering_begins_anew() -> None:
    template = "{% for i in range(3000) %}{{ 'x' * 1000 }}{% endfor %}"
    assert {len(render(template, CHAT).text) for _ in range(30)} == {3_000_000}
