"""Teachers' lists of 2, 3 and 4 tokens: as if each had been padded to the longest by hand."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tigon.data import (
    Loader,
    Mixture,
    Source,
    Stream,
    TopEncoder,
    find_sources,
    pack_examples,
    read,
    sources,
    tokenize,
)


@pytest.fixture
def encoder(tokenizer):
    return TopEncoder(tokenizer)


def row(number: int, size: int) -> dict[str, Any]:
    """Its lists have `size` tokens and 1; what is not learned has more."""
    first = 10 * number
    return {
        "input_ids": [first, first + 1, first + 2, first + 3],
        "completion_mask": [0, 0, 1, 1],
        "teacher_tokens": [None, list(range(9)), [first + i for i in range(size)], [first + 1]],
        "teacher_logprobs": [None, [-3.0] * 9, [-2.0 - i for i in range(size)], [-0.5]],
    }


def write_files(path: Path, *files: tuple[int, ...]) -> list[Source]:
    """A source for each; the rows are numbered through all."""
    number = 0
    for i, sizes in enumerate(files):
        rows = [json.dumps(row(number + j, size)) + "\n" for j, size in enumerate(sizes)]
        (path / f"{i}.jsonl").write_text("".join(rows))
        number += len(sizes)
    return find_sources(f"{path}/*.jsonl")


@pytest.mark.parametrize("sizes", [(3, 2, 4, 2), (4, 3, 2, 3), (2, 3, 4, 4)])
@pytest.mark.parametrize("way", ["memory", "blocks", "cache", "stream"])
def test_lists_are_padded_to_the_longest(tmp_path, monkeypatch, encoder, way, sizes):
    """A stream's window of two rows is narrower than the next; one step takes both."""
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    if way != "memory":
        monkeypatch.setattr(sources, "BLOCK_BYTES", 1)  # a block for each row
    files = write_files(tmp_path, sizes[:1], sizes[1:])
    windows: Any
    if way == "stream":
        windows = Stream([files], encoder, size=2, workers=0)
    elif way == "cache":
        windows = Mixture([tokenize(files, encoder, workers=0)], size=2)
    else:
        windows = Mixture([read(files, encoder)], size=2)
    pack = partial(pack_examples, seq_len=4)
    (batch,) = Loader(windows, pack, batch_size=4, micro_batch_size=4).micro_batches(0)
    windows.close()
    order = np.argsort(batch.input_ids[:, 0])
    for name, dtype, fill in (
        ("teacher_tokens", np.int32, -1),
        ("teacher_logprobs", np.float32, 0),
    ):
        expected = np.full((4, 4, 4), fill, dtype)
        for i, size in enumerate(sizes):
            for place in (2, 3):  # those that are learned
                values = row(i, size)[name][place]
                expected[i, place, : len(values)] = values
        np.testing.assert_array_equal(batch.per_token[name][order], expected, strict=True)


def test_other_columns_have_one_shape(tmp_path, encoder):
    """ValueError that names the file, instead of numpy's within training."""
    parts = []
    for source in write_files(tmp_path, (2,), (2,)):
        (examples,) = read([source], encoder)
        other = np.zeros((len(examples.tokens), len(parts) + 1))
        parts.append(replace(examples, per_token={"x": other}))
    with pytest.raises(ValueError, match=r"1.jsonl: values of x have shape \(2,\), .* \(1,\)"):
        Mixture([parts], size=2)
