"""Model cards: README.md of a repository, with the metadata that the hub shows and searches."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from huggingface_hub import ModelCardData

CARD = "README.md"
_MARK = re.compile(r"<!-- tigon-card ([0-9a-f]{64}) -->\s*\Z")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class Metadata:
    base_model: str | None = None  # on the hub
    datasets: Sequence[str] = ()  # on the hub
    tags: Sequence[str] = ()
    license: str | None = None  # a licence of the base model is not known to be this one's


def write_card(metadata: Metadata, paragraphs: Iterable[str]) -> str:
    """The card. Its last line tells later whether somebody has changed it since."""
    data = ModelCardData(
        base_model=metadata.base_model,
        datasets=list(metadata.datasets) or None,
        library_name="transformers",  # which loads it as it is; the hub shows how
        license=metadata.license,
        pipeline_tag="text-generation",
        tags=["tigon", *metadata.tags],
    )
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(paragraphs) + "\n"
    return f"{text}\n<!-- tigon-card {_digest(text)} -->\n"


def is_untouched(card: str) -> bool:
    """Whether the card is as `write_card` made it."""
    card = card.replace("\r\n", "\n")
    mark = _MARK.search(card)
    return mark is not None and mark[1] == _digest(card[: mark.start()])


def is_hub_name(text: str) -> bool:
    """Whether it could be owner/name of a repository."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def plain(text: object, most: int = 80) -> str:
    """Text of unknown origin on one line of a card, and nothing but text."""
    line = " ".join(str(text).split())[:most]
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", "".join(filter(str.isprintable, line)))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown; the cells are written as they are."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def usage(repository: str) -> str:
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repository}")
tokenizer = AutoTokenizer.from_pretrained("{repository}")
```

`tigon chat {repository}` talks with it."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode(errors="replace")).hexdigest()
