"""Loads each case of a fuzz target within bounds on time and memory, and watches what it does."""

import faulthandler
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

SECONDS = 5  # of processor time, so that other work on the machine is not counted
STUCK = 600  # seconds of a clock for CHUNK cases: one waits, or cannot be interrupted
MEMORY = 1 << 30  # bytes that one case may add to the process
SPARE = 3 << 30  # bytes of address space, of which threads take much and use little
LONGEST = 20_000  # characters of a message
CHUNK = 100  # cases of one hypothesis run, whose memory grows with it
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
FORBIDDEN += ("socket.connect", "ctypes.dlopen", "os.fork", "os.remove", "os.rename")
FORBIDDEN += ("shutil.rmtree",)
# Files of the system and of Python, which code may read at any time
ROOT = Path(__file__).parents[2]
SYSTEM = tuple(
    os.path.realpath(path)
    for path in (ROOT, sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys", "/dev", "/etc", "/lib")
)
SECRET = b"what nobody may read"


@dataclass(frozen=True)
class Link:
    """A symlink in the place of a file's content."""

    to: str


Content = bytes | Link | None  # None: the file is absent
Files = Mapping[str, bytes]  # by their path in the folder
Case = Mapping[str, Content]  # the files that differ from the example


@dataclass(frozen=True)
class Target:
    """A kind of file to fuzz: a valid example, mutations of it, and what loads it."""

    name: str
    share: float  # of all cases; the shares need not add up to one
    example: Callable[[Path], None]  # fills a new folder
    cases: Callable[[Files], SearchStrategy[Case]]  # from the example's files
    load: Callable[[Path], Any]  # the folder


class Overtime(BaseException):
    """The time limit. No Exception, so that the fuzzed code does not catch it."""


@dataclass
class Watch:
    """An audit hook that lists the forbidden things that loading a folder does."""

    folder: str
    faults: list[str] = field(default_factory=list)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith((self.folder, *SYSTEM)):
                self.faults.append(f"it opened {path}")
        elif event == "import":
            top = str(args[0]).partition(".")[0]
            if top not in sys.modules and top not in sys.stdlib_module_names:
                self.faults.append(f"it imported {args[0]}")
        elif event in FORBIDDEN:
            self.faults.append(f"{event} with {args!r:.200}")


_watches: list[Watch] = []


@cache
def _add_hook() -> None:
    """Add the hook once, as Python cannot remove it."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        for watch in _watches:
            watch.note(event, args)

    sys.addaudithook(hook)


@contextmanager
def _watching(folder: Path) -> Iterator[Watch]:
    _add_hook()
    _watches.append(Watch(os.path.realpath(folder)))
    try:
        yield _watches[-1]
    finally:
        _watches.pop()


@contextmanager
def _bounded() -> Iterator[None]:
    """Overtime and MemoryError rather than a machine that no longer answers."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Overtime(f"it took more than {SECONDS} s of processor time")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


class Fuzzer:
    """A target's example in a folder of its own, and what loads it."""

    def __init__(self, target: Target, root: Path):
        self.target, self.count = target, 0
        self.folder = root / target.name / "example"
        self.folder.mkdir(parents=True)
        target.example(self.folder)
        paths = (path for path in sorted(self.folder.rglob("*")) if path.is_file())
        self.files = {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
        self.cases = target.cases(self.files)  # once: hypothesis parses the source of its lambdas
        (self.folder.parent / "secret.json").write_bytes(SECRET)
        (self.folder.parent / "secret.safetensors").write_bytes(SECRET)
        target.load(self.folder)  # the example is valid, and everything is imported

    def run(self, cases: int, seed: int, until: float = float("inf")) -> None:
        """Raises AssertionError, with the smallest case found, unless all are clean."""
        done = self.count + cases
        while self.count < done and time.monotonic() < until:

            @hypothesis.seed(seed)
            @settings(
                max_examples=min(CHUNK, done - self.count),
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            @given(self.cases)
            def one(case: Case) -> None:
                if self.count < done and time.monotonic() < until:
                    self.check(case)

            before = self.count
            faulthandler.dump_traceback_later(STUCK, exit=True)
            try:
                one()
            finally:
                faulthandler.cancel_dump_traceback_later()
            seed += 1
            if self.count == before and time.monotonic() < until:
                raise AssertionError(f"{self.target.name}: no cases are made")

    def check(self, case: Case) -> None:
        self.count += 1
        self._put(case)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error: BaseException | None = None
        try:
            with warnings.catch_warnings(record=True) as said, _watching(self.folder) as watch:
                warnings.simplefilter("always")
                try:
                    with _bounded():
                        self.target.load(self.folder)
                except BaseException as caught:
                    is_panic = type(caught).__name__ == "PanicException"  # Rust's, no Exception
                    if not is_panic and not isinstance(caught, Exception | Overtime):
                        raise
                    error = caught
        finally:
            self._put({name: self.files.get(name) for name in case})
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) << 10
        faults = [*watch.faults, *self._faults(error, case)]
        faults += [f for w in said for f in unfit(str(w.message))]
        if grown > MEMORY:
            faults.append(f"it took {grown >> 20} MiB")
        if faults:
            raise AssertionError(f"{self.target.name}: {'; '.join(faults)}") from error

    def _faults(self, error: BaseException | None, case: Case) -> Iterator[str]:
        if error is None:
            return
        if not isinstance(error, ValueError | OSError):
            yield f"it raised {type(error).__name__}: {str(error)[:300]!a}"
            return
        text = str(error)
        names = {Path(name).name for name in (*self.files, *case)}
        if not any(name in text for name in names) and str(self.folder) not in text:
            yield f"no file is named: {text[:300]!a}"
        if SECRET.decode() in text:
            yield "the message has what another file holds"
        yield from unfit(text)

    def _put(self, case: Case) -> None:
        for name, content in case.items():
            path = self.folder / name
            with suppress(FileNotFoundError):
                path.unlink()
            if isinstance(content, Link):
                path.symlink_to(content.to)
            elif content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def unfit(text: str) -> Iterator[str]:
    """Why the text should not be shown on a terminal."""
    if len(text) > LONGEST:
        yield f"a message of {len(text)} characters"
    if strange := {c for c in text if not c.isprintable() and c != "\n"}:
        yield f"a message with {sorted(map(ascii, strange))[:5]}"
