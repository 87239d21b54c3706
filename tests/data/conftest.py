"""A small tokenizer, and files of rows, for the tests of data."""

import json
import pickle
from copy import copy
from typing import Any

import pytest

from tests.support.examples import join
from tests.support.small import CHATML, write_tokenizer
from tigon.data import Entry, Examples, find_sources, read
from tigon.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.from_pretrained(directory)


@pytest.fixture
def encode(tmp_path, tokenizer):
    """Encode rows, one by one or as a list, from the file a.jsonl; a text is a line of it.

    An encoder, or the class of one for the tokenizer with a chat template.
    """

    def run(
        encoder: Any, *rows: Any, template: str = CHATML, columns: Any = None, **options: Any
    ) -> Examples:
        if isinstance(encoder, type):
            copied = copy(tokenizer)
            copied.chat_template = template
            encoder = encoder(copied, **options)
        all_rows = rows[0] if rows and isinstance(rows[0], list) else rows
        lines = [row if isinstance(row, str) else json.dumps(row) for row in all_rows]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        sources = find_sources(Entry(str(path), columns=columns or {}))
        return join(read(sources, pickle.loads(pickle.dumps(encoder))))

    return run
