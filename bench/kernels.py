"""Every operator beside its peers, and beside what the hardware allows, in one run on one GPU.

python bench/kernels.py [--only OPERATOR,...] [--quick] [--out FILE]
python bench/kernels.py --table | --plot FILE.svg | --write-docs

The first form measures, prints a table per operator and writes the figures as JSON as they come: a
whole run into bench/results, a part of one into bench/out. The others need no GPU: they show the
newest whole run, as Markdown, as a plot, or between the markers in README.md and docs/kernels.md.
docs/kernels.md says how to read the figures.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed, and bench/kernels.py does not
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # pass for the package of that name

import torch

from bench import peers, report
from bench._common import RESULTS, ROOT, save, stamp
from bench.cases import CASES, HOST, OPERATORS, Case
from bench.measure import BEGIN, STREAMING, floors, host_time, measure, progress

COPY_BYTES = 2**33  # read and written by the copy that stands for the bandwidth


def chosen(operator: str, quick: bool) -> list[Case]:
    cases = [case for case in CASES if case.operator == operator]
    if quick:  # the first shape of each variant
        first = {case.variant: case for case in reversed(cases)}
        cases = [case for case in cases if case is first[case.variant]]
    return cases


def run(only: Sequence[str], quick: bool, out: Path | None, commit: str | None) -> None:
    import triton

    gpu = torch.cuda.get_device_name()
    whole = not quick and set(only) == set(OPERATORS)
    if out is None:
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        out = (RESULTS if whole else ROOT / "bench/out") / f"kernels-{slug}.json"
    versions = peers.versions()
    copy = STREAMING.copy(COPY_BYTES)
    bandwidth = 1e3 * COPY_BYTES / copy[1]  # bytes per second
    record: dict[str, Any] = {
        **stamp("tigon", "bench/*.py", described=commit),
        "gpu": gpu,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "peers": versions,
        "copy": {"bytes": COPY_BYTES, "ms": copy, "bytes_per_second": bandwidth},
        "quick": quick,
        "complete": False,
        "cases": [],
    }
    missing = [name for name, version in versions.items() if version is None]
    progress(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s; not installed: {missing or 'nothing'}")
    asked = [operator for operator in OPERATORS if operator in only]
    for operator in asked:
        if operator == HOST:
            record[HOST] = host_time(versions)
        for case in chosen(operator, quick):
            record["cases"].append(measure(case, versions, quick) | floors(case, bandwidth, quick))
            save(out, record)  # a run that is cut off loses one case
            gc.collect()
            torch.cuda.empty_cache()
        record["seconds"] = time.perf_counter() - BEGIN
        record["complete"] = whole and operator == asked[-1]
        save(out, record)
        print(report.console(record, operator), flush=True)
    progress(f"wrote {out}")


def show(options: argparse.Namespace) -> None:
    record = report.newest(RESULTS)
    if options.table:
        print(report.summary(record))
    if options.write_docs:
        report.write_docs(record, ROOT)
    for path in (options.plot, ROOT / report.PLOT if options.write_docs else None):
        if path is not None:
            from bench.plot_kernels import plot  # matplotlib is an extra

            plot(record, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(OPERATORS), help=", ".join(OPERATORS))
    parser.add_argument("--quick", action="store_true", help="one shape each, few repetitions")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--commit", help="what git describe --always --dirty says, for a copy without git"
    )
    parser.add_argument("--table", action="store_true", help="print the newest run as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the newest run")
    parser.add_argument("--write-docs", action="store_true", help="put it into README and docs")
    options = parser.parse_args(arguments)
    if options.table or options.plot or options.write_docs:
        try:
            show(options)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        return
    only = options.only.split(",")
    unknown = sorted(set(only) - set(OPERATORS))
    if unknown:
        parser.error(f"unknown operators {', '.join(unknown)}; there are {', '.join(OPERATORS)}")
    if not torch.cuda.is_available():
        parser.error("measuring needs a CUDA GPU; --table, --plot and --write-docs do not")
    run(only, options.quick, options.out, options.commit)


if __name__ == "__main__":
    main()
