"""Sources, tokenised once per host, in directories named after what is in them.

They are in `$TIGON_CACHE`/data, or ~/.cache/tigon/data. A name is the digest of the content and of
whatever makes examples of it: tokenizer, template, options.
"""

import hashlib
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from tigon.data.blocks import Block, Source
from tigon.data.disk import disk_errors, sync
from tigon.data.examples import Encoder, Examples
from tigon.data.store import Store, Stored
from tigon.data.usage import ENTRY, Cleaned, clean, lock, looking, note
from tigon.data.workers import Pool
from tigon.utils.json import escape
from tigon.utils.paths import expand_user

PARTIAL = ".partial"
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.(digest|failed|npy|json)\.[0-9a-f]{16}")
DAY = 86400.0  # seconds
EVERY = 10.0  # seconds between two lines of progress


def cache_root() -> Path:
    chosen = os.environ.get("TIGON_CACHE")
    return expand_user(chosen) if chosen else Path.home() / ".cache/tigon"


def tokenised(
    sources: Sequence[Source], encoder: Encoder, *, workers: int | None = None
) -> list[Stored]:
    """The examples of each source, from the cache, or made now.

    The first process of a host that comes makes them, and shows its progress; others that want
    the same wait for it. ValueError for a source without rows, and for a bad row.
    """
    root = cache_root() / "data"
    with disk_errors(root):
        make_directory(root)
    sources = [encoder.open(source) for source in sources]
    with looking(root):
        parts = _parts(root, sources, encoder, workers)
    for source, part in zip(sources, parts, strict=True):
        if part.report.skipped and not encoder.skip_bad_rows:  # made where they were skipped
            raise ValueError(part.report.errors[0])
        if not part.count:
            raise ValueError(f"{source.name} {part.report.why_empty()}")
    return parts


def clean_cache(days: float = 0.0) -> Cleaned:
    """Remove the directories that no process uses, and that none has used for so many days."""
    if not 0 <= days < float("inf"):
        raise ValueError(f"days={days} must be a number of at least 0")
    return clean(cache_root() / "data", days)


def make_directory(path: Path) -> None:
    """Below the cache's root, which is the user's alone if it is made here. Files that killed
    processes have left half written there for a day are removed."""
    cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    for file in path.glob(".*"):
        if TEMPORARY.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            with suppress(OSError):  # another process removes it
                if time.time() - file.stat().st_mtime > DAY:
                    file.unlink()


def _parts(
    root: Path, sources: Sequence[Source], encoder: Encoder, workers: int | None
) -> list[Stored]:
    keys = [_key(root, source, encoder) for source in sources]
    found = _look(root, sources, keys)
    if None in found:
        both = hashlib.blake2b("".join(sorted(keys)).encode(), digest_size=16).hexdigest()
        came = time.time()
        with lock(root / f"{both}.lock"), _failure(root / f"{both}.failed", came):
            found = _look(root, sources, keys)
            missing = {k: s for k, s, f in zip(keys, sources, found, strict=True) if f is None}
            _remove_leftovers(root)
            _make(root, missing, encoder, workers)
        found = _look(root, sources, keys)
    parts = [part for part in found if part is not None]
    if len(parts) < len(sources):
        raise RuntimeError(f"something removes or damages files below {root} while they are made")
    note(root, keys)
    return parts


def _look(root: Path, sources: Sequence[Source], keys: Sequence[str]) -> list[Stored | None]:
    return [Stored.at(root / k, s.name) for k, s in zip(keys, sources, strict=True)]


def _key(root: Path, source: Source, encoder: Encoder) -> str:
    text = f"{_digest(root, source)} {encoder.digest()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest(root: Path, source: Source) -> str:
    """`source.digest()`, which reads all of a file, remembered while size and time are the same."""
    path = Path(source.name)
    if not path.is_file():
        return source.digest()
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns  # the second one cannot be set by hand
    stamp = [str(path.resolve()), status.st_size, *times, status.st_ino]
    name = hashlib.blake2b(repr((source, stamp)).encode(), digest_size=16).hexdigest()
    memo = root / f"{name}.digest"
    if memo.is_file():
        return memo.read_text()
    with disk_errors(root), lock(root / f"{name}.lock"):
        if not memo.is_file():  # another rank has not done it meanwhile
            write(memo, source.digest())
        return memo.read_text()


@contextmanager
def _failure(path: Path, came: float) -> Iterator[None]:
    """What ended the process that this one waited for ends this one too: it has the same data."""
    if path.exists() and path.stat().st_mtime > came:
        raise ValueError(path.read_text())
    path.unlink(missing_ok=True)
    try:
        yield
    except (ValueError, OSError) as error:
        try:
            write(path, str(error))
        except OSError:  # a full disk: the others will notice themselves
            path.unlink(missing_ok=True)
        raise


def _make(root: Path, missing: dict[str, Source], encoder: Encoder, workers: int | None) -> None:
    """Tokenise into directories that get their names when they are complete.

    Sorted, so that two processes with some sources in common never wait for each other.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(Pool(encoder, workers))
        progress = stack.enter_context(Progress(len(missing)))
        makers = [_Maker(root, key, missing[key], encoder, stack) for key in sorted(missing)]
        blocks_of: list[_Maker] = []  # whose each block is, in the order that they are encoded

        def blocks() -> Iterator[Block]:
            for maker in makers:
                if maker.begin():
                    for block in maker.source.blocks():
                        blocks_of.append(maker)
                        yield block

        current = 0
        for examples in pool.encode(blocks()):
            maker, blocks_of[0:1] = blocks_of[0], []
            while makers[current] is not maker:
                makers[current].finish()
                current += 1
            maker.add(examples)
            progress.add(len(examples), len(examples.tokens), maker.source.name, current)
        for maker in makers[current:]:
            maker.finish()


class _Maker:
    """One directory of the cache in the making."""

    def __init__(
        self, root: Path, key: str, source: Source, encoder: Encoder, stack: ExitStack
    ) -> None:
        self.root, self.key, self.source, self.encoder = root, key, source, encoder
        self.stack = stack
        self.lock = ExitStack()
        self.store: Store | None = None

    def begin(self) -> bool:
        """Whether there is anything to do: another process may have done it."""
        self.stack.push(self.lock)
        self.lock.enter_context(lock(self.root / f"{self.key}.lock"))
        if Stored.at(self.root / self.key) is not None:
            self.lock.close()
            return False
        partial = self.root / f"{self.key}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        with disk_errors(partial):
            self.store = Store(partial)
        self.lock.callback(self._abandon)
        return True

    def add(self, examples: Examples) -> None:
        assert self.store is not None
        with disk_errors(self.store.directory, self._size()):
            self.store.append(examples)

    def finish(self) -> None:
        if self.store is None:
            return
        final = self.root / self.key
        name = self.source.name
        if Path(name).is_file() and _key(self.root, self.source, self.encoder) != self.key:
            # Under its key, the content that it had before would be this one for ever
            raise ValueError(f"{name} was changed while it was read: start again when it is whole")
        with disk_errors(self.store.directory, self._size()):
            self.store.finish(self.key, source=self.source.name)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one
            os.rename(self.store.directory, final)
            sync(self.root)
        self.store = None
        self.lock.close()

    def _size(self) -> int:
        """Bytes that the directory will need, as far as can be told: five of three of text."""
        assert self.store is not None
        path = Path(self.source.name)
        return max(self.store.bytes, int(path.stat().st_size * 5 / 3) if path.is_file() else 0)

    def _abandon(self) -> None:
        if self.store is not None:
            self.store.abandon()


def _remove_leftovers(root: Path) -> None:
    """Directories that killed processes have left unfinished: nobody holds their locks."""
    for partial in root.glob(f"*{PARTIAL}"):
        if not ENTRY.fullmatch(partial.name.removesuffix(PARTIAL)) or partial.is_symlink():
            continue  # no process has made it
        with lock(root / f"{partial.name.removesuffix(PARTIAL)}.lock", wait=False) as free:
            if free:
                shutil.rmtree(partial, ignore_errors=True)


def write(path: Path, text: str) -> None:
    """Whole or not at all; in a directory that others can write, through no link of theirs."""
    with temporary(path) as partial:
        with partial.open("x") as file:
            file.write(text)
        os.replace(partial, path)


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A name beside a path that nobody else has, for a file that gets the path when it is whole."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


class Progress:
    """Rows, tokens and files so far: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, files: int):
        self.files, self.rows, self.tokens = files, 0, 0
        self.began = self.shown = time.monotonic()
        terminal = sys.stderr.isatty()
        self.bar = tqdm(desc="tokenising", unit=" rows", unit_scale=True, disable=not terminal)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def add(self, rows: int, tokens: int, name: str, done: int) -> None:
        self.rows, self.tokens = self.rows + rows, self.tokens + tokens
        name = escape(name)
        where = f"{name}, {done} of {self.files} done" if self.files > 1 else name
        self.bar.set_postfix_str(f"{self.tokens / 1e6:.1f} M tokens, {where}", refresh=False)
        self.bar.update(rows)
        now = time.monotonic()
        if self.bar.disable and now - self.shown >= EVERY:
            self.shown = now
            print(
                f"tokenising: {self.rows:,} rows, {self.tokens / 1e6:.1f} M tokens "
                f"in {now - self.began:.0f} s ({where})",
                file=sys.stderr,
                flush=True,
            )
