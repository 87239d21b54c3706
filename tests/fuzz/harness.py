"""Runs a target's cases, each within bounds on time and memory, and watches what loading does."""

import faulthandler
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.target import Case, Link, Target, read_files

SECONDS = 5  # of processor time, so that other work on the machine is not counted
STUCK = 600  # seconds of a clock for CHUNK cases: one waits, or cannot be interrupted
MEMORY = 1 << 30  # bytes that one case may add to the process
SPARE = 3 << 30  # bytes of address space, of which threads take much and use little
LONGEST = 20_000  # characters of a message
CHUNK = 100  # cases of one hypothesis run, whose memory grows with it
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
FORBIDDEN += (
    "socket.connect",
    "ctypes.dlopen",
    "os.fork",
    "os.remove",
    "os.rename",
    "shutil.rmtree",
)
# Files of the system and of Python, which code may read at any time
ROOT = Path(__file__).parents[2]
SYSTEM = tuple(
    os.path.realpath(path)
    for path in (ROOT, sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys", "/dev", "/etc", "/lib")
)
SECRET = b"what nobody may read"


class Overtime(BaseException):
    """No Exception, so that nothing that is fuzzed takes it for its own."""


@dataclass
class Watch:
    """What loading did besides reading its folder."""

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


_watch: Watch | None = None
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    watch = _watch
    if watch is not None:
        watch.note(event, args)


@contextmanager
def _watching(folder: Path) -> Iterator[Watch]:
    global _watch, _hooked
    if not _hooked:  # it stays as long as the process
        sys.addaudithook(_hook)
        _hooked = True
    found = Watch(os.path.realpath(folder))
    _watch = found
    try:
        yield found
    finally:
        _watch = None


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
        self.files = read_files(self.folder)
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
                except (Exception, Overtime) as caught:
                    error = caught
                except BaseException as caught:
                    # Rust's panics are no Exceptions
                    if type(caught).__name__ != "PanicException":
                        raise
                    error = caught
        finally:
            self._restore(case)
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

    def _restore(self, case: Case) -> None:
        self._put({name: self.files.get(name) for name in case})


def unfit(text: str) -> Iterator[str]:
    """Why the text should not be shown on a terminal."""
    if len(text) > LONGEST:
        yield f"a message of {len(text)} characters"
    if strange := {c for c in text if not c.isprintable() and c != "\n"}:
        yield f"a message with {sorted(map(ascii, strange))[:5]}"


@contextmanager
def workspace() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="tigon-fuzz-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
