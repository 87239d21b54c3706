"""What every benchmark in bench/ shares: the command line, the record of a run, the report.

A script measures, prints tables and verdicts, and writes the figures as JSON as they come: a whole
run into bench/results, a part of one into bench/out. With --table and --write-docs it needs no GPU
and shows the newest whole runs, as Markdown or in documents, between <!-- kind:begin --> and :end.
"""

import argparse
import gc
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tigon

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"  # whole runs; parts of one go to bench/out
BEGIN = time.perf_counter()
KEEP_LINES = argparse.RawDescriptionHelpFormatter
Record = dict[str, Any]


def progress(line: str) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f} s] {line}", file=sys.stderr, flush=True)


def git(*arguments: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    return done.stdout.strip()


def stamp(described: str | None) -> Record:
    """When, of which commit, and with which versions; only changes of code count.

    A copy without its git directory does not know: there, what `git describe --always --dirty`
    said where it was made.
    """
    changes = bool(git("status", "--porcelain", "--", "tigon", "bench/*.py"))
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if described is not None:
        commit, changes = described.removesuffix("-dirty"), described.endswith("-dirty")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "uncommitted_changes": changes,
        "python": platform.python_version(),
        "tigon": tigon.__version__,
        "torch": torch.__version__,
    }


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is cut off while it writes loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    half.replace(path)


def newest(records: Iterable[Record]) -> Record:
    """The newest whole run; if there is none, the newest part of one."""
    return max(records, key=lambda record: (record.get("complete", True), record["date"]))


def worst(errors: Iterable[float | str]) -> float | str | None:
    """The largest; a NaN is text, and worse than any number."""
    found = list(errors)
    broken = [error for error in found if isinstance(error, str)]
    return broken[0] if broken else max(found, default=None)


def figure(value: float | str | None, digits: int = 3) -> str:
    """Rounded for the eye only: the JSON keeps every digit."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")


def markdown(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rows that end early are filled up."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([*row, *[""] * (len(head) - len(row))] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failure(row: Record, most: int = 90) -> str:
    """The first line of a provider's error, as a cell."""
    if "OutOfMemoryError" in row["error"]:
        return "out of memory"
    return row["error"].splitlines()[0].replace("|", "\\|")[:most]


def provider_table(
    head: Iterable[str], rows: Iterable[Record], cells: Callable[[Record], Iterable[str]]
) -> str:
    """A row for every provider: its name and its cells, or the error of one that failed."""
    found = [(row["name"], *([failure(row)] if "error" in row else cells(row))) for row in rows]
    return markdown(head, found)


def row_of(case: Record, name: str) -> Record:
    """The figures of the provider of this name, or of the case; empty if there is none."""
    rows = case["providers"] if "providers" in case else case["cases"]
    return next((row for row in rows if row["name"] == name), {})


def named(providers: Record) -> list[Record]:
    """The rows of a record that holds them by name."""
    return [row | {"name": name} for name, row in providers.items()]


def host_table(title: str, rows: Iterable[Record]) -> str:
    def cells(row: Record) -> Iterable[str]:
        return (figure(row[key][1] if key in row else None) for key in ("forward_us", "both_us"))

    return provider_table((title, "forward, µs", "forward + backward, µs"), rows, cells)


def heading(record: Record, libraries: Mapping[str, str | None] | None = None) -> str:
    """Where, with what, of which commit and when, without the full stop. `libraries`: those of the
    record, which older ones call otherwise, if none are given."""
    where = record.get("machine") or record["gpu"]
    if libraries is None:
        found = (record[key] for key in ("libraries", "packages", "peers") if key in record)
        libraries = next(found, {})
    others = (f"{k} {v}" for k, v in libraries.items() if v and k != "torch")
    parts = [where, f"torch {record['torch']}", *others]
    changes = " with uncommitted changes" if record["uncommitted_changes"] else ""
    return f"{', '.join(parts)}; commit {record['commit']}{changes}, {record['date'][:10]}"


def judge(reached: float, aim: float, most: bool, digits: int = 3) -> tuple[bool, str, str]:
    """Whether a target is met, and both numbers, rounded to so many decimals or to as many as
    leave no doubt about it: 1.0004 misses a target of at most 1.00, and 1.000 would not show it."""

    def meets(value: float, bound: float) -> bool:
        return value <= bound if most else value >= bound

    met, places = meets(reached, aim), 2
    while meets(round(reached, digits), round(aim, places)) != met:
        digits += 1
        places = 2 if round(aim, 2) == aim else digits - 1
    return met, f"{reached:.{digits}f}", f"{aim:.{places}f}"


def verdict(what: str, reached: float | None, aim: float, *, most: bool = False) -> str:
    """Whether a target is met: to reach at least `aim`, or at most."""
    if reached is None:
        return f"not measured: {what}"
    met, value, bound = judge(reached, aim, most)
    return f"{'met' if met else 'MISSED'}: {what}: {value}, target {'≤' if most else '≥'} {bound}"


def report(record: Record, *parts: str | Iterable[str], title: str = "") -> str:
    """A record as Markdown: its heading or `title`, tables, and lists of lines; empty parts count
    for nothing."""
    said = [part if isinstance(part, str) else "\n".join(part) for part in parts]
    return "\n\n".join(filter(None, [title or f"{heading(record)}.", *said]))


def between(text: str, block: str, name: str, kind: str) -> str:
    """`text` with `block` between its markers of that kind."""
    begin, end = f"<!-- {kind}:begin -->", f"<!-- {kind}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{name} does not hold {begin} and {end} once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"


def write_docs(blocks: Mapping[str, str], kind: str) -> None:
    """All files or none: the markers of every one are looked for first."""
    texts = {
        ROOT / name: between((ROOT / name).read_text(encoding="utf-8"), block, name, kind)
        for name, block in blocks.items()
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib: text that can be searched, and the same file for the same."""
    import matplotlib  # an extra

    with matplotlib.rc_context({"svg.hashsalt": "tigon", "svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


class Job:
    """A run of a benchmark: what was asked for, and the record, saved whenever it grows."""

    def __init__(self, kind: str, machine: str, options: argparse.Namespace, whole: bool) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
        folder = RESULTS if whole else ROOT / "bench/out"
        name = kind if slug == kind else f"{kind}-{slug}"
        self.out: Path = options.out or folder / f"{name}.json"
        self.options, self.whole, self.resumes = options, whole, False
        self.only: list[str] = options.only
        self.quick: bool = options.quick
        self.tiny: bool = getattr(options, "tiny", False)
        self.record: Record = {**stamp(options.commit), "complete": False}

    @property
    def place(self) -> Path:
        """Where the record is saved: one that is cut off, or a part, leaves a whole one alone."""
        whole = self.out.exists() and json.loads(self.out.read_text("utf-8")).get("complete", True)
        kept = whole and not (self.resumes or self.record["complete"])
        return ROOT / "bench/out" / self.out.name if kept else self.out

    def add(self, shown: str = "", **found: Any) -> None:
        """Put figures into the record and on the screen; a run that is cut off keeps them."""
        self.record |= found
        save(self.place, self.record)
        if shown:
            print(f"\n{shown}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self) -> Record:
        """What the record has that this run adds to, until it is whole; nothing of a new one."""
        self.resumes = True
        if self.options.out is None and not self.tiny:
            self.out = RESULTS / self.out.name
        if not self.out.exists():
            return {}
        known: Record = json.loads(self.out.read_text(encoding="utf-8"))
        if known["machine"] != self.record["machine"]:
            here = self.record["machine"]
            raise SystemExit(f"{self.out} is of {known['machine']}, and this is {here}: give --out")
        return known

    def append(self, key: str, found: Any, shown: str = "") -> None:
        self.add(shown, **{key: [*self.record.get(key, ()), found]})

    def finish(self, shown: str) -> None:
        self.add(shown, seconds=time.perf_counter() - BEGIN, complete=self.whole)
        progress(f"wrote {self.place}")


@dataclass(frozen=True)
class Bench:
    """A benchmark: what it measures, and how its records are shown."""

    run: Callable[[Job], object]  # fills the record
    show: Callable[[Record], str]  # a record as Markdown
    cases: Sequence[str]
    document: str = ""  # that shows the newest record, unless `blocks` says what shows what
    blocks: Callable[[Record], dict[str, str]] | None = None
    unasked: Sequence[str] = ()  # cases that are measured only if --only names them
    draw: Callable[[Record], None] | None = None  # makes a document that is a picture
    options: Sequence[tuple[str, dict[str, Any]]] = ()  # more of them
    libraries: Mapping[str, str] = field(default_factory=dict)  # packages that it names
    needed: Sequence[str] = ()  # of the libraries, but with --tiny
    tiny: bool = False  # has --tiny, which needs no GPU
    gpus: int = 1  # that it needs
    needs_gpu: bool = True  # but with --tiny
    each_machine: bool = False  # its document shows the newest record of every machine

    @property
    def kind(self) -> str:
        """Names its records, bench/results/<kind>-<machine>.json, and its markers."""
        return self.run.__module__.rpartition(".")[2]

    def shown(self, record: Record) -> dict[str, str]:
        """What stands between the markers of each document."""
        if self.blocks is not None:
            return self.blocks(record)
        return {self.document: self.show(record)} if self.document else {}

    def documented(self, records: Iterable[Record]) -> dict[str, str]:
        """The same for these records."""
        if not self.each_machine:
            return self.shown(newest(records))
        machines: dict[str, list[Record]] = {}
        for record in records:
            machines.setdefault(record["machine"], []).append(record)
        blocks: dict[str, list[str]] = {}
        for of_one in machines.values():
            for name, block in self.shown(newest(of_one)).items():
                blocks.setdefault(name, []).append(block)
        return {name: "\n\n".join(some) for name, some in blocks.items()}


def chosen(wanted: Sequence[str], cases: Sequence[str]) -> list[str]:
    """The cases of these names in this order; a name that is none stands for those that contain
    it."""
    found: list[str] = []
    for part in wanted:
        some = [part] if part in cases else [case for case in cases if part in case]
        if not some:
            raise ValueError(f"no case {part}; there are {', '.join(cases)}")
        found += some
    return list(dict.fromkeys(found))


def split(only: str | None, cases: Sequence[str]) -> list[str]:
    """The names in --only, at its commas; a case's own name may have some."""
    parts: list[str] = []
    for part in filter(None, (only or "").split(",")):
        joined = f"{parts[-1]},{part}" if parts else part
        if parts and any(case.startswith(joined) for case in cases):
            parts[-1] = joined
        else:
            parts.append(part)
    return parts


def parser_of(bench: Bench) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {bench.kind}",
        description=sys.modules[bench.run.__module__].__doc__,
        formatter_class=KEEP_LINES,
    )
    add = parser.add_argument
    add("--only", help=f"cases or parts of their names, with commas: {', '.join(bench.cases)}")
    add("--quick", action="store_true", help="few repetitions")
    add("--out", type=Path, help="where the JSON goes")
    add("--commit", help="what git describe --always --dirty says, for a copy without git")
    add("--table", action="store_true", help="print the runs in bench/results as Markdown")
    add("--write-docs", action="store_true", help="put the newest into docs/")
    if bench.tiny:
        add("--tiny", action="store_true", help="tiny models on the CPU")
    for flag, more in bench.options:
        add(flag, **more)
    return parser


def main(bench: Bench, arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(bench)
    options = parser.parse_args(arguments)
    try:
        if options.table or options.write_docs:
            show_records(bench, options)
            return
        usual = [case for case in bench.cases if case not in bench.unasked]
        wanted = split(options.only, bench.cases) or getattr(options, "cases", None)
        options.only = chosen(wanted, bench.cases) if wanted else usual
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    tiny = getattr(options, "tiny", None)
    on_cpu = tiny or not bench.needs_gpu
    if not (on_cpu or torch.cuda.is_available()):
        other = "" if tiny is None else ", or --tiny"
        parser.error(f"measuring needs a CUDA GPU{other}; --table and --write-docs need none")
    if not tiny and torch.cuda.device_count() < bench.gpus != 1:
        parser.error(f"needs {bench.gpus} GPUs, and there are {torch.cuda.device_count()}")
    machine = "CPU" if on_cpu else torch.cuda.get_device_name()
    whole = not (options.quick or tiny) and set(usual) <= set(options.only)
    job = Job(bench.kind, machine, options, whole)
    if not on_cpu:
        job.record["gpu"] = machine
    job.record["machine"] = machine if bench.gpus == 1 else f"{bench.gpus} x {machine}"
    job.record["libraries"] = {
        name: installed(package) for name, package in bench.libraries.items()
    }
    missing = [name for name in bench.needed if not tiny and not job.record["libraries"][name]]
    if missing:
        packages = " ".join(bench.libraries[name] for name in missing)
        parser.error(f"needs {' and '.join(missing)}: pip install {packages}")
    bench.run(job)
    job.finish(bench.show(job.record))


def files(kind: str) -> list[Path]:
    found = [*RESULTS.glob(f"{kind}.json"), *sorted(RESULTS.glob(f"{kind}-*.json"))]
    if not found:
        raise FileNotFoundError(f"no {kind}*.json in {RESULTS}: run python -m bench {kind} first")
    return found


def records(kind: str) -> list[Record]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in files(kind)]


def parts_of_runs(kind: str) -> Iterator[str]:
    """Says which records are not of whole runs, and which of them were whole in the last commit."""
    for path, record in zip(files(kind), records(kind), strict=True):
        if not record.get("complete", True):
            before = git("show", f"HEAD:./{path.name}", cwd=RESULTS)
            whole = before and json.loads(before).get("complete", True)
            lost = f"; git checkout {path} brings back a whole one" if whole else ""
            yield f"{path.name} is of a run that was cut off, or of a part{lost}"


def show_records(bench: Bench, options: argparse.Namespace) -> None:
    found = records(bench.kind)
    if options.write_docs:
        for line in parts_of_runs(bench.kind):
            progress(line)
        write_docs(bench.documented(found), bench.kind)
        if bench.draw is not None:
            bench.draw(newest(found))
    if options.table:
        print("\n\n".join(map(bench.show, found)))
