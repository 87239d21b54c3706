"""The same conversations in every form and file train the same; bad ones are skipped if asked."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_sources import extra
from tests.small import chats
from tigon.train import main

MESSAGES = [messages for messages in chats(24) if len(messages) == 2]
SHAREGPT = {"user": "human", "assistant": "gpt"}
FORMS = {
    "messages": [{"messages": m} for m in MESSAGES],
    "sharegpt": [
        {"conversations": [{"from": SHAREGPT[t["role"]], "value": t["content"]} for t in m]}
        for m in MESSAGES
    ],
    "instruction": [{"instruction": m[0]["content"], "output": m[1]["content"]} for m in MESSAGES],
    "prompt_completion": [{"prompt": m[:1], "completion": m[1:]} for m in MESSAGES],
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif name.endswith(".zst"):
        path.write_bytes(extra("zstandard").compress(lines))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".parquet"):
        table = extra("pyarrow").Table.from_pylist(rows)
        extra("pyarrow.parquet").write_table(table, path, row_group_size=5)
    elif name.endswith(".jsonl"):
        path.write_bytes(lines)
    else:
        extra("datasets").Dataset.from_list(rows).save_to_disk(path)
    return path


def losses(workspace: Any, run: Path, data: Path, *more: str) -> list[float]:
    settings = workspace.settings("x", run_dir=run, data=data, steps=2, log_every=1)
    main([*settings, *more])
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def expected(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected")
    found = losses(workspace, folder / "run", write(folder, "a.jsonl", FORMS["messages"]))
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("messages", "a.jsonl.gz"),
        ("messages", "a.parquet"),
        ("messages", "saved"),
        ("sharegpt", "a.json"),
        ("sharegpt", "a.parquet"),
        ("instruction", "a.jsonl.zst"),
        ("prompt_completion", "a.parquet"),
    ],
)
def test_the_same_chats_train_the_same(
    workspace: Any, tmp_path: Path, expected: list[float], form: str, name: str
) -> None:
    data = write(tmp_path, name, FORMS[form])
    assert losses(workspace, tmp_path / "run", data) == expected


def test_bad_rows_are_skipped_and_said(
    workspace: Any, tmp_path: Path, expected: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = FORMS["messages"]
    bad: dict[str, Any] = {"messages": rows[0]["messages"][:1]}
    data = write(tmp_path, "a.jsonl", [bad, *rows[:3], bad, *rows[3:]])
    with pytest.raises(SystemExit, match=r"a\.jsonl:1: .*no turn of the role 'assistant'"):
        losses(workspace, tmp_path / "run", data)
    assert losses(workspace, tmp_path / "run", data, "bad_rows=skip") == expected
    said = capsys.readouterr().out
    assert f"data: 2 of {len(rows) + 2} rows skipped as bad:\n  {data}:1: messages have no" in said


def test_names_of_keys_and_of_a_format(
    workspace: Any, tmp_path: Path, expected: list[float]
) -> None:
    rows = [
        {"dialog": row["messages"], "prompt": "a", "completion": "b"} for row in FORMS["messages"]
    ]
    data = write(tmp_path, "a.jsonl", rows)
    assert losses(workspace, tmp_path / "1", data, "columns={messages: dialog}") == expected
    other = losses(workspace, tmp_path / "2", data, "format=prompt_completion")
    assert other != expected
    with pytest.raises(SystemExit, match="train_on=last: task=pretrain learns every token"):
        losses(workspace, tmp_path / "3", data, "task=pretrain", "train_on=last")


def test_text_divided_as_a_shell_writes_it(workspace: Any, tmp_path: Path) -> None:
    texts = [" ".join(turn["content"] for turn in messages) for messages in chats(40)]
    rows, lines = tmp_path / "a.jsonl", tmp_path / "a.txt"
    rows.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    lines.write_bytes("\r\n\r\n".join(texts).encode("utf-8-sig"))
    divided = losses(workspace, tmp_path / "1", lines, "task=pretrain", r"separator=\n\n")
    assert divided == losses(workspace, tmp_path / "2", rows, "task=pretrain")
