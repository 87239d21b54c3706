"""Attention beside calling its backends directly, and beside transformers, on one GPU in one run.

docs/attention.md says what is compared, and how; --write-docs puts the figures there.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from bench import harness, kernels_report, timing
from bench.attention_cases import CASES, FA4, OURS, PEERS, TORCH_ONLY, VARLEN, Case, problem
from bench.harness import (
    Bench,
    Job,
    Record,
    figure,
    host_table,
    named,
    provider_table,
    report,
    verdict,
)
from bench.measure import ONCE, Effort, host_time, measure
from bench.timing import quantiles
from tigon.kernels import AttentionMask, attention

GAINS = harness.ROOT / "tigon/kernels/attention/fa4_gains.json"
HOST = "host time per call"
EFFORT = Effort(rounds=2, total=80.0, least=5, most=40)
LIBRARIES = {n: n for n in ("flash-attn-4", "nvidia-cutlass-dsl", "transformers", "triton")}


def measured(case: Case, effort: Effort, device: str = "cuda") -> Record:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(device):
        what, chosen = problem(case)
    found = measure(case.name, what, effort)["providers"]
    return {**asdict(case), "flops": case.flops, "chosen": chosen, "providers": found}


def on_the_host() -> Record:
    """Microseconds on the host: of a call on few tokens, and of what the first layer settles."""
    case = Case("host", (64, 192), 256, (8, 2), 64)
    with torch.device("cuda"):
        what, _ = problem(case)
    found: Record = {result["name"]: result for result in host_time(case.name, what)}
    q, k, v = (x.detach() for x in what.leaves.values())
    ids = torch.arange(256, device="cuda")[None] // 64
    cu = torch.arange(0, 257, 64, device="cuda", dtype=torch.int32)
    bounds = {"bounds given": {"cu_seq_lens": cu, "longest": 64}, "bounds to be found": {}}
    for name, more in bounds.items():

        def call(more: dict[str, Any] = more) -> Any:
            return attention(q, k, v, mask=AttentionMask(256, segment_ids=ids, **more))

        call()
        times = quantiles(timing.host_microseconds(call))
        found[f"{OURS}, first layer, {name}"] = {"forward_us": times}
    return found


def took(case: Record, name: str, mode: str) -> float | None:
    """Median ms; the backward pass is what both take less what the forward pass does."""
    result = harness.row_of(case, name)
    if mode == "backward":
        both, forward = (kernels_report.took(result, m) for m in ("both", "forward"))
        return None if both is None or forward is None else both - forward
    return kernels_report.took(result, mode)


def table(case: Record) -> str:
    def cells(row: Record) -> Iterator[str]:
        name = row["name"]
        for mode, share in (("forward", 1.0), ("backward", 2.5)):
            ms = took(case, name, mode)
            yield figure(ms)
            yield f"{share * case['flops'] / ms / 1e9:.0f}" if ms else ""
        both, direct = took(case, name, "both"), took(case, FA4, "both")
        yield figure(both / direct if both and direct else None)
        yield figure(row["peak_mib"])
        yield ", ".join(figure(row["errors"][n], 2) for n in ("out", "dq", "dk", "dv"))

    head = ["provider", "forward, ms", "TFLOP/s", "backward, ms", "TFLOP/s"]
    head += ["forward + backward / flash-attn-4", "extra MiB", "error of out, dq, dk, dv"]
    chosen = "; ".join(f"{n}: {c[0]} ({c[1]})" for n, c in case["chosen"].items())
    rows = provider_table(head, case["providers"], cells)
    return f"### {case['name']}\n\n{rows}\n\n{chosen}"


def verdicts(record: Record) -> Iterator[str]:
    """The targets, each with what was reached."""
    by_name = {case["name"]: case for case in record["cases"]}

    def over(case: Record, name: str, other: str) -> float | None:
        a, b = took(case, name, "both"), took(case, other, "both")
        return a / b if a and b else None

    for name, case in by_name.items():
        if name not in ("packed 16 x 1024", "packed 4 x 4096", "packed ragged"):
            continue
        peers = [(ms, peer) for peer in PEERS if (ms := took(case, peer, "both"))]
        best = min(peers, default=(None, ""))[1]
        yield verdict(f"{name}, time of {FA4} over tigon's", over(case, FA4, OURS), 0.95)
        yield verdict(f"{name}, time of {VARLEN} over tigon's", over(case, VARLEN, OURS), 1.6)
        what = f"{name}, time of torch's fastest ({best}) over that of {TORCH_ONLY}"
        yield verdict(what, over(case, best, TORCH_ONLY), 0.95)
    full, window = by_name.get("Gemma 3, full"), by_name.get("Gemma 3, window 512")
    if full and window:
        # In one backend each: ours takes cuDNN for full attention of this head_dim, in training
        for name, mode in product((FA4, VARLEN), ("forward", "backward")):
            a, b = took(full, name, mode), took(window, name, mode)
            what = f"Gemma 3, time of full attention over window 512, {name}, {mode}"
            yield verdict(what, a / b if a and b else None, 4.0)


def show(record: Record) -> str:
    host = host_table(HOST, named(record["host"])) if "host" in record else ""
    return report(record, *map(table, record["cases"]), host, verdicts(record))


def run(job: Job) -> None:
    job.record["cases"] = []
    for case in (case for case in CASES if case.name in job.only):
        found = measured(case, ONCE if job.quick else EFFORT)
        job.append("cases", found, table(found))
    job.add(host=on_the_host())


def gains(record: Record) -> Record:
    """What flash-attn-4 makes of a step of attention, in times of what is taken without: the least
    and the most of packed sequences of many lengths, and of whole rows."""
    found: dict[str, list[float]] = {"packed": [], "rows": []}
    for case in record["cases"]:
        kind = "rows" if len(set(case["lengths"])) == 1 else "packed"
        plain = case["window"] is None and case["softcap"] is None and case["head_dim"] <= 128
        ours, without = (took(case, name, "both") for name in (OURS, TORCH_ONLY))
        if plain and ours and without:
            found[kind].append(without / ours)
    ranges = {
        kind: [round(min(values), 2), round(max(values), 2)] for kind, values in found.items()
    }
    return {"gpu": record["gpu"], "commit": record["commit"], **ranges}


def write_gains(record: Record) -> None:
    """Puts them where `attention` reads them, to say what a machine without misses."""
    GAINS.write_text(json.dumps(gains(record), indent=2) + "\n")


CASE_NAMES = [case.name for case in CASES]
BENCH = Bench(run, show, CASE_NAMES, "docs/attention.md", libraries=LIBRARIES, draw=write_gains)
