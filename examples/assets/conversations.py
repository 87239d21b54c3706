"""Write conversations between people as rows of text: train.jsonl.

    python examples/assets/conversations.py --out .assets/conversations

They are those of the PyPI package chitchat-dataset (MIT): informal English, unfiltered, a message a
line. 13 MB, 3.3 million tokens of SmolLM2's: enough for curves in which no text comes twice.
"""

import json
import sys
from pathlib import Path

if not __package__:  # a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.assets.rows import ASSETS, Files, Row, Source

SOURCE = Source(
    "chitchat-dataset==0.9.0",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    "chitchat_dataset/dataset.json",
    described="8 MB, MIT",
)


def make(content: bytes) -> dict[str, list[Row]]:
    found = json.loads(content).values()
    texts = [
        "\n".join(message["text"] for turn in conversation["messages"] for message in turn)
        for conversation in found
    ]
    return {"train.jsonl": [{"text": text} for text in texts if text]}


FILES = Files(
    out=ASSETS / "conversations",
    source=SOURCE,
    licence="MIT",
    digests={"train.jsonl": "7a788a7566744d38d5ada9d661995e4a32fc5738ff758aba8154d9f4e4c5619b"},
    make=make,
)
build = FILES.build

if __name__ == "__main__":
    FILES.main(__doc__)
