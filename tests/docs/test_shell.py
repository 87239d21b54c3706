"""Shell blocks of README and the manual: commands exist, with the options and settings shown.

`python -m tests.docs.test_shell` writes what docs/migration.md quotes of an error."""

import argparse
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.docs.pages import ROOT, Block, blocks, pages, prose
from tigon.cli.main import COMMANDS, _parse, _parser
from tigon.train import load

CONFIG = ["model=m", "data=d", "run_dir=r"]  # what config.yaml of a page stands for
PLACEHOLDERS = {"...", "key=value"}
# Other people's commands, and a shell's own words
FOREIGN = {"curl", "export", "if", "scontrol", "source", "tensorboard", "torchfrtrace", "vllm"}


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without its comment; of a block with output those behind `$ `."""
    text = block.text.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield [word for word in words if word not in PLACEHOLDERS]


def is_shell(block: Block) -> bool:
    """Whether it is marked so, or begins with a command of ours."""
    if block.language in ("bash", "shell", "sh", "console"):
        return True
    first = block.text.removeprefix("$ ").split(maxsplit=1)[:1]
    return not block.language and bool(first) and first[0] in CHECKS


def check_tigon(words: list[str]) -> None:
    """Parses as the command line does; settings are read as a run would."""
    if words[:1] == ["train"]:
        check_training(words[1:])
        return
    args = _parse(words)
    if args.command == "data" and args.kind != "clean":
        check_settings(args.arguments)
    if args.command == "plan":
        load(None, [*CONFIG, *args.settings])


def check_training(words: list[str]) -> None:
    """Of `tigon train`: an optional config, settings, and its few options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    for flag in ("--dry-run", "--print-config"):
        parser.add_argument(flag, action="store_true")
    _, rest = parser.parse_known_args(words)
    check_settings(rest)


def check_settings(words: list[str]) -> None:
    """A config that is there, if one is named, and settings that it takes."""
    if words[0] == "config.yaml":
        load(None, [*CONFIG, *words[1:]])
    elif "=" in words[0] or words[0].startswith("-"):
        load(None, words)
    elif words[0].endswith(".yaml") and words[0] != "axolotl.yaml":
        load(ROOT / words[0], words[1:])


def check_torchrun(words: list[str]) -> None:
    """torchrun's own options, then one of our modules or a script of the page."""
    words = [re.sub(r"\$\w+", "4", word) for word in words]
    args = get_args_parser().parse_args(words)
    if not args.module:
        scripts = [block.text for block in blocks() if block.language == "python"]
        assert any(text.startswith(f"# {args.training_script}\n") for text in scripts)
        return
    assert args.training_script == "tigon"
    check_tigon(args.training_script_args)


def check_python(words: list[str]) -> None:
    """A script of ours is there, and knows its options."""
    if words[:2] == ["-m", "bench"]:
        words = [f"bench/{words[2]}.py", *words[3:]]
    elif words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    path = ROOT / words[0]
    assert path.exists() or path.with_suffix("").is_dir(), f"no {words[0]}"
    known = "".join(p.read_text() for p in (path, ROOT / "bench/harness.py") if p.is_file())
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in known, f"{words[0]} has no {word}"


def check_make(words: list[str]) -> None:
    """A target of the Makefile."""
    target, text = words[0], (ROOT / "Makefile").read_text()
    if target.startswith("bench-"):
        assert (ROOT / "bench" / f"{target.removeprefix('bench-')}.py").is_file()
    else:
        assert re.search(rf"^{re.escape(target)}:", text, re.M), f"no target {target}"


def check_pip(words: list[str]) -> None:
    """Extras of ours are in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"(?:^|tigon|\.)\[([\w,-]+)\]", " ".join(words)):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", text, re.M), f"no extra {extra}"


def check_srun(words: list[str]) -> None:
    """Slurm's options, then a command."""
    while words[0].startswith("-"):
        words = words[1:]
    check(words)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "srun": check_srun,
    "tigon": check_tigon,
    "torchrun": check_torchrun,
}


def check(words: list[str]) -> None:
    """Raises an error for a command that would not be understood."""
    name = words[0].rpartition("/")[2]
    if name not in FOREIGN:
        assert name in CHECKS, f"{name}: which command is this? a foreign one goes into FOREIGN"
        CHECKS[name](words[1:])


SHELL = [block for block in blocks() if is_shell(block) and not block.skip]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_block(block):
    for words in commands(block):
        try:
            check(words)
        except SystemExit as stop:
            pytest.fail(f"{shlex.join(words)}: {stop}")
    if block.language in ("bash", "shell", "sh"):
        read = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        assert not read.stderr, read.stderr


@pytest.mark.parametrize("page", pages())
def test_commands_in_the_text(page):
    """`tigon eval perplexity --stride` names a command and an option that it has."""
    wrong = []
    for text in re.findall(r"`((?:tigon|make) [a-z][^`]*)`", prose(pages()[page])):
        words = text.split()
        if words[0] == "make":
            check_make(words[1:2])
            continue
        name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
        flags = re.findall(r"(?<!\S)--[a-z-]+", text)
        if name not in COMMANDS or (name != "train" and not set(flags) <= options(name)):
            wrong.append(text)
    assert wrong == []


def options(name: str) -> set[str]:
    """The options of a command."""
    parser: argparse.ArgumentParser = _parser()
    for word in name.split():
        (group,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = group.choices[word]
    return set(parser._option_string_actions)


@pytest.mark.parametrize(
    "command",
    [
        "tigon train config.yaml learning=1",
        "tigon train configs/none.yaml",
        "tigon eval perplexity",
        "tigon chat MODEL --temprature 1",
        "torchrun --nproc 2 -m tigon train config.yaml sequence=1",
        "torchrun --nproc-per-node 2 none.py",
        "python -m bench none",
        "python -m bench kernels --nothing",
        "make nothing",
        "pip install -e .[nothing]",
        "tigno chat",
    ],
)
def test_what_would_not_be_understood(command):
    with pytest.raises((AssertionError, SystemExit, ValueError, OSError)):
        check(shlex.split(command))


MIGRATION = ROOT / "docs/migration.md"
QUOTE = re.compile(r"(?<=<!-- axolotl:begin -->\n).*?(?=<!-- axolotl:end -->)", re.S)


def answered() -> str:
    """What `tigon train axolotl.yaml` says of the page's config of axolotl."""
    (text,) = (b.text for b in blocks() if b.text.startswith("# axolotl.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "axolotl.yaml")
        path.write_text(text)
        try:
            load(path)
        except ValueError as error:
            said = str(error).replace(f"{folder}/", "")
    return f"```\n$ tigon train axolotl.yaml\ntigon.train: {said}\n```\n"


def test_what_another_trainers_config_is_answered():
    assert QUOTE.findall(MIGRATION.read_text()) == [answered()]


FOREIGN_YAML = ("# axolotl.yaml", "apiVersion:", "task: ")  # of Kubernetes, of lm-eval
YAML = [b for b in blocks() if b.language == "yaml" and not b.text.startswith(FOREIGN_YAML)]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_config(block, tmp_path):
    """Settings that a page shows are those of a config, or of a part of one."""
    (tmp_path / "config.yaml").write_text(block.text)
    given = yaml.safe_load(block.text)
    load(tmp_path / "config.yaml", [s for s in CONFIG if s.partition("=")[0] not in given])


if __name__ == "__main__":
    MIGRATION.write_text(QUOTE.sub(lambda _: answered(), MIGRATION.read_text()))
