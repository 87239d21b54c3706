"""What the outputs of calls have in common."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast


class Output:
    """Reads a dataclass as transformers' outputs: `out["loss"]`, `out[0]`, `dict(out)`, iteration
    over names. Fields that are None or empty are left out."""

    def keys(self) -> list[str]:
        """The names of the fields that are neither None nor empty, in their order."""
        named = ((f.name, getattr(self, f.name)) for f in fields(cast(Any, self)))
        return [
            n for n, x in named if x is not None and not (isinstance(x, dict | tuple) and not x)
        ]

    def values(self) -> list[Any]:
        """The values of `keys()`, in the same order."""
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """The pairs of `keys()` and `values()`."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self:
            raise KeyError(f"{key!r}: this output has {', '.join(self.keys()) or 'nothing'}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()
