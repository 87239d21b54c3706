"""Messages of different weights: where each one is in the text."""

import pickle

import pytest

from tests.tokenizer.chat_templates import CHATML, GENERATION, LLAMA3, QWEN3
from tests.tokenizer.test_assistant_mask import learned_runs
from tigon.tokenizer import Span
from tigon.tokenizer.assistant_mask import token_weights

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "the fox"},
    {"role": "user", "content": "And"},
    {"role": "assistant", "content": "Bye"},
]
# Two blocks where a turn thinks, one where it does not
TWO_BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}"
    "({% generation %}{{ m.thinking }}{% endgeneration %})"
    "{% endif %}>{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
THINKING = [CHAT[0], CHAT[1] | {"thinking": "dog"}, *CHAT[2:]]
# As many blocks as turns, but a turn that only thinks has none for its content
UNEVEN = TWO_BLOCKS.replace(">{% gen", "{% if not m.silent %}>{% gen").replace(
    "{% endgeneration %}{% else %}", "{% endgeneration %}{% endif %}{% else %}"
)
ONE_SILENT = [*THINKING[:3], CHAT[3] | {"silent": True}]
# Reasoning is dropped once turns follow, or the block itself is
DROPPED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}>{% generation %}"
    "{% if loop.last and m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALLED = (
    "{% for m in messages %}{{ '<pad>' if m.role == 'user' }}{{ m.content }}{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}</s>{% endif %}"
)
DROPS_BEFORE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>"
    "{% if m.thinking and (loop.last or messages[-1].role != 'assistant') %}{{ m.thinking }} "
    "{% endif %}{{ m.content }}</s>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
TOOLED = [*THINKING[:2], {"role": "tool", "content": "4"}, CHAT[3]]
DOG = "<think>\ndog\n</think>\n\nthe fox<|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"
LAST_ALONE = (
    "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


REFUSING = (
    "{% if messages|length < 4 %}{{ raise_exception('no') }}{% endif %}{% for m in messages %}"
    "{% if loop.last %}{% generation %}x{% endgeneration %}{% endif %}{% endfor %}"
)
# A block only for the answer "Bye"
BYE_ALONE = TWO_BLOCKS.replace("{% if m.role == 'assistant' %}", "{% if m.content == 'Bye' %}")
SILENT = [CHAT[0], {"role": "assistant", "content": ""}]


def learned(tokenizer, chat, **options):
    ((ids, weights),) = tokenizer.encode_chat_rows(chat, **options).rows
    return learned_runs(tokenizer, ids, weights)


@pytest.mark.parametrize(
    ("template", "chat", "options", "expected"),
    [
        (GENERATION, CHAT, {"train_on": "last"}, [("Bye<|im_end|>", 1)]),
        (
            GENERATION,
            CHAT,
            {"weights": [None, 0.5, None, 2]},
            [("the fox<|im_end|>", 0.5), ("Bye<|im_end|>", 2)],
        ),
        (TWO_BLOCKS, THINKING, {}, [("dog", 1), ("the fox</s>", 1), ("Bye</s>", 1)]),
        (TWO_BLOCKS, THINKING, {"train_on": "last"}, [("Bye</s>", 1)]),
        (
            TWO_BLOCKS,
            THINKING,
            {"weights": [None, 0.5, None, None]},
            [("dog", 0.5), ("the fox</s>", 0.5), ("Bye</s>", 1)],
        ),
        (UNEVEN, ONE_SILENT, {"weights": [None, 2, None, 3]}, [("dog", 2), ("the fox</s>", 2)]),
        (UNEVEN, [*ONE_SILENT, CHAT[0], CHAT[1]], {"train_on": "last"}, [("the fox</s>", 1)]),
        (
            DROPPED,
            [*THINKING, *THINKING[:2]],
            {"weights": [None, 2, None, 3, None, None]},  # the first is written differently
            [("Bye</s>", 3), ("(dog)the fox</s>", 1)],
        ),
        (CHATML, CHAT, {"weights": [0] * 4}, []),
        (LAST_ALONE, CHAT, {}, [("Bye</s>", 1)]),
        (BYE_ALONE, CHAT, {}, [("Bye</s>", 1)]),
        (BYE_ALONE, CHAT, {"train_on": "last"}, [("Bye</s>", 1)]),
        # Of a template that rewrites earlier turns, the last one is still clear
        (QWEN3, CHAT, {"train_on": "last"}, [("Bye<|im_end|>\n", 1)]),
        (QWEN3, CHAT, {"weights": [0, 0, 0, 1]}, [("Bye<|im_end|>\n", 1)]),
        (QWEN3, CHAT, {"train_on_empty_thinking": True}, [(EMPTY + "Bye<|im_end|>\n", 1)]),
        # ... of the conversation up to it, if what follows would rewrite it
        (QWEN3, CHAT, {"weights": [None, 2, None, 0]}, [("the fox<|im_end|>\n", 2)]),
        (QWEN3, CHAT[:3], {}, [("the fox<|im_end|>\n", 1)]),
        (QWEN3, CHAT[:3], {"train_on": "last"}, [("the fox<|im_end|>\n", 1)]),
        (DROPPED, [*THINKING[:3]], {"train_on": "last"}, [("(dog)the fox</s>", 1)]),
        (DROPPED, THINKING, {"weights": [None, None, None, 0]}, [("(dog)the fox</s>", 1)]),
        (LLAMA3, CHAT, {"train_on": "last"}, [("Bye<|eot_id|>", 1)]),
        (
            CHATML,
            CHAT,
            {"weights": [None, 0, 3, None]},
            [("<|im_start|>user\nAnd<|im_end|>\n", 3), ("Bye<|im_end|>\n", 1)],
        ),
    ],
)
def test_weights_reach_their_messages(tokenizer, template, chat, options, expected):
    assert learned(tokenizer, chat, chat_template=template, **options) == expected


@pytest.mark.parametrize(
    ("template", "chat", "options", "expected"),
    [
        # From the last turn backwards, each in the text that inference shows
        (QWEN3, CHAT, {}, [["Bye<|im_end|>\n"], ["the fox<|im_end|>\n"]]),
        (
            QWEN3,
            [*CHAT, *CHAT[:2]],
            {},
            [["the fox<|im_end|>\n"], ["Bye<|im_end|>\n"], ["the fox<|im_end|>\n"]],
        ),
        (
            QWEN3,
            [*THINKING[:2], {"role": "tool", "content": "4"}, THINKING[1], *CHAT[2:]],
            {},
            [["Bye<|im_end|>\n"], [DOG, DOG]],
        ),
        # As gpt-oss, which drops the reasoning in front of an answer: it is in the prompt for it
        (DROPS_BEFORE, TOOLED, {}, [["dog the fox</s>", "Bye</s>"]]),
        (QWEN3, CHAT[:3], {}, [["the fox<|im_end|>\n"]]),
        (QWEN3, CHAT, {"weights": [None, 0, None, None]}, [["Bye<|im_end|>\n"]]),
        (CHATML, CHAT, {}, [["the fox<|im_end|>\n", "Bye<|im_end|>\n"]]),
        (GENERATION, CHAT, {}, [["the fox<|im_end|>", "Bye<|im_end|>"]]),
        (TWO_BLOCKS, THINKING, {}, [["dog", "the fox</s>", "Bye</s>"]]),
        # The end of a turn that only the last one has is no end of the whole conversation
        (
            CALLED,
            [CHAT[0], CHAT[1] | {"content": "[INST]f[/INST]"}, *CHAT[2:]],
            {},
            [["Bye</s>"], ["[INST]f[/INST]</s>"]],
        ),
        # As few as possible: only the turn with reasoning is written differently
        (
            DROPPED,
            [*CHAT[:2], *THINKING, *CHAT[:2]],
            {},
            [["the fox</s>", "Bye</s>", "the fox</s>"], ["(dog)the fox</s>"]],
        ),
    ],
)
def test_all_turns_are_learned_once(tokenizer, template, chat, options, expected):
    options = {"chat_template": template, "train_on": "all_turns"} | options
    encoded = tokenizer.encode_chat_rows(chat, **options)
    texts = [[text for text, _ in learned_runs(tokenizer, *row)] for row in encoded.rows]
    assert texts == expected
    assert not encoded.rewritten
    fewer = tokenizer.encode_chat_rows(chat, **options | {"train_on": "assistant"})
    if len(expected) == 1:
        assert fewer == encoded
    elif "generation" not in template:
        assert fewer.rows == encoded.rows[:1] and fewer.rewritten == sum(map(len, expected[1:]))


def test_all_but_one_message(tokenizer):
    options = {"chat_template": CHATML, "train_on": "all"}
    whole = tokenizer.apply_chat_template(CHAT, chat_template=CHATML, tokenize=False)
    assert learned(tokenizer, CHAT, **options) == [(whole, 1)]
    assert learned(tokenizer, CHAT[:1], **options)[0][1] == 1  # no assistant is needed
    before, after = whole.split("the fox<|im_end|>\n")
    actual = learned(tokenizer, CHAT, weights=[None, 0, None, None], **options)
    assert actual == [(before, 1), (after, 1)]


OWN_WEIGHT = r"messages\[{}\] has a weight of its own"
LATER = r"prompt for messages\[3\] is not what it writes .*: learn all turns alike"
UNMARKED = "marks no token as the assistant's in this chat"
LAST = {"train_on": "last"}


@pytest.mark.parametrize(
    ("template", "chat", "options", "message"),
    [
        (QWEN3, CHAT, {"weights": [None, 0, 1, 0]}, OWN_WEIGHT.format(2) + ", but where"),
        (QWEN3, CHAT, {"weights": [None, 1, 1, 0]}, OWN_WEIGHT.format(2) + ", but where"),
        (
            *(QWEN3, CHAT, {"weights": [None, 2, None, 1], "train_on": "all"}),
            OWN_WEIGHT.format(1) + ".*rewrites it",
        ),
        (REFUSING, CHAT, LAST, r"in messages\[3\], because .*: no; learn all turns alike"),
        (LAST_ALONE, CHAT, LAST, LATER),
        (LAST_ALONE, CHAT, {"weights": [None, 2, None, 3]}, LATER),
        (BYE_ALONE, SILENT, {}, UNMARKED),
        (BYE_ALONE, SILENT, LAST, UNMARKED),
        (BYE_ALONE, [*CHAT, *SILENT], LAST, UNMARKED),
    ],
)
def test_ambiguous_places_are_refused(tokenizer, template, chat, options, message):
    with pytest.raises(ValueError, match=message):
        learned(tokenizer, chat, chat_template=template, **options)
    if message == UNMARKED:
        with pytest.raises(ValueError, match=message):
            tokenizer.end_of_turn(chat, chat_template=template)


def test_the_text_of_a_span(tokenizer):
    # adds <s> before, and </s> behind
    ids, weights = tokenizer.encode_weighted("the fox", [Span(3, 7, 0.5)])
    assert ids == tokenizer.encode("the fox") and ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w]) == " fox"
    assert set(weights) == {0, 0.5} and tokenizer.encode_weighted("", [Span(0, 0, 1)])[1] == [0, 0]


@pytest.mark.parametrize("split", [True, False])
def test_a_copy_in_another_process_encodes_the_same(tokenizer, split):
    tokenizer.backend.encode_special_tokens = split
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("a</s>b") == tokenizer.encode("a</s>b")
    assert copy.digest() == tokenizer.digest()
    tokenizer.backend.encode_special_tokens = not split
    assert copy.digest() != tokenizer.digest()


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_a_lone_surrogate_is_named(tokenizer, text):
    for call in (
        lambda: tokenizer.encode(text),
        lambda: tokenizer.encode_batch(["good", text]),
        lambda: tokenizer.encode_chat(
            [CHAT[0], {"role": "assistant", "content": text}], chat_template=CHATML
        ),
    ):
        with pytest.raises(ValueError, match=r"has the lone surrogate '\\ud"):
            call()


@pytest.mark.parametrize(
    ("spans", "weights"),
    [
        ([Span(0, 3, 0.5), Span(3, 6, 0)], [0.5, 0.5, 0, 0]),
        ([Span(3, 6, 0.5), Span(0, 3, 0)], [0, 0.5, 0.5, 0.5]),
        ([Span(0, 3, 1), Span(3, 6, 2)], [1, 2, 2, 2]),
        ([Span(1, 1, 1)], [0, 0, 0, 0]),
    ],
)
def test_overlapped_tokens_have_the_larger_weight(spans, weights):
    assert token_weights([(0, 2), (2, 5), (5, 5), (5, 6)], spans) == weights
