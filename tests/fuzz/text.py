"""A tokenizer's files with their chat template."""

import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.fuzz.harness import Case, Files, Target
from tests.fuzz.junk import altered, damaged, dump, values
from tigon.tokenizer import Tokenizer as OurTokenizer

TOKENIZER, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED, TEMPLATE = "added_tokens.json", "chat_template.jinja"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, 12 of them."}]
ENDS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "model_max_length": 64,
    "added_tokens_decoder": {"1": {"content": "</s>", "special": True}},
    "extra_special_tokens": ["<x>"],
    "split_special_tokens": False,
    "chat_template": "{{ messages[0].content }}",
}
CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + m.content|trim }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def write(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.normalizer = normalizers.Replace("\r\n", "\n")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    backend.save(str(folder / TOKENIZER))
    (folder / CONFIG).write_text(json.dumps(ENDS))
    (folder / MAP).write_text(json.dumps({"eos_token": "</s>"}))
    (folder / ADDED).write_text(json.dumps({"<x>": 258}))
    (folder / TEMPLATE).write_text(CHATML)


def load(folder: Path) -> None:
    tokenizer = OurTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("Hello 123\r\n  \u00e9 \u65e5 " + "a" * 500)
    tokenizer.decode(ids)
    try:
        tokenizer.apply_chat_template(CHAT)
    except ValueError as error:  # a template is a text, which may come from anywhere
        raise ValueError(f"{TEMPLATE}: {error}") from None


PARTS = ["normalizer", "pre_tokenizer", "model", "model.merges", "model.unk_token", "decoder"]
PARTS += ["post_processor", "added_tokens", "truncation", "padding", "version"]
NAMES = ["messages", "ns", "x", "loop", "cycler", "dict(a=1)", "'x'", "9", "[1, x]", "{}"]
AFTER = ["|tojson(indent=9)", "|join", "|list", "|map('string')", "|replace('x', 'xx')"]
AFTER += [".__class__", "|attr('__init__')", "['__mro__']", ".format(x)", "[0]", "['content']"]
AFTER += [" ~ x", " + x", "|sort", "|sum", "|string", " % x", "|unique", "()", ".split('x')"]
AFTER += [".join(x)", ".items()", "|groupby('role')", " == x", " in x"]
expressions = st.builds(
    lambda name, after: name + "".join(after),
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(AFTER), max_size=4),
)
BLOCKS = ["{%% for x in %s %%}%s{%% endfor %%}", "{%% if %s %%}%s{%% endif %%}"]
BLOCKS += ["{%% set x %%}{{ %s }}%s{%% endset %%}", "{%% set ns.x = %s %%}%s", "{{ %s }}%s"]
BLOCKS += ["{%% macro m(x) %%}{{ %s }}{{ m(x) }}{%% endmacro %%}{{ m(1) }}%s"]
templates = st.builds(
    lambda body: "{% set ns = namespace(x='x') %}" + body,
    st.recursive(
        st.just(""),
        lambda inner: st.builds(
            lambda b, e, i: b % (e, i), st.sampled_from(BLOCKS), expressions, inner
        ),
        max_leaves=6,
    ),
)


token = st.sampled_from([None, 5, "", "<y>", {"content": "<y>"}, {"content": None}, {}, []])
special_tokens = st.dictionaries(
    st.sampled_from(["eos_token", "x_token", "extra_special_tokens", "additional_special_tokens"]),
    st.one_of(
        token,
        st.lists(token, min_size=1, max_size=2),
        st.dictionaries(st.sampled_from(["x_token", "y"]), token, min_size=1),
    ),
    min_size=1,
)


def cases(files: Files) -> st.SearchStrategy[Case]:
    config = json.loads(files[CONFIG])
    keys = [*config, "pad_token", "eos_token.content", "eos_token.lstrip"]
    keys += ["additional_special_tokens"]
    named = {
        TOKENIZER: st.one_of(
            altered(json.loads(files[TOKENIZER]), PARTS).map(dump), damaged(files[TOKENIZER])
        ),
        CONFIG: st.one_of(
            special_tokens.map(lambda some: dump(config | some)),
            altered(config, keys).map(dump),
            damaged(files[CONFIG]),
        ),
        MAP: st.one_of(special_tokens, altered({"eos_token": "</s>"}, keys), values).map(dump),
        ADDED: st.one_of(altered({"<x>": 258}, ["<x>", "<y>"]).map(dump), values.map(dump)),
        TEMPLATE: st.one_of(templates.map(str.encode), damaged(files[TEMPLATE])),
    }
    # Beside an added_tokens_decoder the two others are not read
    old = {k: v for k, v in config.items() if k != "added_tokens_decoder"}
    beside = {name: {CONFIG: dump(old)} for name in (MAP, ADDED)}
    return st.one_of(
        *(
            content.map(lambda c, n=name: {**beside.get(n, {}), n: c})
            for name, content in named.items()
        )
    )


TARGETS = [Target("tokenizer", 6, write, cases, load)]
