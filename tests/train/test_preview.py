"""`tigon data show`: the first rows as text, with what is learned of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.support.small import write_chats, write_tokenizer
from tigon.cli import main
from tigon.tokenizer import Tokenizer
from tigon.train import load, preview
from tigon.train.data_commands import PreviewExample, format_preview, has_color


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages[-1] |= more
    return {"messages": messages}


def show(data: Path, tokenizer: Path, *settings: str, count: int = 5) -> Any:
    config = load(None, [f"data={data}", f"model={tokenizer}", "run_dir=unused", *settings])
    return preview(config, count)


def texts(example: PreviewExample) -> list[tuple[str, float]]:
    return [(piece.text, piece.weight) for piece in example.pieces]


def test_learned_tokens_and_their_weights(tmp_path, tokenizer):
    rows = said("hi", "yes 😀", "more", "no", weight=0.5), said("a", "b")
    data = write(tmp_path / "a.jsonl", *rows)
    (row,) = show(data, tokenizer, count=1).rows
    (example,) = row.examples
    assert row.where == f"{data}:1"
    assert texts(example) == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 0),
        ("yes 😀<|im_end|>\n", 1),
        ("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", 0),
        ("no<|im_end|>\n", 0.5),
    ]
    counted = Tokenizer.from_pretrained(tokenizer)
    every = "".join(text for text, _ in texts(example))
    assert example.tokens == example.kept == len(counted.encode(every))
    learned = sum(len(counted.encode(text)) for text, weight in texts(example) if weight)
    assert example.learned == learned


@pytest.mark.parametrize("style", ["bytes", "fallback"])
def test_characters_of_several_tokens_are_whole(tmp_path, style):
    """Also where chosen and rejected part inside one, and behind a decoder that strips."""
    if style == "bytes":
        folder = write_tokenizer(tmp_path / style)
    else:
        names = [
            "<unk>",
            *(f"<0x{i:02X}>" for i in range(256)),
            *"▁abcdefghijklmnopqrstuvwxyz",
            "</s>",
        ]
        backend = Backend(BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        backend.add_special_tokens(["</s>"])
        folder = tmp_path / style
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    eos = Tokenizer.from_pretrained(folder).eos_token
    pair = {"prompt": "ask 日", "chosen": " 本 good", "rejected": " 木 bad"}
    (row,) = show(write(tmp_path / "p.jsonl", pair), folder, "task=dpo").rows
    for example, answer in zip(row.examples, ("本 good", "木 bad"), strict=True):
        assert "".join(text for text, _ in texts(example)) == f"ask 日 {answer}{eos}"
        assert [text.strip() for text, weight in texts(example) if weight] == [f"{answer}{eos}"]
    assert [example.name for example in row.examples] == ["chosen", "rejected"]


def test_what_limits_cut(tmp_path, tokenizer):
    data = write(tmp_path / "a.jsonl", said("hi", "yes " * 40))
    shown = show(data, tokenizer, "seq_len=32")
    (example,) = shown.rows[0].examples
    whole = show(data, tokenizer).rows[0].examples[0]
    assert (example.tokens, example.kept, example.rows) == (whole.tokens, 32, 1)
    assert example.learned - example.kept_learned == whole.tokens - 32
    assert "".join(text for text, _ in texts(whole)).startswith(texts(example)[0][0])
    assert f"seq_len={whole.tokens} takes all" in shown.warnings[0]
    left = show(data, tokenizer, "seq_len=32", "truncate=false").rows[0].examples[0]
    assert (left.kept, left.rows, texts(left)) == (0, 0, texts(example))
    config = load(None, ["data=x", "model=y", "run_dir=z"])
    lines = "\n".join(format_preview(shown, config, color=False))
    assert f"--- cut here: {whole.tokens - 32} tokens lost, " in lines


def test_documents_go_on_in_further_rows(tmp_path, tokenizer):
    data = tmp_path / "a.txt"
    data.write_text("words " * 50)
    shown = show(data, tokenizer, "task=pretrain", "seq_len=16")
    (example,) = shown.rows[0].examples
    assert example.kept == example.tokens and example.rows == -(-example.tokens // 16)
    assert texts(example)[0][1] == 0
    assert example.learned == example.tokens - example.rows, "nothing predicts a row's first token"
    assert not shown.warnings


PAIR, NAMES = {"prompt": "q", "chosen": "yes", "rejected": "no"}, ["chosen", "rejected"]
ANSWERS = {"prompt": "q", "completions": ["yes", "no"], "advantages": [1.0, -1.0]}
ROWS = {
    "dpo": (PAIR, NAMES, {}),
    "reward": (PAIR | {"margin": 2.0}, NAMES, {"margin": 2.0}),
    "kto": ({"prompt": "q", "completion": "yes", "label": True}, [""], {"desired": True}),
    "grpo": (ANSWERS, ["", ""], {"advantage": 1.0}),
}


@pytest.mark.parametrize("task", ROWS)
def test_answers(task, tmp_path, tokenizer):
    row, names, values = ROWS[task]
    data = write(tmp_path / "a.jsonl", row, row)
    shown = show(data, tokenizer, f"task={task}").rows
    assert len(shown) == 2
    for each in shown:
        assert [example.name for example in each.examples] == names
        assert texts(each.examples[0]) == [("q", 0), ("yes<|endoftext|>", 1)]
        assert values.items() <= each.examples[0].values.items()


def test_special_tokens_in_the_text_of_a_user(tmp_path, tokenizer):
    row = said("say <|im_end|>\n<|im_start|>system", "no") | {"id": "<|im_end|>"}
    shown = show(write(tmp_path / "a.jsonl", said("a", "b"), row), tokenizer)
    assert [row.notes for row in shown.rows] == [
        (),
        ("special tokens in the text of messages[0].content: <|im_end|>, <|im_start|>",),
    ]


def test_bad_rows_are_shown_and_end_the_command(tmp_path, tokenizer, capsys):
    data = write(
        tmp_path / "a.jsonl", said("a", "b") | {"extra": 1}, {"messages": "?"}, said("c", "d")
    )
    command = ["data", "show", str(data), f"model={tokenizer}"]
    assert main(command) == 1
    out = capsys.readouterr().out
    assert f"--- {data}:2: bad row\n'messages' must be a list of messages, not str" in out
    assert "[[d<|im_end|>" in out and "keys of its rows that nothing reads: extra" in out
    assert "a run would end at the first bad row" in out
    assert main([*command, "-n", "2", "bad_rows=skip"]) == 0
    assert "[[d<|im_end|>" not in capsys.readouterr().out


def test_rows_of_each_entry(tmp_path, tokenizer):
    a, b = (write_chats(tmp_path / f"{name}.jsonl", 4) for name in "ab")
    entries = json.dumps([{"path": str(a)}, {"path": str(b), "weight": 2}])
    shown = show(Path(entries), tokenizer, "streaming=true", "steps=1", count=2)
    assert [row.where for row in shown.rows] == [f"{a}:1", f"{a}:2", f"{b}:1", f"{b}:2"]
    with pytest.raises(ValueError, match="-n 0 must be at least 1"):
        show(a, tokenizer, count=0)


def test_nothing_raw_reaches_the_terminal(tmp_path, tokenizer, capsys):
    row = said("\x1b[31m [[[ \u202e\r\x07", "a ]] \x9b")
    data = write(tmp_path / "\x1b.jsonl", row | {"\x1b[1m": 1}, {"messages": "\x1b"})
    main(["data", "show", str(data), f"model={tokenizer}"])
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert r"\x1b[31m [\[\[ \u202e\r\x07" in out and r"[[a ]\] \x9b<|im_end|>" in out


def test_color_is_for_terminals(monkeypatch, tmp_path, tokenizer):
    class Terminal:
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert has_color(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_color(Terminal())  # type: ignore[arg-type]
    settings = [f"data={write(tmp_path / 'a.jsonl', said('a', '[[b]]'))}", f"model={tokenizer}"]
    config = load(None, [*settings, "run_dir=unused"])
    lines = "\n".join(format_preview(preview(config), config, color=True))
    assert "\x1b[2m<|im_start|>user\na<|im_end|>" in lines and "\x1b[32m[[b]]<|im_end|>" in lines
