"""Rows of preferences: the tokens, what is learned of them, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.small import CHATML
from tigon.data import Examples, LabelledEncoder, PairEncoder, RewardedEncoder, TopEncoder
from tigon.data.formats import split_prompt
from tigon.tokenizer import Tokenizer

ASK, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HA, HEY = {"role": "assistant", "content": "ha ha"}, {"role": "assistant", "content": "hey"}
SYSTEM, SO = {"role": "system", "content": "be"}, {"role": "user", "content": "so"}

PAIRS: dict[str, list[dict[str, Any]]] = {
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
def test_pairs_are_the_tokens_of_trl(
    rows: Any, directory: Path, tokenizer: Tokenizer, encode: Any
) -> None:
    examples = encode(PairEncoder(tokenizer), rows)
    expected = prepared("DPO", directory, rows)
    assert examples.groups is not None and examples.groups.tolist() == [0, 2, 4]
    found = sequences(examples)
    for i, row in enumerate(expected):
        assert found[2 * i] == (row["prompt_ids"], row["chosen_ids"])
        assert found[2 * i + 1] == (row["prompt_ids"], row["rejected_ids"])


def test_a_prompt_that_is_a_text_of_whole_conversations(tokenizer: Tokenizer, encode: Any) -> None:
    text = {"prompt": "hi", "chosen": [ASK, HO], "rejected": [ASK, HA]}
    found, expected = (encode(PairEncoder(tokenizer), [row]) for row in (text, GOOD))
    assert sequences(found) == sequences(expected)


def test_a_prompt_of_messages_with_which_both_begin_again(
    tokenizer: Tokenizer, encode: Any
) -> None:
    for asked in ([ASK], [SYSTEM, ASK], [ASK, HEY, SO]):
        apart = {"prompt": asked, "chosen": [HO], "rejected": [HA, SO, HEY]}
        again = apart | {"chosen": [*asked, HO], "rejected": [*asked, HA, SO, HEY]}
        for encoder in (PairEncoder(tokenizer), LabelledEncoder(tokenizer)):
            found, expected = (encode(encoder, [row]) for row in (again, apart))
            assert sequences(found) == sequences(expected)
    # What an assistant says twice stays so
    twice = {"prompt": [HEY], "chosen": [HEY, HO], "rejected": [HEY, HA]}
    prompt, _ = sequences(encode(PairEncoder(tokenizer), [twice]))[0]
    assert prompt == tokenizer.apply_chat_template([HEY], add_generation_prompt=True)
    with pytest.raises(ValueError, match="'rejected' has no answer: no message follows"):
        encode(PairEncoder(tokenizer), [{"prompt": [ASK], "chosen": [ASK, HO], "rejected": [ASK]}])


@pytest.mark.parametrize("rows", [r for k, r in PAIRS.items() if "implicit" in k])
def test_implicit_prompts_are_those_of_trl(rows: Any) -> None:
    extract_prompt = pytest.importorskip("trl.data_utils").extract_prompt
    for row in rows:
        prompt, chosen, rejected = split_prompt(row["chosen"], row["rejected"])
        assert extract_prompt(row) == {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_margins_are_a_column_where_they_are_read(tokenizer: Tokenizer, encode: Any) -> None:
    rows = [PAIRS["messages"][0] | {"margin": 1.5}, PAIRS["messages"][1]]
    examples = encode(PairEncoder(tokenizer, margin=True), rows)
    assert examples.per_example["margin"].tolist() == [1.5, 1.5, 0.0, 0.0]
    without = encode(PairEncoder(tokenizer), rows)
    assert not without.per_example and without.report.ignored_keys == ("margin",)
    named = [{**PAIRS["messages"][0], "chosen": [HO | {"mood": "good"}], "score": 3}]
    assert encode(PairEncoder(tokenizer), named).report.ignored_keys == ("chosen.mood", "score")


def test_labelled_answers_are_the_tokens_of_trl_with_their_mismatched_ones(
    directory: Path, tokenizer: Tokenizer, encode: Any
) -> None:
    rows = [
        {"prompt": [ASK], "completion": [HO], "label": True},
        {"prompt": [SYSTEM, ASK], "completion": [HA], "label": False},
        {"prompt": [SO], "completion": [HEY], "label": True},
    ]
    examples = encode(LabelledEncoder(tokenizer), rows)
    expected = prepared("KTO", directory, rows, per_device_train_batch_size=3)
    assert examples.groups is not None and examples.groups.tolist() == [0, 2, 4, 6]
    assert examples.per_example["desired"].tolist() == [True, True, False, False, True, True]
    assert examples.per_example["matched"].tolist() == [True, False] * 3
    found = sequences(examples)
    for i, row in enumerate(expected):
        assert found[2 * i] == (row["prompt_ids"], row["completion_ids"])
        assert found[2 * i + 1] == (row["prompt_ids"], row["KL_completion_ids"])
    numbered = encode(LabelledEncoder(tokenizer), [r | {"label": int(r["label"])} for r in rows])
    assert numbered.fingerprint() == examples.fingerprint()
    alone = encode(LabelledEncoder(tokenizer), rows[:1])
    assert alone.per_example["matched"].tolist() == [True]


@pytest.mark.parametrize("rows", PAIRS.values(), ids=PAIRS)
def test_pairs_are_a_desired_and_an_undesired_answer_each(
    rows: Any, directory: Path, tokenizer: Tokenizer, encode: Any
) -> None:
    """The tokens of TRL, which has all chosen answers of a thousand rows before all rejected; here
    each row's follow each other."""
    examples = encode(LabelledEncoder(tokenizer), [row | {"margin": 1.0} for row in rows])
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
    alone = encode(LabelledEncoder(tokenizer), rows[:1])
    assert alone.per_example["desired"].tolist() == [True, False]
    assert alone.per_example["matched"].all() and alone.groups is None  # of one each


def test_an_answer_with_a_label_is_none_of_a_pair_beside_it(
    tokenizer: Tokenizer, encode: Any
) -> None:
    """Rows with the keys of both formats stay what they were."""
    rows: list[dict[str, Any]] = [
        {"prompt": [ASK], "completion": [HO], "label": True},
        {"prompt": [SO], "completion": [HA], "label": False},
    ]
    both = [row | {"chosen": [HEY], "rejected": [HA]} for row in rows]
    encoder = LabelledEncoder(tokenizer)
    found, expected = (encode(encoder, rows) for rows in (both, rows))
    assert found.fingerprint() == expected.fingerprint()
    assert found.report.ignored_keys == ("chosen", "rejected")


WHOLE: dict[str, list[dict[str, Any]]] = {
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
def test_sequences_without_a_prompt_in_common_are_scored_as_in_trl(
    rows: Any, directory: Path, tokenizer: Tokenizer, encode: Any
) -> None:
    examples = encode(PairEncoder(tokenizer, shared_prompt=False), rows)
    expected = prepared("Reward", directory, rows)
    found = [prompt + learned for prompt, learned in sequences(examples)]
    assert found == [ids for row in expected for ids in (row["chosen_ids"], row["rejected_ids"])]
    assert not any(prompt for prompt, _ in sequences(examples)[:-2])
    assert all(prompt for prompt, _ in sequences(examples)[-2:])  # of the last row, in common
    if isinstance(rows[0]["chosen"], list):
        system = [row | {"system": "be"} for row in rows[:3]]
        behind = [{k: [SYSTEM, *said] for k, said in row.items()} for row in rows[:3]]
        # These have it in common, and so as a prompt
        ids = encode(PairEncoder(tokenizer, shared_prompt=False), behind).tokens.tolist()
        assert encode(PairEncoder(tokenizer, shared_prompt=False), system).tokens.tolist() == ids
        with pytest.raises(ValueError, match="both a key 'system' and a message"):
            twice = rows[0] | {"system": "be", "chosen": [SYSTEM, ASK, HO]}
            encode(PairEncoder(tokenizer, shared_prompt=False), [twice])
    for row in rows[:-1]:
        for encoder in (PairEncoder(tokenizer), LabelledEncoder(tokenizer)):
            with pytest.raises(ValueError, match=r"answer different prompts|has no answer"):
                encode(encoder, [row])
    one = PairEncoder(tokenizer).digest()
    assert PairEncoder(tokenizer, shared_prompt=False).digest() == one  # caches stay


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": ""}, "'rejected' has no answer"),
        ({"chosen": [ASK, HO], "rejected": []}, "'rejected' has no answer"),
        ({"chosen": "a", "rejected": "a"}, "are equal"),
        (
            {"chosen": [ASK, HO], "rejected": [SO, HO | {"content": ""}]},
            r"rejected\[1\] is an empty answer",
        ),
        ({"prompt": [ASK], "chosen": [ASK, HO], "rejected": [SO, HO]}, "begins with a message of"),
        ({"prompt": "hi", "chosen": [ASK, HO], "rejected": [SO, HO]}, "make it a list of messages"),
    ],
)
def test_bad_sequences_are_refused(
    row: Any, message: str, tokenizer: Tokenizer, encode: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(PairEncoder(tokenizer, shared_prompt=False), [row])


GOOD = {"prompt": [ASK], "chosen": [HO], "rejected": [HA]}
EMPTY = {"role": "assistant", "content": ""}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "equal texts": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
    "equal messages": (GOOD | {"rejected": [HO]}, "'chosen' and 'rejected' are equal"),
    "equal tokens": (
        {"prompt": "a", "chosen": "b", "rejected": "b<|endoftext|>"},
        "chosen and rejected are the same tokens",
    ),
    "empty text": ({"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' has no answer"),
    "empty list": (GOOD | {"rejected": []}, "'rejected' has no answer: no message follows"),
    "empty message": (GOOD | {"chosen": [EMPTY]}, r"chosen\[0\] is an empty answer"),
    "implicit end": (
        {"chosen": [ASK, HO], "rejected": [ASK]},
        "'rejected' has no answer: no message follows the prompt",
    ),
    "other prompts": (
        {"chosen": [ASK, HO], "rejected": [SO, HO]},
        "chosen and rejected answer different prompts",
    ),
    "later prompts": (
        {"chosen": [ASK, HO, SO, HO], "rejected": [ASK, HO, ASK, HO]},
        "different prompts: .*one goes on with a message of 'user'",
    ),
    "other texts": ({"chosen": "a b", "rejected": "c d"}, "have no beginning in common"),
    "no column of prompts": (
        {"question": "hi", "chosen": "yes", "rejected": "no"},
        "the row has no prompt; columns={prompt: NAME} says which key it is",
    ),
    "text before messages": (
        GOOD | {"prompt": "hi"},
        "the prompt 'hi' is a text, and no message that .* make it a list of messages too",
    ),
    "system before text": (
        {"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"},
        "'system' needs a prompt of messages, not a text",
    ),
    "two systems": (
        GOOD | {"prompt": [{"role": "system", "content": "s"}, ASK], "system": "t"},
        "has both a key 'system' and a message of the system",
    ),
    "prompt of neither": (
        {"prompt": "bye", "chosen": [ASK, HO], "rejected": [ASK, HA]},
        "the prompt 'bye' is none of the messages",
    ),
    "prompt twice": (GOOD | {"chosen": [ASK, HO]}, "'chosen' begins with a message of 'user'"),
    "kinds": (GOOD | {"rejected": "ha"}, "'chosen' is list and 'rejected' is str"),
    "kinds of prompt": (
        {"prompt": [ASK], "chosen": "a", "rejected": "b"},
        "'prompt' is list and 'the answers' is str",
    ),
    "number": (GOOD | {"chosen": 3}, "'chosen' must be a text or a list of messages, not int"),
    "margin": (GOOD | {"margin": "much"}, "'margin' must be a finite number, not 'much'"),
    "margin for float32": (GOOD | {"margin": 1e39}, "must be a finite number, not 1e.39"),
    "margin for no float": (GOOD | {"margin": 10**400}, "must be a finite number, not 1000"),
}


@pytest.mark.parametrize(("row", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_pairs_are_refused_with_their_line(
    row: Any, message: str, tokenizer: Tokenizer, encode: Any
) -> None:
    first = GOOD if isinstance(row["chosen"], list) else PAIRS["texts"][0]
    with pytest.raises(ValueError, match=f"a.jsonl:2: .*{message}"):
        encode(PairEncoder(tokenizer, margin=True), [first, row])
    skipped = encode(PairEncoder(tokenizer, margin=True, skip_bad_rows=True), [first, row])
    assert len(skipped) == 2 and skipped.report.skipped == 1


def test_bad_labels_and_rows_of_other_tasks(tokenizer: Tokenizer, encode: Any) -> None:
    row = {"prompt": [ASK], "completion": [HO], "label": 1}
    for label in (2, -1, 1.0, "1", []):
        with pytest.raises(ValueError, match=f"or 1 or 0, not {re.escape(repr(label))}"):
            encode(LabelledEncoder(tokenizer), [row | {"label": label}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: completion\[0\] is an empty answer"):
        encode(LabelledEncoder(tokenizer), [row | {"completion": [EMPTY], "label": True}])
    with pytest.raises(ValueError, match=r"its keys .* of task=sft; needs unpaired: .prompt"):
        encode(LabelledEncoder(tokenizer), [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ValueError, match=r"its keys .* are those of task=sft"):
        encode(PairEncoder(tokenizer), [{"prompt": "a", "completion": "b"}])
    with pytest.raises(ValueError, match=r"a.jsonl:1: 'label' is null: needs unpaired: "):
        encode(LabelledEncoder(tokenizer), [row | {"label": None}])


def test_system_of_a_row_is_a_message_before_its_prompt(tokenizer: Tokenizer, encode: Any) -> None:
    """As in the rows of fine-tuning; null and empty ones are none."""
    pair, labelled = GOOD, {"prompt": [ASK], "completion": [HO], "label": True}
    given = {"prompt": [ASK], "completions": [[HO], [HA]], "rewards": [1.0, 0.0]}
    cases = (
        (PairEncoder(tokenizer), pair),
        (PairEncoder(tokenizer), {"chosen": [ASK, HO], "rejected": [ASK, HA]}),
        (LabelledEncoder(tokenizer), labelled),
        (RewardedEncoder(tokenizer), given),
    )
    for encoder, row in cases:
        asked = "prompt" if "prompt" in row else "chosen"
        names = ("prompt",) if asked == "prompt" else ("chosen", "rejected")
        system = {"role": "system", "content": "says it"}
        whole = row | {name: [system, *row[name]] for name in names}
        found = encode(encoder, [row | {"system": "says it"}])
        assert found.fingerprint() == encode(encoder, [whole]).fingerprint()
        without = encode(encoder, [row])
        assert found.fingerprint() != without.fingerprint()
        for none in (None, ""):
            assert encode(encoder, [row | {"system": none}]).fingerprint() == without.fingerprint()
        assert not found.report.ignored_keys


REWARDED = {"prompt": [5, 6], "completions": [[7, 8], [9]], "rewards": [1.0, 0.0]}
# What teachers say is read of the last two tokens
STORED = {
    "input_ids": [5, 6, 7, 8],
    "completion_mask": [0, 0, 1, 1],
    "teacher_tokens": [None, None, [6, 7], [8]],
    "teacher_logprobs": [None, None, [-0.5, -2.0], [-0.1]],
}
NUMBERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "reward for no float": (RewardedEncoder, {"rewards": [10**400, 0]}, "is no finite number"),
    "reward for float32": (RewardedEncoder, {"rewards": [1e300, -1e300]}, "is no finite number"),
    "probabilities": (
        RewardedEncoder,
        {"old_logprobs": [[0.5, 0.25], [0.5]]},
        "has 0.5 in it: log-probabilities are at most 0",
    ),
    "negative token": (
        RewardedEncoder,
        {"completions": [[7, -8], [9]]},
        "'completions' has -8 in it, which is no token",
    ),
    "token for no int32": (
        RewardedEncoder,
        {"prompt": [5, 2**32 + 6]},
        "'prompt' has 4294967302 in it, which is no token",
    ),
    "input ids": (TopEncoder, {"input_ids": [5, -6, 7, 8]}, "'input_ids' has -6 in it"),
    "true for a token": (TopEncoder, {"input_ids": [True, 6, 7, 8]}, "list of whole numbers"),
    "mask": (TopEncoder, {"completion_mask": [0, 0, -1, 1]}, "list of 0 and 1"),
    "teacher's token for no int32": (
        TopEncoder,
        {"teacher_tokens": [None, None, [6, 2**32 + 7], [8]]},
        "token 2 has a duplicate or negative id",
    ),
    "teacher's texts": (
        TopEncoder,
        {"teacher_logprobs": [None, None, ["-0.5", -2.0], [-0.1]]},
        "token 2 is none",
    ),
    "teacher's number": (TopEncoder, {"teacher_tokens": [None, None, 6, [8]]}, "token 2 is empty"),
}


@pytest.mark.parametrize(("encoder", "change", "message"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_no_column_holds_are_refused_with_their_line(
    encoder: Any, change: dict[str, Any], message: str, tokenizer: Tokenizer, encode: Any
) -> None:
    good = STORED if encoder is TopEncoder else REWARDED
    rows = [good, good | change]
    with pytest.raises(ValueError, match=f"a.jsonl:2: .*{message}"):
        encode(encoder(tokenizer), rows)
    skipped = encode(encoder(tokenizer, skip_bad_rows=True), rows)
    assert skipped.report.skipped == 1


def test_what_a_teacher_says_where_nothing_is_learned_is_not_read(
    tokenizer: Tokenizer, encode: Any
) -> None:
    also = {
        "teacher_tokens": [3, [6, "a"], [6, 7], [8]],
        "teacher_logprobs": [None, 0.5, [-0.5, -2.0], [-0.1]],
    }
    expected, found = (encode(TopEncoder(tokenizer), [STORED | x]) for x in ({}, also))
    for name in ("teacher_tokens", "teacher_logprobs"):
        assert found.per_token[name].tolist() == expected.per_token[name].tolist()


def test_advantages_that_float32_does_not_hold(tokenizer: Tokenizer, encode: Any) -> None:
    far = {"completions": [[7], [8], [9]], "rewards": [3e38, -3e38, -3e38]}
    encoder = RewardedEncoder(tokenizer, scale=False)
    with pytest.raises(ValueError, match=r"a.jsonl:1: 'rewards' are too far apart: .* is 4e\+38"):
        encode(encoder, [REWARDED | far])
    encode(RewardedEncoder(tokenizer), [REWARDED | far])  # divided by their deviation


THINKS = CHATML.replace(  # as Qwen3's: a block of reasoning, empty if the message has none
    "'\n' + m['content']",
    "'\n' + ('<think>\n' + (m.thinking or '') + '\n</think>\n\n' if m.role == 'assistant' else '')"
    " + m['content']",
)
BLOCK = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("chosen", "options", "expected"),
    [
        (HO, {}, ["ho<|im_end|>\n", "ha ha<|im_end|>\n"]),
        (
            HO,
            {"train_on_empty_thinking": True},
            [f"{BLOCK}ho<|im_end|>\n", f"{BLOCK}ha ha<|im_end|>\n"],
        ),
        # The block tells them apart
        (
            HO | {"thinking": "so"},
            {},
            ["<think>\nso\n</think>\n\nho<|im_end|>\n", f"{BLOCK}ha ha<|im_end|>\n"],
        ),
    ],
)
def test_an_empty_block_of_reasoning_belongs_to_the_prompt(
    directory: Path, encode: Any, chosen: Any, options: Any, expected: list[str]
) -> None:
    tokenizer = Tokenizer.from_pretrained(directory)
    tokenizer.chat_template = THINKS
    row = {"prompt": [ASK], "chosen": [chosen], "rejected": [HA]}
    found = sequences(encode(PairEncoder(tokenizer, **options), [row]))
    assert [tokenizer.decode(ids) for _, ids in found] == expected
    alone = {"prompt": [ASK], "completion": [chosen], "label": True}
    ((_, ids),) = sequences(encode(LabelledEncoder(tokenizer, **options), [alone]))
    assert tokenizer.decode(ids) == expected[0]
    assert (
        PairEncoder(tokenizer).digest() != PairEncoder(tokenizer, **options).digest() or not options
    )


def test_a_policy_that_said_an_empty_block_has_logprobs_for_it(
    directory: Path, encode: Any
) -> None:
    tokenizer = Tokenizer.from_pretrained(directory)
    tokenizer.chat_template = THINKS
    row = {"prompt": [ASK], "completions": [[HO], [HA]], "rewards": [0, 1]}
    (_, short), _ = sequences(encode(RewardedEncoder(tokenizer), [row]))
    assert tokenizer.decode(short) == "ho<|im_end|>\n"
    texts = [f"{BLOCK}{m['content']}<|im_end|>\n" for m in (HO, HA)]
    old = [[-1.0] * len(tokenizer.encode(text)) for text in texts]
    found = sequences(encode(RewardedEncoder(tokenizer), [row | {"old_logprobs": old}]))
    assert [tokenizer.decode(ids) for _, ids in found] == texts
