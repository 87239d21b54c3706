"""Sources, tokenized once per host into memory-mapped data sets of the library `datasets`.

They are in `$TIGON_CACHE`/data, or ~/.cache/tigon/data, one for the sources of an entry. A name is
the digest of the content and of whatever makes examples of it: tokenizer, template, options. A row
of such a data set is a block of source rows, its columns the arrays of Examples.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tigon.data.cache import cache_root, disk_errors, make_directory, train_extra
from tigon.data.examples import BadRow, Encoder, EncodingReport, Examples, collect
from tigon.data.sources import Source
from tigon.utils.memory import count_cpus
from tigon.utils.paths import write_text

VERSION = 3  # of the columns; others are made anew
MAX_WORKERS = 32  # unless a setting says more
MIN_PARALLEL_BLOCKS = 4  # blocks that are tokenized sooner than processes start
MEMO_BYTES = 2**20  # of files whose digest is kept
SHARED_MEMORY = Path("/dev/shm")
SEMAPHORE_BYTES = 2**16  # that processes need there, about
COLUMN_KINDS = ("per_token", "per_example")


def tokenize(
    sources: Sequence[Source], encoder: Encoder, *, workers: int | None = None, check: bool = True
) -> list[Examples]:
    """Loads the examples of the sources from the cache, or tokenizes them; one item for each block.

    The first process of a host tokenizes; others that want the same wait for it. ValueError for a
    source without rows, and for a bad row unless the encoder skips these; without `check` the cache
    keeps what was tokenized all the same, and the next call raises it.
    """
    root = cache_root() / "data"
    with disk_errors(root):
        make_directory(root)
    with train_extra():
        from filelock import FileLock
    sources = [encoder.open(source) for source in sources]
    with disk_errors(root):
        digests = [_cached_digest(root, source) for source in sources]
    text = f"{VERSION} {digests} {encoder.digest()} {encoder.skip_bad_rows}"
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    names = [source.name for source in sources]
    if (parts := _load_examples(root / key, key, names, encoder)) is not None:
        with suppress(OSError):  # a cache that is only read
            os.utime(root / key)  # when it was last used
    else:
        with disk_errors(root), FileLock(root / f"{key}.lock"):
            parts = _load_examples(root / key, key, names, encoder)
            if parts is None:
                shutil.rmtree(root / key, ignore_errors=True)
                _build_dataset(root / key, sources, encoder, workers)
                parts = _load_examples(root / key, key, names)
            if parts is None:
                raise RuntimeError(f"something damages files below {root} while they are made")
    try:
        if check:
            _check_parts(sources, parts, encoder)
    except ValueError:
        shutil.rmtree(root / key, ignore_errors=True)
        raise
    return parts


def _check_parts(sources: Sequence[Source], parts: Sequence[Examples], encoder: Encoder) -> None:
    """Raises ValueError for a source without examples, or for a bad row unless skipped."""
    parts_by_file: dict[tuple[str, ...], list[Examples]] = defaultdict(list)
    for part in parts:
        parts_by_file[part.files].append(part)
    for source in sources:
        source_parts = parts_by_file[source.name,]
        report = sum((part.report for part in source_parts), EncodingReport())
        if report.errors and not encoder.skip_bad_rows:
            raise BadRow(report.errors[0])
        if not any(map(len, source_parts)):
            raise ValueError(f"{source.name} {report.explain_empty()}")


def _cached_digest(root: Path, source: Source) -> str:
    """Looks up `source.digest()` by size and times; reads a file that is new, changed or small."""
    path = Path(source.name)
    if not path.is_file() or (status := path.stat()).st_size < MEMO_BYTES:
        return source.digest()
    times = status.st_mtime_ns, status.st_ctime_ns  # the second one cannot be set by hand
    stamp = [str(path.resolve()), status.st_size, *times, status.st_ino]
    name = hashlib.blake2b(repr((source, stamp)).encode(), digest_size=16).hexdigest()
    memo = root / f"{name}.digest"
    if not memo.is_file():
        write_text(memo, source.digest())
    return memo.read_text()


def _build_dataset(
    path: Path, sources: Sequence[Source], encoder: Encoder, workers: int | None
) -> None:
    """Tokenizes the sources into a data set, in worker processes if there is enough to do."""
    max_workers = min(count_cpus(), MAX_WORKERS) if workers is None else workers
    blocks = _list_blocks(sources) if max_workers > 1 or workers else []
    if not blocks or (workers is None and len(blocks) < MIN_PARALLEL_BLOCKS):
        runs: list[list[Shard]] = [[(i, 0, None) for i in range(len(sources))]]
    else:
        runs = _divide_blocks(blocks, max_workers)
    with train_extra():
        import datasets
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    options = {"encoder": encoder, "sources": tuple(sources)}
    threads = one_tokenizer_thread() if len(runs) > 1 else nullcontext()
    with worker_errors(), threads, end_children_with_parent():
        try:
            datasets.Dataset.from_generator(
                _encode_shards,
                cache_dir=str(path),
                gen_kwargs={"runs": runs, **options},
                num_proc=len(runs) if len(runs) > 1 or workers else None,
                fingerprint=path.name,
                writer_batch_size=16,
            )
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


Shard = tuple[int, int, int | None]  # a source, its first record, and the one to stop at or None


def _list_blocks(sources: Sequence[Source]) -> list[Shard]:
    """Lists the blocks of the sources as shards, so that any number of processes has the same."""
    shards: list[Shard] = []
    for i, source in enumerate(sources):
        first = 0
        for block in source.blocks():
            last = first + len(block.records)
            shards.append((i, first, last))
            first = last
    return shards


def _divide_blocks(blocks: Sequence[Shard], workers: int) -> list[list[Shard]]:
    """Deal consecutive blocks to the workers, and join those of one source.

    The library calls the generator for each item of a list alone, and each call reads a file from
    its beginning: so an item is all that a worker does.
    """
    runs: list[list[Shard]] = []
    for indices in np.array_split(np.arange(len(blocks)), min(workers, len(blocks))):
        run: list[Shard] = []
        for i, first, last in (blocks[number] for number in indices):
            if run and run[-1][0] == i:
                run[-1] = i, run[-1][1], last
            else:
                run.append((i, first, last))
        runs.append(run)
    return runs


def _encode_shards(
    runs: Sequence[Sequence[Shard]], encoder: Encoder, sources: Sequence[Source]
) -> Iterator[dict[str, Any]]:
    """Yields a row of the data set for each block of the runs; in place of a bad block one with its
    error, after which nothing follows unless bad rows are skipped."""
    for run in runs:
        for i, first, last in run:
            for block in sources[i].blocks(first, last):
                try:
                    examples = encoder(block)
                except ValueError as error:  # the library would not tell it
                    report = EncodingReport(len(block.records), skipped=1, errors=(str(error),))
                    examples = collect(block.name, [], report, encoder.per_token)
                yield _to_row(examples, i, encoder)
                if examples.report.errors and not encoder.skip_bad_rows:
                    return


def _to_row(examples: Examples, source: int, encoder: Encoder) -> dict[str, Any]:
    """Converts examples to a row of the data set; a missing array becomes an empty one."""
    shapes: dict[str, Any] = {}
    row: dict[str, np.ndarray] = {
        "tokens": examples.tokens,
        "offsets": examples.offsets.astype(np.int64),
        "origin": examples.origin.astype(np.int32),
        "groups": np.zeros(0, np.int64) if examples.groups is None else examples.groups,
        "targets": examples.targets,
    }
    for kind in COLUMN_KINDS:
        for name, dtype in getattr(encoder, kind).items():
            values = getattr(examples, kind).get(name)
            if values is not None:
                shapes[f"{kind}.{name}"] = values.shape
            values = np.zeros(0, dtype) if values is None else np.asarray(values, dtype)
            row[f"{kind}.{name}"] = values.view(np.uint8) if values.dtype == bool else values
    facts = {
        "source": source,
        "highest": examples.highest,
        "report": asdict(examples.report),
        "times": dict(encoder.times()),
        "shapes": shapes,
        "dtypes": {
            f"{kind}.{name}": np.dtype(dtype).str
            for kind in COLUMN_KINDS
            for name, dtype in getattr(encoder, kind).items()
        },
    }
    return {name: np.ravel(array) for name, array in row.items()} | {"facts": json.dumps(facts)}


def _load_examples(
    path: Path, key: str, names: Sequence[str], encoder: Encoder | None = None
) -> list[Examples] | None:
    """Maps the data set and returns the examples of each block; None if it is absent, damaged, or
    has another time in its rows than `encoder` would write."""
    files = sorted(path.glob("generator/*/*/*.arrow"))
    if not files or any("incomplete" in str(file) for file in files):
        return None
    with train_extra():
        import datasets
    parts: list[Examples] = []
    try:
        expected = datasets.DatasetInfo.from_directory(str(files[0].parent))
        for file in files:
            table = datasets.Dataset.from_file(str(file)).with_format("arrow")[:]
            columns = {
                name: _list_arrays(table[name]) for name in table.column_names if name != "facts"
            }
            for i, text in enumerate(table["facts"].to_pylist()):
                arrays = {name: column[i] for name, column in columns.items()}
                facts = json.loads(text)
                if encoder and any(encoder.write_time(f) != t for f, t in facts["times"].items()):
                    return None
                parts.append(_from_row(arrays, facts, names, f"{key}-{len(parts)}"))
    except Exception:  # of many kinds, for a file that is cut off
        return None
    if len(parts) != sum(split.num_examples for split in (expected.splits or {}).values()):
        return None
    return parts


def _list_arrays(column: Any) -> list[np.ndarray]:
    """Returns the lists of a column as views of the mapped file."""
    arrays = []
    for chunk in column.chunks:
        values, ends = chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_pylist()
        arrays += [values[start:stop] for start, stop in pairwise(ends)]
    return arrays


def _from_row(
    arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], names: Sequence[str], key: str
) -> Examples:
    """Makes the examples that `_to_row` converted, as views of the arrays."""
    columns: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in COLUMN_KINDS}
    for name, shape in facts["shapes"].items():
        kind, _, column = name.partition(".")
        columns[kind][column] = arrays[name].view(facts["dtypes"][name]).reshape(shape)
    lists = {k: tuple(v) for k, v in facts["report"].items() if isinstance(v, list)}
    examples = Examples(
        arrays["tokens"],
        arrays["offsets"],
        arrays["origin"].reshape(-1, 2),
        (names[facts["source"]],),
        columns["per_token"],
        columns["per_example"],
        arrays["groups"] if len(arrays["groups"]) else None,
        EncodingReport(**facts["report"] | lists),
        key,
    )
    vars(examples).update(targets=arrays["targets"], highest=facts["highest"])
    return examples


@contextmanager
def one_tokenizer_thread() -> Iterator[None]:
    """Gives tokenizers of processes that start inside one thread (TOKENIZERS_PARALLELISM)."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


@contextmanager
def worker_errors() -> Iterator[None]:
    """Raises the error that ended the tokenizing in the `with` block in place of what `datasets`
    and pools of processes make of it; ChildProcessError for a process that was killed, or that
    cannot be started."""
    try:
        yield
    except Exception as error:
        found = _find_system_error(error)
        shared = found is not None and found.errno == errno.ENOSPC and SHARED_MEMORY.is_dir()
        if shared and shutil.disk_usage(SHARED_MEMORY).free < SEMAPHORE_BYTES:
            raise ChildProcessError(
                f"{SHARED_MEMORY} is full, which processes that tokenize need to be started: make "
                "room there, or give workers=0"
            ) from None
        if isinstance(error, RuntimeError) and re.search("died|killed|exited", str(error)):
            raise ChildProcessError(
                "a process that tokenizes was killed, as the system does where memory runs out: "
                "give fewer workers, or workers=0 for none"
            ) from None
        wrapped = type(error).__name__ == "DatasetGenerationError"
        raise found or (wrapped and error.__cause__) or error from None


def _find_system_error(error: BaseException | None) -> OSError | None:
    """Finds an OSError among the causes of an error; of one in another process there is only the
    text, and `datasets` quotes some."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        quoted = isinstance(error, OSError) or type(error).__name__ == "RemoteTraceback"
        if quoted and (match := re.search(r"\[Errno (\d+)\] (.*)", str(error))):
            return OSError(int(match[1]), match[2])
        error = error.__cause__
    return None


_parent: int | None = None  # the process whose children end with it


@contextmanager
def end_children_with_parent() -> Iterator[None]:
    """Ends processes that are forked in the `with` block when this process is killed."""
    global _parent
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before


def _watch_parent() -> None:
    """Watches the parent in a thread of a process that was just forked, if it is to end with it."""
    global _parent
    parent, _parent = _parent, None

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


os.register_at_fork(after_in_child=_watch_parent)
