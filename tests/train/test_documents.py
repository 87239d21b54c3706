"""docs/training.md: its recipes run. docs/migration.md: its table of names is in aliases.yaml."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.small import WORDS, write_chats, write_model, write_tokenizer
from tigon.settings.load import suggest_setting
from tigon.train import Config, main

ROOT = Path(__file__).resolve().parents[2]


def section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def blocks(kind: str) -> list[str]:
    """Of the recipes, without a kind: the commands."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", section("training.md", "Recipes"), re.S | re.M)
    return [text for name, text in fences if name == kind]


def recipes() -> list[str]:
    return [block.replace("\\\n", " ") for block in blocks("")]


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """A folder with every file that a recipe names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for i, name in enumerate(("chats", "math", "held_out")):
        write_chats(tmp_path / f"{name}.jsonl", 12, seed=i)
    words = " ".join(WORDS)
    for folder in ("books", "corpus"):
        (tmp_path / folder).mkdir()
    for name in ("books/a.txt", "held_out.txt"):
        (tmp_path / name).write_text("\n\n\n".join([words] * 40))
    for name in ("corpus/a.jsonl", "held_out_text.jsonl"):
        (tmp_path / name).write_text(f'{{"text": "{words}"}}\n' * 40)
    (tmp_path / "chat.jinja").write_text(blocks("jinja")[0])
    return tmp_path


@pytest.mark.parametrize("command", recipes(), ids=range(len(recipes())))
def test_a_recipe(desk, command):
    words = shlex.split(command)
    settings = words[words.index("train") + 1 :]
    given = dict(word.split("=", 1) for word in settings if "=" in word)
    model = write_model(desk / "model")
    tiny = {"run_dir": desk / "run", "seq_len": 64, "batch_size": 2, "micro_batch_size": 1}
    tiny |= {"steps": 2, "epochs": "null", "device": "cpu", "workers": 0}
    if "init" in given:
        tiny |= {"init": model / "config.json", "tokenizer": write_tokenizer(desk / "tokenizer")}
    else:
        tiny |= {"model": model}
    main([*settings, *(f"{name}={value}" for name, value in tiny.items())])
    assert (desk / "run/hf/config.json").exists()
    assert "finished · 2 steps" in (desk / "run/report.html").read_text()
    if "chat_template" in given:
        assert (desk / "run/hf/chat_template.jinja").exists()


def test_every_recipe_is_there():
    assert len(recipes()) == 5


def rows() -> list[list[str]]:
    table = section("migration.md", "Names of settings").split("|---|---|---|---|---|\n")[1]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [re.findall(r"\|([^|]*)", line)[:5] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip())
def test_names_of_other_trainers(row):
    ours, *theirs = (re.findall(r"`([^`]+)`", cell) for cell in row)
    known = Config.__dataclass_fields__
    assert ours and all(name in known for name in ours)
    assert any(theirs)
    for name in (name for cell in theirs for name in cell):
        if name in known:
            assert name in ours
            continue
        said = set(re.findall(r"\w+", suggest_setting(name, known)))
        assert said & set(ours), f"{name}: {suggest_setting(name, known)}"
