import json
from dataclasses import replace

import numpy as np
import pytest

from tests.small import write_tokenizer
from tigon.data import Example, chat_examples, collect, find_files, text_examples
from tigon.data.sources import read_chats, read_texts
from tigon.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_globs_and_lists_of_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / name).write_text("x")
    names = [path.name for path in find_files([f"{tmp_path}/*.txt", f"{tmp_path}/c.jsonl"])]
    assert names == ["a.txt", "b.txt", "c.jsonl"]


def test_a_text_file_is_one_document_or_divided_by_a_separator(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\n\nthree\n\n")
    assert list(read_texts(path)) == [(1, "one\ntwo\n\n\n\nthree\n\n")]
    assert list(read_texts(path, "\n\n")) == [(1, "one\ntwo"), (6, "three")]


def test_jsonl_rows_with_line_numbers_and_ignored_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "id": 7}\n\n{"text": "two"}\n')
    ignored: set[str] = set()
    assert list(read_texts(path, ignored=ignored)) == [(1, "one"), (3, "two")]
    assert ignored == {"id"}


def test_text_examples_end_with_eos_and_know_their_line(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the model"}\n{"text": "whoever<|endoftext|>"}\n')
    examples = text_examples([path], tokenizer)
    eos = tokenizer.eos_token_id
    first, second = tokenizer.encode("the model"), tokenizer.encode("whoever")
    assert examples.tokens.tolist() == [*first, eos, *second, eos]
    assert examples.offsets.tolist() == [0, len(first) + 1, len(first) + len(second) + 2]
    assert examples.supervised.all()
    assert [examples.where(p) for p in (0, len(first), len(first) + 1)] == [
        f"{path}:1",
        f"{path}:1",
        f"{path}:2",
    ]


def test_chat_examples_learn_what_the_assistant_says(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    turns = [*CHAT, {"role": "user", "content": "so"}, {"role": "assistant", "content": "bye"}]
    path.write_text(json.dumps({"messages": turns}))
    examples = chat_examples([path], tokenizer)
    said = tokenizer.decode(examples.tokens[examples.supervised])
    assert said.replace("\n", "") == "hello<|im_end|>bye<|im_end|>"
    assert tokenizer.decode(examples.tokens) == tokenizer.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"text": "\xff"}\n'.encode("latin-1"), r"a\.jsonl:1: not valid JSON"),
        ("a.jsonl", '{"txt": "x", "id": 1}\n', r"a\.jsonl:1: needs a string \"text\".*'txt', 'id'"),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1: needs a JSON object, not list"),
        ("a.txt", b"\xff\xfe", r"a\.txt is not UTF-8"),
        ("a.csv", "x", r"a\.csv: text data is read from"),
    ],
)
def test_bad_text_names_the_file_and_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(read_texts(path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"a\.jsonl:2: needs a list \"messages\".*'prompt'"),
        ({"messages": CHAT, "tools": "[]"}, r"a\.jsonl:2: \"tools\" must be a list, not str"),
        ({"messages": CHAT[:1]}, r"a\.jsonl:2: .*no turn of the role 'assistant'"),
        ({"messages": [{"content": "x"}]}, r"a\.jsonl:2: .*role"),
        ({"messages": []}, r"a\.jsonl:2: .*messages"),
    ],
)
def test_bad_chat_names_the_file_and_line(tmp_path, tokenizer, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        chat_examples([path], tokenizer)


def test_missing_and_empty_files(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match=r"no data file matches .*nothing\*"):
        find_files(f"{tmp_path}/nothing*")
    with pytest.raises(IsADirectoryError, match="is a directory; name its files"):
        find_files(str(tmp_path))
    empty, blank = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl"
    empty.write_text("")
    blank.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        find_files([str(empty)])
    with pytest.raises(ValueError, match=r"blank\.jsonl has no rows"):
        text_examples([blank], tokenizer)
    with pytest.raises(ValueError, match=r"blank\.jsonl has no rows"):
        chat_examples([blank], tokenizer)
    assert list(read_chats(blank)) == []


def pairs(count: int = 2):
    """Two lines with two examples each."""
    for line in range(count):
        columns = {"supervised": [False, True], "logprobs": [-1.5, -line]}
        pair = [
            Example([1, 2], columns, {"reward": 0.5}),
            Example([3, 4], columns, {"reward": line}),
        ]
        yield 0, line + 1, pair


COLUMNS = {
    "per_token": {"supervised": bool, "logprobs": np.float32},
    "per_example": {"reward": np.float32},
}


def test_named_columns_and_groups(tmp_path):
    examples = collect([tmp_path], pairs(), **COLUMNS)
    assert len(examples) == 4 and examples.groups.tolist() == [0, 2, 4]
    assert examples.supervised.tolist() == [False, True] * 4
    assert examples.per_token["logprobs"].tolist() == [-1.5, 0, -1.5, 0, -1.5, -1, -1.5, -1]
    assert examples.per_example["reward"].tolist() == [0.5, 0, 0.5, 1]
    assert examples.where(5) == f"{tmp_path}:2"
    # Whatever changes, a checkpoint made with other data is not resumed
    prints = {examples.fingerprint()}
    changed = examples.per_example["reward"].copy()
    changed[3] = 2
    prints.add(replace(examples, per_example={"reward": changed}).fingerprint())
    prints.add(replace(examples, groups=None).fingerprint())
    prints.add(replace(examples, per_token={}).fingerprint())
    assert len(prints) == 4
    assert replace(examples, per_token={}).supervised.all()


def test_columns_that_do_not_fit_are_named(tmp_path):
    def single(ids, **columns):
        return [(0, 7, [Example(ids, columns)])]

    for group, message in (
        (single([1, 2], supervised=[True]), r":7: supervised has 1 values for 2 tokens"),
        (
            single([1], supervised=[True], x=[1.0]),
            r":7: has the columns supervised, x, and not supervised",
        ),
        (single([1]), r":7: has the columns none, and not supervised"),
    ):
        with pytest.raises(ValueError, match=message):
            collect([tmp_path], group)
    ragged = [*single([1], x=[[1.0, 2.0]]), *single([1], x=[[1.0]])]
    with pytest.raises(ValueError, match=r"a value of x has shape \(1,\), not \(2,\) as before"):
        collect([tmp_path], ragged, per_token={"x": np.float32})
