"""Write pairs of answers as preference rows: train.jsonl, and eval.jsonl with 60 held-out ones.

    python examples/assets/preferences.py --out .assets/preferences

The pairs are the demonstration set for DPO in the source of the PyPI package llamafactory
(Apache-2.0), drawn from public sets of which it names none: English prompts, a fourth of them with
a system message, each with an answer that was preferred to another.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".assets" / "preferences"

PACKAGE = "llamafactory==0.9.5"
SOURCE_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
MEMBER = "llamafactory-0.9.5/data/dpo_en_demo.json"
LICENCE = "Apache-2.0 as the package's; of the sets that they were drawn from, unknown"

SEED = 0
NUM_EVAL = 60
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
FILES = {  # sha256 of what the pinned package, the seed and the split give
    "train.jsonl": "9d6091ed3fa69a88badbeb0d7de33b248e8be957f2d77a0975ff82f201e14ebd",
    "eval.jsonl": "4e26ff636245dd87ce3ae09a250f62ceb36b598178a0c24ce4666ddde28254fd",
}


def is_built(out: Path) -> bool:
    """Whether `out` holds both files; FileExistsError if it holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    for name, digest in FILES.items():
        path = out / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            problem = f"{path} is missing or not what this script writes"
            raise FileExistsError(f"{problem}: delete {out} or choose another --out")
    return True


def download(directory: Path) -> list[dict[str, Any]]:
    """Fetch the source with pip, as pip is configured here, and return its pairs."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SOURCE_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary=llamafactory"]  # its wheel has no data
    command = [*pip, "-r", str(requirements), "-d", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        problem = f"pip could not download {PACKAGE}, is a package index within reach?"
        raise RuntimeError(f"{problem}\n{result.stderr}")
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        file = archive.extractfile(MEMBER)
        assert file is not None
        found: list[dict[str, Any]] = json.loads(file.read())
    return found


def message(said: dict[str, str]) -> dict[str, str]:
    return {"role": ROLES[said["from"]], "content": said["value"]}


def pair(row: dict[str, Any]) -> dict[str, Any]:
    """As `tigon train` and TRL read it."""
    answers = {name: [message(row[name])] for name in ("chosen", "rejected")}
    return {"prompt": [message(said) for said in row["conversations"]], **answers}


def split(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows with distinct prompts, in order; the hash of SEED and prompt holds a row out."""

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{SEED}:{prompt}".encode()).digest()

    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(json.dumps(row["prompt"]), row)
    held_out = set(sorted(first, key=rank)[:NUM_EVAL])
    return {
        "train.jsonl": [row for prompt, row in first.items() if prompt not in held_out],
        "eval.jsonl": [row for prompt, row in first.items() if prompt in held_out],
    }


def build(out: Path = DEFAULT_OUT) -> Path:
    """Write train.jsonl and eval.jsonl in `out` unless they are there already, and return `out`.

    RuntimeError when the package cannot be had, FileExistsError when `out` holds something else.
    """
    if is_built(out):
        print(f"{out} holds the pairs already ({LICENCE})")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        print(f"downloading the source of {PACKAGE} (5 MB, Apache-2.0) with pip", flush=True)
        parts = split([pair(row) for row in download(Path(temporary))])
        directory = Path(temporary) / out.name
        directory.mkdir()
        for name, rows in parts.items():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (directory / name).write_text("".join(lines), encoding="utf-8")
        is_built(directory)
        directory.rename(out)
    for name, rows in parts.items():
        print(f"wrote {out / name}: {len(rows)} rows")
    print(f"licence of the rows: {LICENCE}")
    return out


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    try:
        build(parser.parse_args().out)
    except (RuntimeError, FileExistsError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
