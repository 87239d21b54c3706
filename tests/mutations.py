"""Plants the mistakes of mutations.txt one by one: does a test notice each?

`python -m tests.mutations [--fast] [numbers]` patches a copy of the tree, never the tree itself,
and exits with 1 if a mistake goes unnoticed or a patch is out of date. `--fast` asks the tests of
`make test` alone: a mistake whose test is slow counts as missed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_TESTS = 5  # pytest's exit code
SHORT = {
    "fp32": "models/test_parity.py::test_logits_loss_and_gradients",
    "rounding": "models/test_parity.py::test_bf16_is_rounded_where_transformers_rounds",
    "given": "models/test_parity.py::test_given_embeddings",
    "defaults": "models/test_config.py::test_defaults_of_every_family",
    "rope_keys": "models/test_config_families.py::test_rope_as_transformers_reads_it",
    "windows": "models/test_config_families.py::test_layers_slide_where_those_of_transformers_do",
    "config_families": "models/test_config_families.py",
}


@dataclass
class Mutation:
    number: int
    what: str
    file: str
    old: str = ""
    new: str = ""
    test: str = ""  # "" in a mutation that is skipped: `file` is the reason

    def apply(self, tree: Path) -> str:
        """Patch the tree; the file's text before."""
        path = tree / "tigon" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            times = f"{self.file} has {text.count(self.old)} times, not once"
            raise SystemExit(f"{self.number} {self.what}: {times}:\n{self.old}")
        path.write_text(text.replace(self.old, self.new))
        return text


def read(lines: list[str]) -> Iterator[Mutation]:
    number, what, file = 0, "", ""
    old: list[str] = []
    new: list[str] = []
    for line in lines:
        if match := re.match(r"(\d+) (.+)", line):
            number, what = int(match[1]), match[2]
        elif line.startswith("skipped: "):
            yield Mutation(number, what, line)
        elif line.startswith("-"):
            old.append(line[1:])
        elif line.startswith("+"):
            new.append(line[1:])
        elif line.startswith("? "):
            name, bracket, rest = re.match(r"(\w+(?=\[|::))?(\[|::)?(.*)", line[2:]).groups("")
            test = SHORT[name] + bracket + rest if name else line[2:]
            yield Mutation(number, what, file, "\n".join(old), "\n".join(new), f"tests/{test}")
            old, new = [], []
        elif line and not line.startswith("#"):
            file = line


def run(tree: Path, *tests: str, fast: bool = False) -> tuple[int, str]:
    """pytest's exit code, and its last words."""
    # Without compiled files: a patch of the same length within a second would go unseen
    settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *([] if fast else ["--slow"]), *tests],
        cwd=tree,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


def main(numbers: set[int], fast: bool) -> int:
    everything = list(read((ROOT / "tests" / "mutations.txt").read_text().splitlines()))
    chosen = [m for m in everything if not numbers or m.number in numbers]
    mutations = [m for m in chosen if m.test]
    if not chosen:
        raise SystemExit(f"mutations.txt has none of {sorted(numbers)}")
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("tigon", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        for m in mutations:  # before hours go by
            text = m.apply(tree)
            (tree / "tigon" / m.file).write_text(text)
        code, output = run(tree, *dict.fromkeys(m.test for m in mutations), fast=fast)
        if code:
            raise SystemExit(f"without any mistake the tests fail:\n{output}")
        for m in chosen:
            if m.test:
                text = m.apply(tree)
                code, output = run(tree, m.test, fast=fast)
                (tree / "tigon" / m.file).write_text(text)
                test = m.test.partition("::")[2]
                verdict = f"noticed by {test}" if code == 1 else f"MISSED by {test}"
                missed += code != 1
                if code > 1 and not (fast and code == NO_TESTS):
                    print(output)
            else:
                verdict = ""
            print(f"{m.number:>3}  {m.what:<76} {m.file:<24} {verdict}", flush=True)
    print(f"{len(mutations) - missed} of {len(mutations)} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main({int(n) for n in arguments if n != "--fast"}, "--fast" in arguments))
