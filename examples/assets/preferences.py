"""Write pairs of answers as preference rows: train.jsonl, and eval.jsonl with 60 held-out ones.

    python examples/assets/preferences.py --out .assets/preferences

The pairs are the demonstration set for DPO in the source of the PyPI package llamafactory
(Apache-2.0), drawn from public sets of which it names none: English prompts, a fourth of them with
a system message, each with an answer that was preferred to another.
"""

import json
import sys
from pathlib import Path

if not __package__:  # a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.assets import rows
from examples.assets.rows import Files, Row, Source

NUM_EVAL = 60
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
SOURCE = Source(
    "llamafactory==0.9.5",
    "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    "llamafactory-0.9.5/data/dpo_en_demo.json",
    suffix=".tar.gz",  # its wheel has no data
    described="source, 5 MB, Apache-2.0",
)


def message(said: dict[str, str]) -> dict[str, str]:
    return {"role": ROLES[said["from"]], "content": said["value"]}


def pair(row: Row) -> Row:
    """As `tigon train` and TRL read it."""
    answers = {name: [message(row[name])] for name in ("chosen", "rejected")}
    return {"prompt": [message(said) for said in row["conversations"]], **answers}


def split(found: list[Row]) -> dict[str, list[Row]]:
    return rows.split(found, lambda row: json.dumps(row["prompt"]), NUM_EVAL)


FILES = Files(
    out=rows.ASSETS / "preferences",
    source=SOURCE,
    licence="Apache-2.0 as the package's; of the sets that they were drawn from, unknown",
    digests={
        "train.jsonl": "9d6091ed3fa69a88badbeb0d7de33b248e8be957f2d77a0975ff82f201e14ebd",
        "eval.jsonl": "4e26ff636245dd87ce3ae09a250f62ceb36b598178a0c24ce4666ddde28254fd",
    },
    make=lambda content: split([pair(row) for row in json.loads(content)]),
)
build = FILES.build

if __name__ == "__main__":
    FILES.main(__doc__)
