"""Attention beside calling its backends directly, and beside transformers, on one GPU in one run.

python bench/attention.py [--only CASE,...] [--quick] [--out FILE]
python bench/attention.py --table | --write-docs

The first form measures, prints tables and verdicts, and writes the figures as JSON: a whole run
into bench/results, a part of one into bench/out. The second shows the newest whole run as Markdown,
or puts it into docs/attention.md, which says what is compared, and how.
"""

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if not __package__:  # a script: runs where nothing is installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from bench import report, timing
from bench._common import RESULTS, ROOT, save, stamp
from bench.attention_cases import CASES, FA4, OURS, PEERS, TORCH_ONLY, VARLEN, Case, problem
from bench.measure import BEGIN, ONCE, Attempt, Effort, progress
from bench.timing import quantiles
from tigon.kernels import AttentionMask, attention

EFFORT = Effort(rounds=2, total=80.0, least=5, most=40)
PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "transformers", "triton")


def measure(case: Case, effort: Effort, device: str = "cuda") -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device):
        what, chosen = problem(case)
    attempts = [Attempt(provider, what) for provider in what.providers]
    exact = what.truth()
    for attempt in attempts:
        progress(f"{case.name}: {attempt.provider.name}")
        attempt.guarded(attempt.check, exact)
    del exact
    for attempt in attempts:
        attempt.guarded(attempt.weigh)
    for _ in range(effort.rounds):
        for attempt in attempts:
            for mode in ("forward", "both"):
                attempt.guarded(attempt.time, mode, effort)
    return {
        **asdict(case),
        "flops": case.flops,
        "chosen": chosen,
        "providers": [attempt.finish() for attempt in attempts],
    }


def host_time() -> dict[str, Any]:
    """Microseconds on the host: of a call on few tokens, and of what the first layer settles."""
    case = Case("host", (64, 192), 256, (8, 2), 64)
    with torch.device("cuda"):
        what, _ = problem(case)
    found: dict[str, Any] = {}
    for provider in what.providers:
        attempt = Attempt(provider, what)
        attempt.guarded(attempt.count_host)
        found[provider.name] = attempt.result
    q, k, v = (x.detach() for x in what.leaves.values())
    ids = torch.arange(256, device="cuda")[None] // 64
    cu = torch.arange(0, 257, 64, device="cuda", dtype=torch.int32)
    given = {"cu_seq_lens": cu, "longest": 64}
    for name, more in (("bounds given", given), ("bounds to be found", {})):

        def run(more: dict[str, Any] = more) -> Any:
            return attention(q, k, v, mask=AttentionMask(256, segment_ids=ids, **more))

        run()
        found[f"{OURS}, first layer, {name}"] = {
            "forward_us": quantiles(timing.host_microseconds(run))
        }
    return found


def took(case: dict[str, Any], name: str, mode: str) -> float | None:
    """Median ms; the backward pass is what both take less what the forward pass does."""
    result = report.provider(case, name)
    if mode == "backward":
        both, forward = (report.took(result, m) for m in ("both", "forward"))
        return None if both is None or forward is None else both - forward
    return report.took(result, mode)


def table(case: dict[str, Any]) -> str:
    rows = []
    for result in case["providers"]:
        name = result["name"]
        if "error" in result:
            rows.append([name, result["error"].splitlines()[0][:90], *[""] * 6])
            continue
        cells = [name]
        for mode, share in (("forward", 1.0), ("backward", 2.5)):
            ms = took(case, name, mode)
            cells += [report.figure(ms), f"{share * case['flops'] / ms / 1e9:.0f}" if ms else ""]
        both, direct = took(case, name, "both"), took(case, FA4, "both")
        cells.append(report.figure(both / direct) if both and direct else "")
        cells.append(report.figure(result["peak_mib"]))
        errors = result["errors"]
        cells.append(", ".join(f"{report.figure(errors[n], 2)}" for n in ("out", "dq", "dk", "dv")))
        rows.append(cells)
    head = ["provider", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s"]
    head += ["both / flash-attn-4", "extra MiB", "error of out, dq, dk, dv"]
    chosen = "; ".join(f"{n}: {c[0]} ({c[1]})" for n, c in case["chosen"].items())
    return f"### {case['name']}\n\n{report.markdown(head, rows)}\n\n{chosen}"


def verdicts(record: dict[str, Any]) -> Iterator[str]:
    """The targets, each with what was reached."""
    by_name = {case["name"]: case for case in record["cases"]}

    def say(what: str, reached: float | None, least: float) -> str:
        if reached is None:
            return f"not measured: {what}"
        return f"{'met' if reached >= least else 'MISSED'}: {what}: {reached:.3f} for {least:.2f}"

    def times(case: dict[str, Any], name: str, other: str) -> float | None:
        a, b = took(case, name, "both"), took(case, other, "both")
        return a / b if a and b else None

    for name in ("packed 16 x 1024", "packed 4 x 4096", "packed ragged"):
        case = by_name.get(name)
        if case is None:
            continue
        yield say(f"{name}, {FA4} over tigon", times(case, FA4, OURS), 0.95)
        yield say(f"{name}, {VARLEN} over tigon", times(case, VARLEN, OURS), 1.6)
        peers = [(took(case, p, "both"), p) for p in PEERS]
        best = min(((t, p) for t, p in peers if t), default=(None, ""))[1]
        what = f"{name}, best of torch ({best}) over {TORCH_ONLY}"
        yield say(what, times(case, best, TORCH_ONLY), 0.95)
    full, window = by_name.get("Gemma 3, full"), by_name.get("Gemma 3, window 512")
    if full and window:
        # In one backend each: ours takes cuDNN for full attention of this head_dim, in training
        for name in (FA4, VARLEN):
            for mode in ("forward", "backward"):
                a, b = took(full, name, mode), took(window, name, mode)
                what = f"Gemma 3, full over window 512, {name}, {mode}"
                yield say(what, a / b if a and b else None, 4.0)


def host_table(record: dict[str, Any]) -> str:
    rows = []
    for name, result in record["host"].items():
        cells = [result.get(f"{mode}_us", [None, None])[1] for mode in ("forward", "both")]
        rows.append([name, *(report.figure(c) for c in cells)])
    return report.markdown(["host time per call", "forward, µs", "forward + backward, µs"], rows)


def show(record: dict[str, Any]) -> str:
    libraries = ", ".join(f"{k} {v}" for k, v in record["packages"].items() if v)
    head = (
        f"{record['gpu']}, torch {record['torch']}, {libraries}; commit {record['commit']}"
        f"{' with uncommitted changes' if record['uncommitted_changes'] else ''}, "
        f"{record['date'][:10]}."
    )
    parts = [head, *(table(case) for case in record["cases"])]
    if "host" in record:
        parts.append(host_table(record))
    return "\n\n".join([*parts, "\n".join(verdicts(record))])


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(only: Sequence[str], quick: bool, out: Path | None, commit: str | None) -> None:
    whole = not quick and len(only) == len(CASES)
    gpu = torch.cuda.get_device_name()
    if out is None:
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        out = (RESULTS if whole else ROOT / "bench/out") / f"attention-{slug}.json"
    record: dict[str, Any] = {
        **stamp("tigon", "bench/*.py", described=commit),
        "gpu": gpu,
        "packages": {name: installed(name) for name in PACKAGES},
        "complete": False,
        "cases": [],
    }
    for case in CASES:
        if case.name in only:
            record["cases"].append(measure(case, ONCE if quick else EFFORT))
            print(f"\n{table(record['cases'][-1])}", flush=True)
            save(out, record)
            gc.collect()
            torch.cuda.empty_cache()
    record["host"] = host_time()
    record |= {"seconds": time.perf_counter() - BEGIN, "complete": whole}
    save(out, record)
    print("\n" + host_table(record))
    print("\n" + "\n".join(verdicts(record)))
    progress(f"wrote {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="cases, by a part of their names; with commas between")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--commit", help="what git describe --always --dirty says, for a copy without git"
    )
    parser.add_argument("--table", action="store_true", help="print the newest run as Markdown")
    parser.add_argument("--write-docs", action="store_true", help="put it into docs/attention.md")
    options = parser.parse_args(arguments)
    if options.table or options.write_docs:
        files = sorted(RESULTS.glob("attention-*.json"))
        if not files:
            parser.error(f"no attention-*.json in {RESULTS}")
        newest = show(json.loads(files[-1].read_text(encoding="utf-8")))
        if options.write_docs:
            report.insert(newest, ROOT / "docs/attention.md", "attention")
        else:
            print(newest)
        return
    wanted = options.only.split(",") if options.only else [""]
    only = [case.name for case in CASES if any(part in case.name for part in wanted)]
    if not only:
        parser.error(f"--only {options.only}; there are {', '.join(c.name for c in CASES)}")
    if not torch.cuda.is_available():
        parser.error("measuring needs a CUDA GPU; --table does not")
    run(only, options.quick, options.out, options.commit)


if __name__ == "__main__":
    main()
