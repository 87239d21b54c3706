"""Rows of every kind of source, with their places, and what is wrong where."""

import gzip
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tigon.data import Entry, find_sources, formats, sources

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"messages": [{"role": "user", "content": "a\u2028b\r"}], "tools": None, "n": 1.5},
]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def extra(name: str) -> Any:
    """A module of tigon[train], or the test is skipped."""
    return pytest.importorskip(name, reason="needs tigon[train]")


def rows(path: Path | str, **options: Any) -> list[tuple[int, Any]]:
    (source,) = find_sources(str(path), **options)
    return [pair for block in source.blocks() for pair in pickle.loads(pickle.dumps(block)).rows()]


@pytest.fixture(params=[4, 40, 2**22])
def size(request, monkeypatch):
    """Of a block, in bytes."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", request.param)
    return request.param


def test_json_rows_are_exactly_as_written(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_text(JSONL)
    assert rows(path) == [(1, ROWS[0]), (2, ROWS[1])]
    path.write_bytes(b"\xef\xbb\xbf" + JSONL.replace("\n", "\r\n\n").encode())
    assert rows(path) == [(1, ROWS[0]), (3, ROWS[1])]
    path.write_text(JSONL.rstrip())
    assert rows(path) == [(1, ROWS[0]), (2, ROWS[1])]
    (tmp_path / "a.json").write_text("\n" + json.dumps(ROWS, indent=1, ensure_ascii=False))
    at = 3 + json.dumps(ROWS[0], indent=1).count("\n") + 1
    assert rows(tmp_path / "a.json") == [(3, ROWS[0]), (at, ROWS[1])]
    path.rename(tmp_path / "lines.json")
    assert rows(tmp_path / "lines.json") == [(1, ROWS[0]), (2, ROWS[1])]


def test_compressed_files_read_as_the_plain_ones(tmp_path, size):
    zstandard = extra("zstandard")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(JSONL.encode()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(JSONL.encode()))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert rows(tmp_path / name) == [(1, ROWS[0]), (2, ROWS[1])]
    assert rows(tmp_path / "a.txt.gz") == [(1, {"text": "one\n\ntwo"})]
    half = len(JSONL) // 2  # as of parallel compressors, which write several parts
    frames = [part.encode() for part in (JSONL[:half], JSONL[half:])]
    (tmp_path / "b.jsonl.gz").write_bytes(b"".join(map(gzip.compress, frames)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, frames)))
    for name in ("b.jsonl.gz", "b.jsonl.zst"):
        assert rows(tmp_path / name) == [(1, ROWS[0]), (2, ROWS[1])]
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        whole = (tmp_path / name).read_bytes()
        for broken in (whole[:-9], b"plain text, which is neither of them"):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ValueError, match=f"{name} cannot be decompressed"):
                rows(tmp_path / name)


def test_a_text_file_is_one_document_or_divided_by_a_separator(tmp_path, size):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\n\nthree\n\n")
    assert rows(path) == [(1, {"text": "one\ntwo\n\n\n\nthree\n\n"})]
    divided = [(1, {"text": "one\ntwo"}), (6, {"text": "three"})]
    assert rows(path, separator="\n\n") == divided
    # As a shell and single quotes in YAML give it; and files from Windows
    assert rows(path, separator=r"\n\n") == divided
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    for separator in ("\n\n", r"\n\n", r"\r\n\r\n"):
        assert rows(path, separator=separator) == divided
    assert rows(path) == [(1, {"text": "one\ntwo\n\n\n\nthree\n\n"})]


# Arrow gives a struct every key that any has, null where it has none
TABLE = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": "[]"},
    {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
            }
        ]
    },
]


@pytest.mark.parametrize("chosen", ["parquet", "arrow file", "arrow stream", "saved", "saved dict"])
def test_tables_read_without_the_nulls_of_arrow(tmp_path, size, chosen):
    pyarrow, parquet = extra("pyarrow"), extra("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in TABLE])
    path, split = tmp_path / "data", None
    if chosen == "parquet":
        path = tmp_path / "a.parquet"
        with parquet.ParquetWriter(path, table.schema) as writer:
            writer.write_table(table.slice(0, 0))  # as a filter leaves it
            writer.write_table(table, row_group_size=2)
    elif chosen.startswith("arrow"):
        path = tmp_path / "a.arrow"
        kind = pyarrow.ipc.new_file if chosen == "arrow file" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as file, kind(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif chosen == "saved":
        extra("datasets").Dataset(table).save_to_disk(path)
    else:
        split, datasets = "test", extra("datasets")
        parts = {"train": table.slice(1), "test": table}
        parts = {name: datasets.Dataset(part) for name, part in parts.items()}
        datasets.DatasetDict(parts).save_to_disk(path)
    (source,) = find_sources(Entry(str(path), split=split))
    pieces = list(source.blocks())
    read = [pair for block in pieces for pair in pickle.loads(pickle.dumps(block)).rows()]
    assert read == list(enumerate(TABLE, 1))
    assert len(pieces) == (3 if size < 10 else 1) or size == 40
    if split:
        with pytest.raises(ValueError, match=r"no split 'dev': there are \['test', 'train'\]"):
            find_sources(Entry(str(path), split="dev"))


def test_a_data_set_of_the_hub_is_loaded_as_asked(tmp_path, monkeypatch):
    datasets, pyarrow = extra("datasets"), extra("pyarrow")
    asked = []

    def load_dataset(*given: Any, streaming: bool, **named: Any) -> Any:
        asked.append((given, named))
        table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in TABLE[:2]])
        data = datasets.Dataset(table)
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entry = Entry("hf://owner/name", split="test", config="en", revision="abc")
    for streaming in (False, True):
        (source,) = find_sources(entry, streaming=streaming)
        assert [row for _, row in source.rows()] == TABLE[:2]
        assert source.name == "hf://owner/name[en,test]"
        assert source.digest() != replace(source, split="train").digest()
    assert set(map(repr, asked)) == {
        repr((("owner/name", "en"), {"split": "test", "revision": "abc"})),
        repr((("owner/name", "en"), {"split": "train", "revision": "abc"})),
    }


def test_digests_see_every_byte_and_samples_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "HASH_BYTES", 2**20)  # a thread reads so much
    path, digests, samples = tmp_path / "large.jsonl", set(), set()
    ends = (0, 2**21 + 4)
    for place in (*ends, 2**20 - 1, 2**20, 2**21 - 1, 2**21):
        content = bytearray(2**21 + 5)
        content[place] = 1
        path.write_bytes(content)
        source = sources.JsonFile(str(path), formats.Format())
        assert source.size() == len(content)
        digests.add(source.digest())
        samples.add(source.sample(50))
    assert len(digests) == 6 and len(samples) >= 3
    assert sources.JsonFile(str(tmp_path / "pipe"), formats.Format()).sample(50) == b""


def test_digests_say_what_is_read_and_how(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one\n\ntwo")
    (tmp_path / "c.txt").write_text("one\n\ntwo ")
    (a,), (b,), (c,) = (find_sources(f"{tmp_path}/{name}.txt") for name in "abc")
    assert a.digest() == b.digest() != c.digest()
    path = f"{tmp_path}/a.txt"
    others = [find_sources(path, separator="\n\n")[0]]
    for options in ({"columns": {"text": "x"}}, {"take": 5}, {"take": 6}, {"skip": 1}):
        others += find_sources(Entry(path, **options))
    for fraction, held_out in ((0.5, True), (0.5, False), (0.4, True)):
        others.append(replace(a, fraction=(fraction, held_out)))
    assert len({source.digest() for source in (a, c, *others)}) == 2 + len(others)


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', 2, "not valid JSON: Expecting value, at char"),
        ("a.jsonl", '{"text": "\xff"}\n'.encode("latin-1"), 1, "not valid JSON"),
        ("a.jsonl", "[1]\n", 1, "needs a JSON object, not a list"),
        ("a.jsonl", "[" * 100_000, 1, "not valid JSON"),
        ("a.json", '[{"a": 1},\n 2]', 2, "needs a JSON object, not int"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "b": 2, "a": 1}', 2, "has the key 'a' twice in one object"),
        ("a.jsonl", '{"a": [{"b": 1, "c": 2, "c": 3}]}', 1, "has the key 'c' twice in one object"),
        (
            "a.json",
            '[{"a": 1},\n {"a": 1, "a": {}},\n {}]',
            2,
            "has the key 'a' twice in one object",
        ),
    ],
)
def test_a_bad_row_is_said_in_its_place(tmp_path, name, content, line, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    bad = dict(rows(path))[line]
    assert isinstance(bad, ValueError) and message in str(bad)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xff", r"a\.txt is not UTF-8"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), r"a\.jsonl is UTF-16 text: write it as"),
        (
            "a.csv.gz",
            gzip.compress("text\n1".encode("utf-16"), mtime=0),
            r"a\.csv\.gz is UTF-16 text",
        ),
        (
            "a.jsonl",
            gzip.compress(b'{"text": "x"}', mtime=0),
            r"a\.jsonl is compressed .* end in \.gz$",
        ),
        ("a.json", b'[{"a": 1}\n {"a": 2}]', r"a\.json:1: not valid JSON: no ',' or '\]'"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', r"a\.json:2: not valid JSON"),
        ("a.json", b'[{"a": 1}', r"a\.json:1: not valid JSON"),
        ("a.docx", b"x", r"a\.docx: data is read from \.jsonl, .*\.parquet.*hf://owner/name"),
        ("a.parquet", b"PAR1 no", r"a\.parquet cannot be read: "),
        ("a.arrow", b"no arrow", r"a\.arrow cannot be read: "),
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.parquet", None, r"a\.parquet has the column 'text' twice: remove one"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    if name in ("a.parquet", "a.arrow"):
        extra("pyarrow")
    if content is None:
        columns = [extra("pyarrow").array([text]) for text in ("one", "other")]
        table = extra("pyarrow").table(columns, names=["text", "text"])
        extra("pyarrow.parquet").write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows(tmp_path / name)


@pytest.mark.parametrize(
    ("path", "options", "error", "message"),
    [
        ("{}/nothing*", {}, FileNotFoundError, r"no data file matches .*nothing\*"),
        ("a.jsonl,b.json", {}, FileNotFoundError, r"'a\.jsonl,b\.json'; several files are a list"),
        ("owner/name", {}, FileNotFoundError, "'owner/name'; a data set of the hub is written hf:"),
        ("{}", {}, IsADirectoryError, r"is a directory; name its files.* glob: '.*/a\.jsonl'"),
        ("{}/empty", {}, IsADirectoryError, "is a directory; it has no data, which is read from"),
        ("hf://a/b/c", {}, ValueError, "'hf://a/b/c' is not hf://owner/name"),
        (
            "{}/a.jsonl",
            {"split": "test"},
            ValueError,
            r"a\.jsonl has no split 'test': a file's only",
        ),
    ],
)
def test_names_that_lead_nowhere(tmp_path, path, options, error, message):
    (tmp_path / "empty").mkdir()
    for name in ("LICENSE.txt", "a.jsonl", "b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=message):
        find_sources(Entry(path.format(tmp_path), **options))


def test_missing_extras_say_what_to_install(tmp_path, monkeypatch):
    for name, module in (("a.parquet", "datasets"), ("a.jsonl.zst", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=rf"{name}.* needs pip install 'tigon\[train\]'"):
            rows(tmp_path / name)


def test_documents_too_long_ask_for_a_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 10)
    monkeypatch.setattr(sources, "MAX_ROW_CHARS", 50)
    (tmp_path / "a.txt").write_text("word\n" * 20)
    with pytest.raises(ValueError, match=r"a\.txt:1: a document of more than 50 char.*separator="):
        rows(tmp_path / "a.txt")
    assert len(rows(tmp_path / "a.txt", separator="\n")) == 20


def test_lines_too_long_to_read_are_bad_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 30)
    row = {"text": "a"}
    text = "".join(json.dumps(r) + "\n" for r in (row, {"text": "b" * 99}, row))
    (tmp_path / "a.jsonl").write_text(text)
    first, (line, error), last = rows(tmp_path / "a.jsonl")
    assert (first, last, line) == ((1, row), (3, row), 2)
    assert "has more than 30 bytes: divide it" in str(error)
