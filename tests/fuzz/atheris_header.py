"""python -m tests.fuzz.atheris_header [-max_total_time=60]: headers, guided by coverage.

Needs `pip install atheris`, which has wheels for Python 3.11 to 3.13 on Linux.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tigon.utils.json", "tigon.headers"]):
    from tigon.weights.header import read_header

from tests.fuzz.harness import unfit
from tests.fuzz.weights import SINGLE, single

FOLDER = Path(tempfile.mkdtemp(prefix="tigon-fuzz-"))
(FOLDER / "corpus").mkdir()


def one(data: bytes) -> None:
    path = FOLDER / SINGLE
    path.write_bytes(data)
    try:
        read_header(path)
    except ValueError as error:
        assert SINGLE in str(error) and not list(unfit(str(error)))


if __name__ == "__main__":
    single(FOLDER / "corpus")
    limits = ["-timeout=5", "-rss_limit_mb=3000", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(FOLDER / "corpus")], one)
    atheris.Fuzz()
