"""Rows of preferences: the tokens, what is learned of them, and what is refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small import CHATML, write_tokenizer
from tigon.data import (
    Entry,
    Examples,
    LabelledEncoder,
    PairEncoder,
    RewardedEncoder,
    TopEncoder,
    find_sources,
    read,
)
from tigon.data.preferences import split_prompt
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


@pytest.fixture
def encode(tmp_path: Path) -> Callable[..., Examples]:
    def run(encoder: Any, rows: list[dict[str, Any]]) -> Examples:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return read(find_sources(Entry(str(path))), pickle.loads(pickle.dumps(encoder)))

    return run


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
    row = {"prompt": "hi", "chosen": [ASK, HO], "rejected": [ASK, HA]}
    both = [
        encode(PairEncoder(tokenizer), [r])
        for r in (row, {**row, "prompt": [ASK]} | {"chosen": [HO], "rejected": [HA]})
    ]
    assert sequences(both[0]) == sequences(both[1])


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
    alone = encode(LabelledEncoder(tokenizer), rows[:1])
    assert alone.per_example["matched"].tolist() == [True]


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
    "empty message": (GOOD | {"chosen": [EMPTY]}, "'chosen' has an answer without content"),
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
        "different prompts: where they part, chosen goes on with a message of 'user'",
    ),
    "other texts": ({"chosen": "a b", "rejected": "c d"}, "have no beginning in common"),
    "prompt of neither": (
        {"prompt": "bye", "chosen": [ASK, HO], "rejected": [ASK, HA]},
        "the prompt 'bye' is none of the messages",
    ),
    "prompt twice": (GOOD | {"chosen": [ASK, HO]}, "'chosen' begins with a message of 'user'"),
    "kinds": (GOOD | {"rejected": "ha"}, "'chosen' is list and 'rejected' is str"),
    "kinds of prompt": (
        {"prompt": [ASK], "chosen": "a", "rejected": "b"},
        "'prompt' is a list of messages, and the answers are texts",
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
    with pytest.raises(ValueError, match=r"a.jsonl:1: 'label' must be true or false, not 1"):
        encode(LabelledEncoder(tokenizer), [row])
    with pytest.raises(ValueError, match=r"a.jsonl:1: 'completion' has an answer without"):
        encode(LabelledEncoder(tokenizer), [row | {"completion": [EMPTY], "label": True}])
    with pytest.raises(ValueError, match=r"its keys .* are those of task=dpo"):
        encode(LabelledEncoder(tokenizer), [GOOD])
    with pytest.raises(ValueError, match=r"its keys .* are those of task=sft"):
        encode(PairEncoder(tokenizer), [{"prompt": "a", "completion": "b"}])


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
        "token 2 has a token twice, or one that is none",
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
