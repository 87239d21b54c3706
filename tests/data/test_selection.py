"""Which rows of a source are read, in every format: `split`, `skip`, `take`, `eval_fraction`."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tigon.data import Entry, Format, find_sources
from tigon.data.selection import parse_split, select_fraction
from tigon.data.sources import Source, is_held_out

datasets = pytest.importorskip("datasets", reason="needs tigon[train]")

TEXTS = [f"row {i}" for i in range(27)]
ROWS = [{"text": text} for text in TEXTS]
SLICES = ["train", "train[:10]", "train[20:]", "train[3:8]", "train[-5:]", "train[:-20]"]
SLICES += ["train[80%:]", "train[:33%]", "train[-50%:]", "train[:100]", "train[5:6]+train[:2]"]
FORMATS = ["jsonl", "json", "jsonl.gz", "txt", "csv", "parquet", "arrow", "saved", "saved dict"]


def write(folder: Path, format: str) -> str:
    """The path of data with ROWS as its split "train"; saved dictionaries have "test" as well."""
    table, path = datasets.Dataset.from_list(ROWS), folder / f"data.{format}"
    if format == "saved":
        table.save_to_disk(path)
    elif format == "saved dict":
        datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(path)
    elif format == "parquet":
        table.to_parquet(path)
    elif format == "csv":
        table.to_csv(path)
    elif format == "arrow":
        table.save_to_disk(folder / "saved")
        return str(next((folder / "saved").glob("*.arrow")))
    elif format == "txt":
        path.write_text("\n\n".join(row["text"] for row in ROWS))
    elif format == "json":
        path.write_text(json.dumps(ROWS))
    else:
        text = "\n\n".join(map(json.dumps, ROWS))
        path.write_bytes(gzip.compress(text.encode()) if format.endswith("gz") else text.encode())
    return str(path)


def texts(sources: list[Source]) -> list[str]:
    return [row["text"] for source in sources for _, row in source.rows()]


def selected(path: str, **options: Any) -> list[str]:
    return texts(find_sources(Entry(path, **options), separator="\n\n"))


@pytest.fixture(scope="module")
def slices(tmp_path_factory):
    """The texts of each of SLICES as the library `datasets` reads them."""
    folder = tmp_path_factory.mktemp("peer")
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "peer.parquet")
    options = {"data_files": str(folder / "peer.parquet"), "cache_dir": folder}
    return {
        split: datasets.load_dataset("parquet", split=split, **options)["text"] for split in SLICES
    }


@pytest.mark.parametrize("format", FORMATS)
def test_slices_equal_those_of_datasets(tmp_path, format, slices):
    path = write(tmp_path, format)
    for split, expected in slices.items():
        assert selected(path, split=split) == expected, split
    assert selected(path) == TEXTS
    assert selected(path, take=3) == TEXTS[:3]
    assert selected(path, skip=20) == TEXTS[20:]
    assert selected(path, split="train[10:]", skip=2, take=4) == TEXTS[12:16]
    assert format != "saved dict" or selected(path, split="test") == ["row 1"]
    refused = [({option: "x"}, f"{option}='x'") for option in ("config", "revision")]
    for options, message in (*refused, ({"split": "validation[:3]"}, "has no split")):
        with pytest.raises(ValueError, match=message):
            selected(path, **options)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_slice_goes_over_the_files_of_a_glob(tmp_path, format):
    for i in range(3):
        part = datasets.Dataset.from_list(ROWS[i * 9 : i * 9 + 9])
        getattr(part, "to_parquet" if format == "parquet" else "to_json")(
            tmp_path / f"{i}.{format}"
        )
    path = f"{tmp_path}/*.{format}"
    assert selected(path, take=12) == TEXTS[:12]
    assert selected(path, skip=9, take=9) == TEXTS[9:18]
    assert selected(path, split="train[50%:]") == TEXTS[14:]


def test_a_saved_split_has_its_own_name(tmp_path):
    datasets.Dataset.from_list(ROWS, split="test").save_to_disk(tmp_path / "test")
    path = str(tmp_path / "test")
    assert selected(path) == selected(path, split="test") == TEXTS
    assert selected(path, split="test[:2]") == TEXTS[:2]
    with pytest.raises(ValueError, match="no split 'train': it was saved as the one split 'test'"):
        selected(path, split="train")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "train[:x]"}, "is no split"),
        ({"split": ""}, "is no split"),
        ({"split": "train[1:50%]"}, "mixes rows and percent"),
        ({"split": "train[:150%]"}, "beyond 100%"),
        ({"split": "train[5:5]"}, "no rows left by split='train\\[5:5\\]'"),
        ({"take": 0}, "take=0"),
        ({"skip": -1}, "skip=-1"),
        ({"skip": 27}, "has 27, and 27 are skipped"),
        ({"split": "train[:5]", "skip": 5}, "no rows left by"),
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "saved"])
def test_selections_without_rows_are_errors(tmp_path, format, options, message):
    with pytest.raises(ValueError, match=message):
        selected(write(tmp_path, format), **options)


def test_a_stream_has_no_end_to_count_from(monkeypatch):
    table = datasets.IterableDataset.from_generator(lambda: iter(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: table)
    entry = Entry("hf://owner/name", split="train[5:9]", skip=1)
    assert texts(find_sources(entry, streaming=True)) == TEXTS[6:9]
    for split in ("train[-3:]", "train[50%:]"):
        with pytest.raises(ValueError, match="is streamed, and its number of rows is not known"):
            find_sources(Entry("hf://owner/name", split=split), streaming=True)


def test_eval_fraction_divides_rows_by_their_content(tmp_path):
    (source,) = find_sources(write(tmp_path, "jsonl"))
    held_out = texts(select_fraction([source], 0.3, True))
    trained = texts(select_fraction([source], 0.3, False))
    assert sorted(held_out + trained) == sorted(TEXTS)
    assert held_out and trained
    for format in ("parquet", "csv", "saved"):  # in other files the same
        assert texts(select_fraction(find_sources(write(tmp_path, format)), 0.3, True)) == held_out
    many = sum(is_held_out({"text": str(i)}, Format(), 0.1) for i in range(10_000))
    assert 900 < many < 1100
    pinned = [i for i in range(20) if is_held_out({"text": str(i)}, Format(), 0.2)]
    assert pinned == [0, 6, 13, 14, 16]  # on every machine and in every version


def test_the_side_of_a_row_is_that_of_what_is_read():
    for i in range(20):
        row = {"instruction": str(i), "output": "x"}
        renamed = {"output": "x", "ask": str(i), "id": 7, "input": None}
        sides = [
            is_held_out(row, Format(), 0.5),
            is_held_out(renamed, Format(columns={"instruction": "ask"}), 0.5),
        ]
        assert sides[0] == sides[1]
        chats = [
            {name: [{"role": "user", "content": str(i)}]} for name in ("messages", "conversations")
        ]
        assert len({is_held_out(chat, Format(), 0.5) for chat in chats}) == 1


def test_split_names_are_read_as_datasets_reads_them():
    assert parse_split("validation_matched") == [("validation_matched", None, None, False)]
    assert parse_split("a.b[:-1]+ c") == [("a.b", None, -1, False), ("c", None, None, False)]


def test_rows_and_names_that_are_not_utf_8(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    (source,) = find_sources(str(tmp_path / "a.parquet"))
    (_, good), (line, bad) = source.rows()
    assert (good, line) == ({"text": "a"}, 2) and "is not UTF-8 text" in str(bad)
    name = (str(tmp_path).encode() + b"/\xff.jsonl").decode(errors="surrogateescape")
    Path(name).write_text('{"text": "a"}')
    for pattern in (name, f"{tmp_path}/*.jsonl"):
        with pytest.raises(ValueError, match=r"udcff\.jsonl' is not UTF-8: rename it"):
            find_sources(pattern)


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"),
    [
        (
            "a.csv",
            b'\xef\xbb\xbfprompt,completion\r\n007,NA\r\n"a, ""b""\r\nc",1.0\r\nnull,\r\n',
            {},
            [
                (2, {"prompt": "007", "completion": "NA"}),
                (3, {"prompt": 'a, "b"\r\nc', "completion": "1.0"}),
                (5, {"prompt": "null", "completion": ""}),
            ],
        ),
        ("a.tsv", b"text\tid\na,b\t1\n", {}, [(2, {"text": "a,b", "id": "1"})]),
        # Values where formats read them
        (
            "a.csv",
            b"prompt,label,w\n1,True,0.5\n1,FALSE,\n1,maybe,x\n",
            {"weight": "w"},
            [
                (2, {"prompt": "1", "label": True, "w": 0.5}),
                (3, {"prompt": "1", "label": False, "w": None}),
                (4, {"prompt": "1", "label": "maybe", "w": "x"}),
            ],
        ),
        # Headers behind blank lines and of one column
        ("a.csv", b"\n\nmy|text\na\n", {}, [(4, {"my|text": "a"})]),
        ("a.csv", b"my;text\na\n", {"text": "my;text"}, [(2, {"my;text": "a"})]),
    ],
)
def test_csv_cells_are_the_texts_of_the_file(tmp_path, name, content, columns, expected):
    (tmp_path / name).write_bytes(content)
    (source,) = find_sources(Entry(str(tmp_path / name), columns=columns))
    assert list(source.rows()) == expected


@pytest.mark.parametrize(
    "content, message",
    [
        (b"a;b\n1;2\n", "divided by ';', not by ','"),
        (b"a,a\n1,2\n", "column 'a' twice"),
        (b'a,b\n"1,2\n', "a.csv:2: not valid CSV"),
        (b"a,b\n\xff,2\n", "not UTF-8"),
        (b"a,b\n1,2\none\n", "has 1 cell, and the header has 2"),  # a bad row
    ],
)
def test_csv_files_that_cannot_be_read(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    (source,) = find_sources(str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match=message):
        for _, row in source.rows():
            if isinstance(row, ValueError):
                raise row
