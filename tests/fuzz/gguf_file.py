"""GGUF files: the counts, lengths, sizes and offsets of their headers."""

import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from hypothesis import strategies as st

import tigon
from tests.fuzz.config import SIZES
from tests.fuzz.junk import damaged
from tests.fuzz.target import Case, Files, Link, Target
from tests.models.gguf_files import write_gguf

NAME = "model.gguf"
WIDE = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}  # whole blocks
NUMBERS = (0, 1, 2, 3, 4, 8, 9, 31, 255, 2**14, 2**20, 2**24 + 1, 2**31, 2**32 - 1)
LARGE = (2**32, 2**40, 2**62, 2**63 - 8, 2**63, 2**64 - 1)


def write(folder: Path) -> None:
    model = tigon.models.MODELS["llama"].from_config({"model_type": "llama"} | SIZES | WIDE)
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(Path(source, "model"))
        write_gguf(Path(source, "model"), folder / NAME, GGMLQuantizationType.Q8_0)


@st.composite
def patched(draw: Any, data: bytes) -> bytes:
    """Other numbers in some places, most of all behind a name: its type, its value, its sizes."""
    changed = bytearray(data)
    last = data.index(b"output_norm.weight") + 60
    ends = [i for i in range(24, last) if data[i - 1 : i].isalpha() and data[i : i + 1] < b"."]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(ends)) + draw(st.sampled_from([0, 4, 4, 12, 20, 24]))
        at = draw(st.sampled_from([at] * 9 + [4, 8, 16]))
        form = draw(st.sampled_from("IQ"))
        number = draw(st.sampled_from(NUMBERS if form == "I" else NUMBERS + LARGE))
        content = struct.pack(f"<{form}", number)
        changed[at : at + len(content)] = content
    return bytes(changed)


def cases(files: Files) -> st.SearchStrategy[Case]:
    valid = files[NAME]
    contents = st.one_of(
        patched(valid),
        patched(valid),
        patched(valid),
        damaged(valid),
        st.sampled_from([None, Link("../secret.json"), Link("/dev/zero"), Link(NAME)]),
    )
    return contents.map(lambda content: {NAME: content})


TARGETS = [Target("gguf", 1, write, cases, partial(tigon.from_pretrained, gguf_file=NAME))]
