"""Loads each case of a fuzz target within bounds on time and memory, and watches what it does."""

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

SECONDS = 5  # of processor time, so that other work on the machine is not counted
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
Files = Mapping[str, bytes]  # by their name in the folder
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


class Watch:
    """Lists the forbidden things that are done while it has a folder."""

    folder = ""

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder:
            return
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

    @contextmanager
    def over(self, folder: Path) -> Iterator[list[str]]:
        self.folder, self.faults = os.path.realpath(folder), list[str]()
        try:
            yield self.faults
        finally:
            self.folder = ""


@cache
def watch() -> Watch:
    """Returns the one audit hook, which Python cannot remove."""
    hook = Watch()
    sys.addaudithook(hook)
    return hook


@contextmanager
def bounded() -> Iterator[None]:
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
        self.files = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}
        self.cases = target.cases(self.files)  # once: hypothesis parses the source of its lambdas
        (self.folder.parent / "secret.json").write_bytes(SECRET)
        target.load(self.folder)  # the example is valid, and everything is imported

    def run(self, cases: int, seed: int) -> None:
        """Raises AssertionError, with the smallest case found, unless all are clean."""
        for start in range(0, cases, CHUNK):

            @hypothesis.seed(seed + start)
            @settings(
                max_examples=min(CHUNK, cases - start),
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )
            @given(self.cases)
            def check(case: Case) -> None:
                self.check(case)

            check()

    def check(self, case: Case) -> None:
        """Raises AssertionError with what is wrong with the loading of a case."""
        self.count += 1
        self._put(case)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        error: BaseException | None = None
        try:
            with warnings.catch_warnings(record=True) as shown, watch().over(self.folder) as faults:
                warnings.simplefilter("always")
                try:
                    with bounded():
                        self.target.load(self.folder)
                except BaseException as caught:
                    is_panic = type(caught).__name__ == "PanicException"  # Rust's, no Exception
                    if not is_panic and not isinstance(caught, Exception | Overtime):
                        raise
                    error = caught
        finally:
            self._put({name: self.files.get(name) for name in case})
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) << 10
        if grown > MEMORY:
            faults.append(f"it took {grown >> 20} MiB")
        faults += self._error_faults(error, case)
        faults += [fault for w in shown for fault in text_faults(str(w.message))]
        if faults:
            raise AssertionError(f"{self.target.name}: {'; '.join(faults)}") from error

    def _error_faults(self, error: BaseException | None, case: Case) -> Iterator[str]:
        text = str(error)
        if error is None:
            return
        if not isinstance(error, ValueError | OSError):
            yield f"it raised {type(error).__name__}: {text[:300]!a}"
            return
        if not any(name in text for name in (*self.files, *case, str(self.folder))):
            yield f"no file is named: {text[:300]!a}"
        if SECRET.decode() in text:
            yield "the message has what another file holds"
        yield from text_faults(text)

    def _put(self, case: Case) -> None:
        for name, content in case.items():
            path = self.folder / name
            with suppress(FileNotFoundError):
                path.unlink()
            if isinstance(content, Link):
                path.symlink_to(content.to)
            elif content is not None:
                path.write_bytes(content)


def text_faults(text: str) -> Iterator[str]:
    """Says why a text should not be shown on a terminal."""
    if len(text) > LONGEST:
        yield f"a message of {len(text)} characters"
    if strange := {c for c in text if not c.isprintable() and c != "\n"}:
        yield f"a message with {sorted(map(ascii, strange))[:5]}"
