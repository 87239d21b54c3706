"""What the commands print cannot steer a terminal, wherever it comes from."""

import io
import os
import sys

import pytest
from tqdm import tqdm

from tests.support.small import write_chats, write_model
from tigon.cli import main
from tigon.utils.terminal import CONTROL, escape_controls, escaping_output, one_line, raw_stream

EVIL = "a\x1b[31mb\nc\u202e\x9b2J"
SHOWN = r"a\x1b[31mb\nc\u202e\x9b2J"


def run(*arguments: object) -> None:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as error:  # train's way
        if error.code:
            print(error, file=sys.stderr)


def test_every_control_character_is_escaped() -> None:
    for code in (*range(32), 127, 0x9B, 0x61C, 0x200E, 0x202E, 0x2066, 0x2069, 0x2028, 0xDC9B):
        kept = chr(code) in "\t\n"
        assert escape_controls(chr(code)).isprintable() != kept
    # Emoji, Persian and other scripts need the joiners
    plain = "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e \u3000é\t\n"
    assert escape_controls(plain) == plain
    assert escape_controls("\x00\x1b\x9b\u202e\ud800") == r"\x00\x1b\x9b\u202e\ud800"
    assert not {text for text in CONTROL.values() if not text.isprintable()}


def test_newlines_of_names_begin_no_message() -> None:
    text = "no file a\ntigon: all is well\n"
    assert one_line(ValueError(text)) == r"no file a\ntigon: all is well"
    listed = "2 unknown settings:\n  'a'\n  'b'"
    assert one_line(listed) == listed


def test_what_is_printed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with escaping_output():
        print("out \x1b[2J", "\u202e", "ü")
        print("said \x9b", file=sys.stderr)
        for _ in tqdm(["x"], desc="bar \x07", ascii=True, mininterval=0):
            pass
        print("exactly \x1b", file=raw_stream(sys.stdout))
        with escaping_output():  # of a command inside a command
            print("\x07")
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert out == "out \\x1b[2J \\u202e ü\nexactly \x1b\n\\x07\n"
    assert r"said \x9b" in err and "\rbar \\x07: 100%" in err
    assert not {c for c in err if not c.isprintable()} - {"\n", "\r"}


def test_commands_escape_names_and_messages(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape"))
    folder = tmp_path / EVIL
    folder.mkdir()
    model, bad = write_model(folder / "model"), folder / f"bad{EVIL}.jsonl"
    data, directory = write_chats(folder / f"{EVIL}.jsonl", 9), folder / "run"
    bad.write_text('{"messages": 3}\n{"messages": [{"role": "user", "content": "\x1b"')
    (folder / "bad.yaml").write_text("\x1b: [\n")
    settings = [f"model={model}", "device=cpu", "seq_len=64", "batch_size=1", "steps=1"]
    run("train", f"run_dir={directory}", f"data={data}", "save_every=1", *settings)
    run("train", f"run_dir={folder}/{EVIL}", f"data={bad}", *settings)
    run("train", folder / "bad.yaml")
    run("info", directory)
    run("report", directory)
    run("export", directory, folder / "n")
    (model / "tokenizer.json").write_text('{"\x1b[31m": "\u202e"}')
    run("generate", model, "hi")
    run("info", os.fsdecode(b"/none/\xff\x1b"))
    sys.stdout.flush()
    out = sys.stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]
    err = capsys.readouterr().err
    for text in (out, err):
        assert SHOWN in text
        assert not {c for c in text if not c.isprintable()} - {"\n"}
        assert not [line for line in text.splitlines() if line.startswith("c\\u202e")]
