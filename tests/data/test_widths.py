"""Teachers' lists of 2, 3 and 4 tokens: as if each had been padded to the longest by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small import write_tokenizer
from tigon.data import (
    Entry,
    Loader,
    Mixture,
    Stream,
    TopEncoder,
    find_sources,
    join,
    pack_examples,
    read,
    sources,
    tokenize,
)
from tigon.tokenizer import Tokenizer

SIZES = (3, 2, 4, 2)  # of the longest list of each row


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> TopEncoder:
    return TopEncoder(Tokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("own"))))


def row(number: int, size: int) -> dict[str, Any]:
    """Its lists have `size` tokens and 1; what is not learned has more."""
    first = 10 * number
    return {
        "input_ids": [first, first + 1, first + 2, first + 3],
        "completion_mask": [0, 0, 1, 1],
        "teacher_tokens": [None, list(range(9)), [first + i for i in range(size)], [first + 1]],
        "teacher_logprobs": [None, [-3.0] * 9, [-2.0 - i for i in range(size)], [-0.5]],
    }


def padded(number: int, size: int, width: int) -> dict[str, list[list[float]]]:
    """The columns that come of `row`."""
    own, more = row(number, size), range(width - size)
    one = width - 1
    return {
        "teacher_tokens": [
            [-1] * width,
            [-1] * width,
            own["teacher_tokens"][2] + [-1 for _ in more],
            [10 * number + 1] + [-1] * one,
        ],
        "teacher_logprobs": [
            [0.0] * width,
            [0.0] * width,
            own["teacher_logprobs"][2] + [0.0 for _ in more],
            [-0.5] + [0.0] * one,
        ],
    }


def write_files(path: Path, *files: Sequence[int]) -> list[Any]:
    """A source for each; the rows are numbered through all."""
    number, paths = 0, []
    for i, sizes in enumerate(files):
        paths.append(path / f"{i}.jsonl")
        paths[-1].write_text(
            "".join(json.dumps(row(number + j, s)) + "\n" for j, s in enumerate(sizes))
        )
        number += len(sizes)
    return find_sources([Entry(str(p)) for p in paths])


def assert_padded(columns: Any, sizes: Sequence[int], width: int) -> None:
    """Columns [4 rows, width] of rows of these sizes."""
    for name, dtype in (("teacher_tokens", np.int32), ("teacher_logprobs", np.float32)):
        expected = [x for i, size in enumerate(sizes) for x in padded(i, size, width)[name]]
        found = np.asarray(columns[name])
        assert found.dtype == dtype and found.tolist() == expected


@pytest.mark.parametrize("block", [1, 2**20])  # characters: a block for each row, and for all
@pytest.mark.parametrize("sizes", [SIZES, *permutations((2, 3, 4))])
def test_rows_of_a_file(tmp_path, monkeypatch, encoder, block, sizes):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    files = write_files(tmp_path, sizes)
    assert_padded(read(files, encoder).per_token, sizes, 4)
    parts = tokenize(files, encoder, workers=0)
    assert_padded(join(parts).per_token, sizes, 4)
    alone = tokenize(write_files(tmp_path, (2, 2)), encoder, workers=0)
    assert_padded(join(alone).per_token, (2, 2), 2)


@pytest.mark.parametrize("sizes", [SIZES, (4, 3, 2, 3), (2, 3, 4, 4)])
@pytest.mark.parametrize("way", ["memory", "cache", "stream"])
def test_rows_of_several_files(tmp_path, monkeypatch, encoder, way, sizes):
    """A stream's window of two rows is narrower than the next; one step takes both."""
    files = write_files(tmp_path, sizes[:1], sizes[1:])
    windows: Any
    if way == "stream":
        windows = Stream([files], encoder, size=2, workers=0)
    elif way == "cache":
        windows = Mixture([tokenize(files, encoder, workers=0)], size=2)
    else:
        windows = Mixture([[read([s], encoder) for s in files]], size=2)
    loader = Loader(
        windows, lambda w: pack_examples(w, seq_len=4), batch_size=4, micro_batch_size=4
    )
    (batch,) = loader.micro_batches(0)
    windows.close()
    order = (batch.input_ids[:, 0] // 10).tolist()
    assert sorted(order) == [0, 1, 2, 3]
    back = np.argsort(order)
    columns = {name: x[back].flatten(0, 1) for name, x in batch.per_token.items()}
    assert_padded(columns, sizes, 4)


def test_other_columns_have_one_shape(tmp_path, encoder):
    """ValueError that names the file, instead of numpy's within training."""
    parts = []
    for source in write_files(tmp_path, (2,), (2,)):
        examples = read([source], encoder)
        other = np.zeros((len(examples.tokens), len(parts) + 1))
        parts.append(replace(examples, per_token={"x": other}))
    with pytest.raises(ValueError, match=r"1.jsonl: values of x have shape \(2,\), .* \(1,\)"):
        Mixture([parts], size=2)
