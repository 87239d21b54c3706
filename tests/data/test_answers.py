"""Rows of preferences: the tokens, what is learned of them, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import fingerprint
from tests.support.small import CHATML
from tigon.data import Examples, LabelledEncoder, PairEncoder, RewardedEncoder, TopEncoder

ASK, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HA, HEY = {"role": "assistant", "content": "ha ha"}, {"role": "assistant", "content": "hey"}
SYSTEM, SO = {"role": "system", "content": "be"}, {"role": "user", "content": "so"}

PAIRS = {
    "texts": [
        {"prompt": "the model", "chosen": " reads words", "rejected": " says"},
        {"prompt": "whoever", "chosen": "<|endoftext|>", "rejected": " asked it"},
    ],
    "implicit texts": [
        {"chosen": "the model reads words", "rejected": "the model says"},
        {"chosen": "the sky is blue", "rejected": "the sky is gray"},
    ],
    "messages": [
        {"prompt": [ASK], "chosen": [HO], "rejected": [HA]},
        {"prompt": [SYSTEM, ASK], "chosen": [HO], "rejected": [HEY, SO, HA]},
    ],
    "implicit messages": [
        {"chosen": [SYSTEM, ASK, HO], "rejected": [SYSTEM, ASK, HA]},
        {"chosen": [ASK, HO, SO, HEY], "rejected": [ASK, HO, SO, HA]},
    ],
}


def sequences(examples: Examples) -> list[tuple[list[int], list[int]]]:
    """Of each example, the tokens of the prompt and those that are learned."""
    found = []
    for start, stop in zip(examples.offsets[:-1], examples.offsets[1:], strict=True):
        ids, learned = examples.tokens[start:stop], examples.supervised[start:stop]
        assert learned.tolist() == sorted(learned.tolist())
        found.append((ids[~learned].tolist(), ids[learned].tolist()))
    return found


def prepared(name: str, directory: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    """The rows as TRL's trainer tokenises them."""
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    own = transformers.AutoTokenizer.from_pretrained(directory, chat_template=CHATML)
    config = getattr(trl, f"{name}Config")(
        output_dir=str(directory), bf16=False, use_cpu=True, **options
    )
    bare = object.__new__(getattr(trl, f"{name}Trainer"))
    bare._tokenizer, bare.calculate_KL = own, True
    bare.desirable_weight = bare.undesirable_weight = 1.0
    return bare._prepare_dataset(dataset, own, config, "train")


@pytest.mark.parametrize("rows", PAIRS.values(), ids=PAIRS)
def test_pairs_are_the_tokens_of_trl(rows, directory, encode):
    examples = encode(PairEncoder, rows)
    expected = prepared("DPO", directory, rows)
    assert examples.groups is not None and examples.groups.tolist() == [0, 2, 4]
    found = sequences(examples)
    for i, row in enumerate(expected):
        assert found[2 * i] == (row["prompt_ids"], row["chosen_ids"])
        assert found[2 * i + 1] == (row["prompt_ids"], row["rejected_ids"])


SAME = [
    # The prompt as a text of whole conversations
    (
        {"prompt": "hi", "chosen": [ASK, HO], "rejected": [ASK, HA]},
        {"prompt": [ASK], "chosen": [HO], "rejected": [HA]},
    ),
    # A prompt of messages with which both begin again
    *(
        (
            {"prompt": asked, "chosen": [*asked, HO], "rejected": [*asked, HA, SO, HEY]},
            {"prompt": asked, "chosen": [HO], "rejected": [HA, SO, HEY]},
        )
        for asked in ([ASK], [SYSTEM, ASK], [ASK, HEY, SO])
    ),
]


@pytest.mark.parametrize("encoder", [PairEncoder, LabelledEncoder])
@pytest.mark.parametrize(("row", "plain"), SAME)
def test_ways_to_write_a_prompt(encoder, row, plain, encode):
    found, expected = (encode(encoder, [r]) for r in (row, plain))
    assert sequences(found) == sequences(expected)


def test_what_an_assistant_says_twice_stays(tokenizer, encode):
    twice = {"prompt": [HEY], "chosen": [HEY, HO], "rejected": [HEY, HA]}
    prompt, _ = sequences(encode(PairEncoder, [twice]))[0]
    assert prompt == tokenizer.apply_chat_template([HEY], add_generation_prompt=True)


def test_digests(tokenizer):
    digests = [
        PairEncoder(tokenizer, **options).digest()
        for options in ({}, {"shared_prompt": False}, {"train_on_empty_thinking": True})
    ]
    assert digests[0] == digests[1] != digests[2]  # caches stay without a shared prompt


def test_margins_are_a_column_where_they_are_read(encode):
    rows = [PAIRS["messages"][0] | {"margin": 1.5}, PAIRS["messages"][1]]
    examples = encode(PairEncoder, rows, margin=True)
    assert examples.per_example["margin"].tolist() == [1.5, 1.5, 0.0, 0.0]
    without = encode(PairEncoder, rows)
    assert not without.per_example and without.report.ignored_keys == ("margin",)
    named = [{**PAIRS["messages"][0], "chosen": [HO | {"mood": "good"}], "score": 3}]
    assert encode(PairEncoder, named).report.ignored_keys == ("chosen.mood", "score")


def test_labelled_answers_are_the_tokens_of_trl_with_their_mismatched_ones(directory, encode):
    rows = [
        {"prompt": [ASK], "completion": [HO], "label": True},
        {"prompt": [SYSTEM, ASK], "completion": [HA], "label": False},
        {"prompt": [SO], "completion": [HEY], "label": True},
    ]
    examples = encode(LabelledEncoder, rows)
    expected = prepared("KTO", directory, rows, per_device_train_batch_size=3)
    assert examples.groups is not None and examples.groups.tolist() == [0, 2, 4, 6]
    assert examples.per_example["desired"].tolist() == [True, True, False, False, True, True]
    assert examples.per_example["matched"].tolist() == [True, False] * 3
    found = sequences(examples)
    for i, row in enumerate(expected):
        assert found[2 * i] == (row["prompt_ids"], row["completion_ids"])
        assert found[2 * i + 1] == (row["prompt_ids"], row["KL_completion_ids"])
    # Labels as numbers; and rows with the keys of a pair beside them
    pair = {"chosen": [HEY], "rejected": [HA]}
    again = encode(LabelledEncoder, [r | pair | {"label": int(r["label"])} for r in rows])
    assert fingerprint(again) == fingerprint(examples)
    assert again.report.ignored_keys == ("chosen", "rejected")
    alone = encode(LabelledEncoder, rows[:1])
    assert alone.per_example["matched"].tolist() == [True]


@pytest.mark.parametrize("rows", PAIRS.values(), ids=PAIRS)
def test_pairs_are_a_desired_and_an_undesired_answer_each(rows, directory, encode):
    """The tokens of TRL, which has all chosen answers of a thousand rows before all rejected; here
    each row's follow each other."""
    examples = encode(LabelledEncoder, [row | {"margin": 1.0} for row in rows])
    assert examples.report.ignored_keys == ("margin",)
    expected = prepared("KTO", directory, rows, per_device_train_batch_size=2)
    assert examples.groups is not None and examples.groups.tolist() == [0, 2, 4, 6, 8]
    assert examples.origin[:, 1].tolist() == [1] * 4 + [2] * 4
    assert examples.per_example["desired"].tolist() == [True, True, False, False] * 2
    assert examples.per_example["matched"].tolist() == [True, False] * 4
    found = sequences(examples)
    for i, place in enumerate((0, 4, 2, 6)):  # chosen, chosen, rejected, rejected
        row = expected[i]
        assert found[place] == (row["prompt_ids"], row["completion_ids"])
        assert found[place + 1] == (row["prompt_ids"], row["KL_completion_ids"])
        assert row["label"] == (i < 2)
    alone = encode(LabelledEncoder, rows[:1])
    assert alone.per_example["desired"].tolist() == [True, False]
    assert alone.per_example["matched"].all() and alone.groups is None  # of one each


WHOLE = {
    "texts": [
        {"chosen": "good text", "rejected": "bad text"},
        {"chosen": "the model", "rejected": "the model says"},
        {"chosen": "the model reads", "rejected": "the model says"},
    ],
    "messages": [
        {"chosen": [ASK, HO], "rejected": [SO, HO]},
        {"chosen": [ASK, HO, SO, HA], "rejected": [ASK, HO, ASK, HA]},
        {"chosen": [ASK, HO], "rejected": [ASK, HO, SO, HA]},
        {"chosen": [ASK, HO], "rejected": [ASK, HA]},
    ],
}


@pytest.mark.parametrize("rows", WHOLE.values(), ids=WHOLE)
def test_sequences_without_a_prompt_in_common_are_scored_as_in_trl(rows, directory, encode):
    examples = encode(PairEncoder, rows, shared_prompt=False)
    expected = prepared("Reward", directory, rows)
    found = [prompt + learned for prompt, learned in sequences(examples)]
    assert found == [ids for row in expected for ids in (row["chosen_ids"], row["rejected_ids"])]
    assert not any(prompt for prompt, _ in sequences(examples)[:-2])
    assert all(prompt for prompt, _ in sequences(examples)[-2:])  # of the last row, in common
    if isinstance(rows[0]["chosen"], list):
        system = [row | {"system": "be"} for row in rows[:3]]
        behind = [{k: [SYSTEM, *said] for k, said in row.items()} for row in rows[:3]]
        # These have it in common, and so as a prompt
        ids = encode(PairEncoder, behind, shared_prompt=False).tokens.tolist()
        assert encode(PairEncoder, system, shared_prompt=False).tokens.tolist() == ids


GOOD = {"prompt": [ASK], "chosen": [HO], "rejected": [HA]}


def test_system_of_a_row_is_a_message_before_its_prompt(encode):
    """As in the rows of fine-tuning; null and empty ones are none."""
    given = {"prompt": [ASK], "completions": [[HO], [HA]], "rewards": [1.0, 0.0]}
    cases = (
        (PairEncoder, GOOD),
        (PairEncoder, {"chosen": [ASK, HO], "rejected": [ASK, HA]}),
        (LabelledEncoder, LABELED),
        (RewardedEncoder, given),
    )
    system = {"role": "system", "content": "says it"}
    for encoder, row in cases:
        names = ("prompt",) if "prompt" in row else ("chosen", "rejected")
        whole = row | {name: [system, *row[name]] for name in names}
        rows = [
            row | {"system": "says it"},
            whole,
            row,
            row | {"system": None},
            row | {"system": ""},
        ]
        found, expected, *without = (fingerprint(encode(encoder, [r])) for r in rows)
        assert found == expected and found not in without and len(set(without)) == 1


EMPTY = {"role": "assistant", "content": ""}
LABELED = {"prompt": [ASK], "completion": [HO], "label": True}
REWARDED = {"prompt": [5, 6], "completions": [[7, 8], [9]], "rewards": [1.0, 0.0]}
# What teachers say is read of the last two tokens
STORED = {
    "input_ids": [5, 6, 7, 8],
    "completion_mask": [0, 0, 1, 1],
    "teacher_tokens": [None, None, [6, 7], [8]],
    "teacher_logprobs": [None, None, [-0.5, -2.0], [-0.1]],
}
SINGLE_TEXTS = {"chosen": "a b", "rejected": "c d"}
PAIR_TEXTS = {"prompt": "a", "chosen": "b", "rejected": "c"}
REFUSED = [
    (PairEncoder, PAIR_TEXTS | {"rejected": "b"}, "are equal"),
    (PairEncoder, GOOD | {"rejected": [HO]}, "'chosen' and 'rejected' are equal"),
    (PairEncoder, GOOD | {"rejected": [HO | {"content": [{"text": "ho"}]}]}, "are equal"),
    (PairEncoder, PAIR_TEXTS | {"rejected": "b<|endoftext|>"}, "are the same tokens"),
    (PairEncoder, PAIR_TEXTS | {"chosen": ""}, "'chosen' has no answer"),
    (PairEncoder, GOOD | {"rejected": []}, "'rejected' has no answer: no message follows"),
    (PairEncoder, GOOD | {"chosen": [EMPTY]}, r"chosen\[0\] is an empty answer"),
    (PairEncoder, {"chosen": [ASK, HO], "rejected": [ASK]}, "'rejected' has no answer: no mess"),
    (PairEncoder, {"chosen": [ASK, HO], "rejected": [SO, HO]}, "answer different prompts"),
    (
        PairEncoder,
        {"chosen": [ASK, HO, SO, HO], "rejected": [ASK, HO, ASK, HO]},
        "different prompts: .*one goes on with a message of 'user'",
    ),
    (PairEncoder, SINGLE_TEXTS, "no prompt; columns={prompt: NAME} says which key it is"),
    (PairEncoder, GOOD | {"prompt": "hi"}, "'hi' is a text, and no message that .* make it a"),
    (PairEncoder, PAIR_TEXTS | {"system": "s"}, "'system' needs a prompt of messages, not a text"),
    (PairEncoder, GOOD | {"prompt": [SYSTEM, ASK], "system": "t"}, "has both a key 'system' and"),
    (
        PairEncoder,
        {"prompt": "bye", "chosen": [ASK, HO], "rejected": [ASK, HA]},
        "the prompt 'bye' is no message",
    ),
    (PairEncoder, GOOD | {"chosen": [ASK, HO]}, "'chosen' begins with a message of 'user'"),
    (PairEncoder, GOOD | {"rejected": "ha"}, "'chosen' is list and 'rejected' is str"),
    (PairEncoder, PAIR_TEXTS | {"prompt": [ASK]}, "'prompt' is list and 'chosen' is str"),
    (PairEncoder, GOOD | {"chosen": 3}, "must be a text or a list of messages, not int"),
    *((PairEncoder, GOOD | {"margin": m}, "finite number") for m in ("much", 1e39, 10**400)),
    *(
        (LabelledEncoder, {"label": label}, f"or 1 or 0, not {re.escape(repr(label))}")
        for label in (2, -1, 1.0, "1", [])
    ),
    (LabelledEncoder, {"completion": [EMPTY]}, r"completion\[0\] is an empty answer"),
    (RewardedEncoder, {"rewards": [10**400, 0]}, "is no finite number"),
    (RewardedEncoder, {"rewards": [1e300, -1e300]}, "is no finite number"),
    (RewardedEncoder, {"old_logprobs": [[0.5, 0.25], [0.5]]}, "has 0.5 in it: log-probabilities"),
    (RewardedEncoder, {"completions": [[7, -8], [9]]}, "'completions' has -8 in it, which is no"),
    (RewardedEncoder, {"prompt": [5, 2**32]}, "'prompt' has 4294967296 in it, which is no token"),
    (TopEncoder, {"input_ids": [5, -6, 7, 8]}, "'input_ids' has -6 in it"),
    (TopEncoder, {"input_ids": [True, 6, 7, 8]}, "list of whole numbers"),
    (TopEncoder, {"completion_mask": [0, 0, -1, 1]}, "list of 0 and 1"),
    (TopEncoder, {"teacher_tokens": [None, None, [6, 2**32], [8]]}, "token 2 has a duplicate or"),
    (TopEncoder, {"teacher_logprobs": [None, None, ["-0.5", -2.0], [-0.1]]}, "token 2 is none"),
    (TopEncoder, {"teacher_tokens": [None, None, 6, [8]]}, "token 2 is empty"),
]


@pytest.mark.parametrize(("kind", "row", "message"), REFUSED)
def test_bad_rows_are_refused_with_their_line(kind, row, message, encode):
    first = {LabelledEncoder: LABELED, RewardedEncoder: REWARDED, TopEncoder: STORED}.get(kind)
    if first is None:
        first = GOOD if isinstance(row["chosen"], list) else PAIRS["texts"][0]
    else:
        row = first | row
    options = {"margin": True} if kind is PairEncoder else {}
    with pytest.raises(ValueError, match=f"a.jsonl:2: .*{message}"):
        encode(kind, [first, row], **options)
    skipped = encode(kind, [first, row], skip_bad_rows=True, **options)
    assert skipped.report.skipped == 1 and len(skipped) == len(encode(kind, [first]))


FAR = {"prompt": [1], "completions": [[7], [8], [9]], "rewards": [3e38, -3e38, -3e38]}
FIRST_REFUSED = [
    *(
        (PairEncoder, {"shared_prompt": False}, row, message)
        for row, message in (
            ({"chosen": "a", "rejected": ""}, "'rejected' has no answer"),
            ({"chosen": [ASK, HO], "rejected": []}, "'rejected' has no answer"),
            ({"chosen": "a", "rejected": "a"}, "are equal"),
            ({"chosen": [ASK, HO], "rejected": [SO, EMPTY]}, r"rejected\[1\] is an empty answer"),
            ({"prompt": [ASK], "chosen": [ASK, HO], "rejected": [SO, HO]}, "begins with a message"),
            ({"prompt": "hi", "chosen": [ASK, HO], "rejected": [SO, HO]}, "make it a list of mess"),
            ({"system": "be", "chosen": [SYSTEM, HO], "rejected": [SO]}, "both a key 'system' and"),
        )
    ),
    (LabelledEncoder, {}, {"prompt": "a", "completion": "b"}, "task=sft; needs unpaired: .prompt"),
    (PairEncoder, {}, {"prompt": "a", "completion": "b"}, "its keys .* are those of task=sft"),
    (LabelledEncoder, {}, LABELED | {"label": None}, "'label' is null: needs unpaired: "),
    (RewardedEncoder, {"scale": False}, FAR, r"'rewards' are too far apart: .* is 4e\+38"),
]


@pytest.mark.parametrize(("kind", "options", "row", "message"), FIRST_REFUSED)
def test_first_rows_that_are_refused(kind, options, row, message, encode):
    with pytest.raises(ValueError, match=f"a.jsonl:1: .*{message}"):
        encode(kind, [row], **options)


def test_what_a_teacher_says_where_nothing_is_learned_is_not_read(encode):
    also = {
        "teacher_tokens": [3, [6, "a"], [6, 7], [8]],
        "teacher_logprobs": [None, 0.5, [-0.5, -2.0], [-0.1]],
    }
    expected, found = (encode(TopEncoder, [STORED | x]) for x in ({}, also))
    for name in ("teacher_tokens", "teacher_logprobs"):
        assert found.per_token[name].tolist() == expected.per_token[name].tolist()


THINKS = CHATML.replace(  # as Qwen3's: a block of reasoning, empty if the message has none
    "'\n' + m['content']",
    "'\n' + ('<think>\n' + (m.thinking or '') + '\n</think>\n\n' if m.role == 'assistant' else '')"
    " + m['content']",
)
BLOCK = "<think>\n\n</think>\n\n"


SO_HO = HO | {"thinking": "so"}  # a block that tells answers apart


@pytest.mark.parametrize(
    ("chosen", "options", "blocks"),
    [
        (HO, {}, ["", ""]),
        (HO, {"train_on_empty_thinking": True}, [BLOCK, BLOCK]),
        (SO_HO, {}, ["<think>\nso\n</think>\n\n", BLOCK]),
    ],
)
def test_an_empty_block_of_reasoning_belongs_to_the_prompt(
    tokenizer, encode, chosen, options, blocks
):
    def learned(kind: Any, row: Any) -> list[str]:
        examples = encode(kind, {"prompt": [ASK], **row}, template=THINKS, **options)
        found = sequences(examples)
        return [tokenizer.decode(ids) for _, ids in found]

    expected = [f"{blocks[0]}ho<|im_end|>\n", f"{blocks[1]}ha ha<|im_end|>\n"]
    assert learned(PairEncoder, {"chosen": [chosen], "rejected": [HA]}) == expected
    assert learned(LabelledEncoder, {"completion": [chosen], "label": True}) == expected[:1]
    row = {"completions": [[chosen], [HA]], "rewards": [0, 1]}
    assert learned(RewardedEncoder, row) == expected
    # A policy that said the block itself has log-probabilities for it
    texts = [
        f"{block or BLOCK}{text}<|im_end|>\n"
        for block, text in zip(blocks, ("ho", "ha ha"), strict=True)
    ]
    old = [[-1.0] * len(tokenizer.encode(text)) for text in texts]
    assert learned(RewardedEncoder, row | {"old_logprobs": old}) == texts
