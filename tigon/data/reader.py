"""The groups of an entry's sources, one after the other, for streams."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tigon.data.blocks import Block, Source
from tigon.data.examples import Examples, Report
from tigon.data.store import Store
from tigon.data.workers import Pool


class Reader:
    """The groups of an entry's sources, from a place on.

    A place is how often all have been read, a source, a block of it, a group of that, and the
    digest of the source up to the end of that block.
    """

    def __init__(self, sources: Sequence[Source], pool: Pool, place: Sequence[Any]):
        self.sources, self.pool = sources, pool
        self.times, self.source, self.block, self.group, self.digest = place
        self.fresh = not any(place[1:4])  # whether this pass has seen all groups so far
        self.examples: Examples | None = None
        self._begin()

    @property
    def place(self) -> list[Any]:
        return [self.times, self.source, self.block, self.group, self.digest]

    def take(self, count: int, store: Store) -> int:
        """Append up to so many groups, as many as this pass still has."""
        taken = 0
        while taken < count and not self.ended():
            assert self.examples is not None
            some = min(count - taken, count_groups(self.examples) - self.group)
            part = slice_groups(self.examples, self.group, self.group + some)
            store.append(replace(part, report=Report()) if self.group else part)
            taken, self.group = taken + some, self.group + some
        return taken

    def ended(self) -> bool:
        """Whether the pass is over; otherwise, there is another group."""
        while self.examples is None or self.group >= count_groups(self.examples):
            at_place = self.examples is None
            self.examples = next(self.encoded, None)
            if self.examples is None:
                if self.fresh:
                    raise ValueError(f"{', '.join(s.name for s in self.sources)}: no rows")
                return True
            self.source, self.block, self.digest = self.numbers.popleft()
            self.group = self.group if at_place else 0
            self.fresh = self.fresh and not len(self.examples)
        return False

    def restart(self) -> None:
        self.times, self.source, self.block, self.group = self.times + 1, 0, 0, 0
        self.digest = ""
        self.fresh, self.examples = True, None
        self._begin()

    def _begin(self) -> None:
        # Source, number and digest of the blocks that are being encoded
        self.numbers: deque[tuple[int, int, str]] = deque()
        self.encoded = self.pool.encode(self._blocks(self.source, self.block, self.digest))

    def _blocks(self, first: int, block: int, digest: str) -> Iterator[Block]:
        """From a block of the first source on; ValueError unless what is passed has the digest."""
        for i in range(first, len(self.sources)):
            count, so_far = 0, ""
            for found in self.sources[i].blocks():
                count += 1
                so_far = _digest(so_far, found)
                if i == first and count == block + 1 and digest not in ("", so_far):
                    raise _changed(self.sources[i])
                if i > first or count > block:
                    self.numbers.append((i, count - 1, so_far))
                    yield found
            if i == first and digest and count <= block:
                raise _changed(self.sources[i])


def _digest(before: str, block: Block) -> str:
    """Of all blocks up to this one."""
    return hashlib.blake2b(before.encode() + block.content(), digest_size=16).hexdigest()


def _changed(source: Source) -> ValueError:
    return ValueError(
        f"{source.name} was changed: what the run has read of it is no longer there. Put it back, "
        "or begin another run_dir, with model= an export of this one"
    )


def count_groups(examples: Examples) -> int:
    return len(examples) if examples.groups is None else len(examples.groups) - 1


def slice_groups(examples: Examples, start: int, stop: int) -> Examples:
    """The groups from `start` to `stop`."""
    groups = examples.groups
    first, last = (start, stop) if groups is None else (int(groups[start]), int(groups[stop]))
    a, b = int(examples.offsets[first]), int(examples.offsets[last])
    return replace(
        examples,
        tokens=examples.tokens[a:b],
        offsets=examples.offsets[first : last + 1] - a,
        origin=examples.origin[first:last],
        per_token={name: values[a:b] for name, values in examples.per_token.items()},
        per_example={name: values[first:last] for name, values in examples.per_example.items()},
        groups=None if groups is None else groups[start : stop + 1] - first,
    )
