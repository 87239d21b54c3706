"""Rows of data sets in the forms that people have them, as conversations and as texts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read."""

    kind: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a key -> theirs

    def __str__(self) -> str:
        return f"{self.kind} {sorted(self.columns.items())}"
