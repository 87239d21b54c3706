"""The gated delta rule on one GPU: errors beside float64, and times beside FLA.

# T tokens, K key heads, H value heads, D head dim, S packed sequences, B rows

    python -m bench gated_delta                                # three minutes with FLA installed
    python -m bench gated_delta --only checks,times --quick
    python -m bench gated_delta --write-docs                   # needs no GPU

The truth is the definition in float64. FLA's backward pass raises on Hopper with Triton 3.4 to
3.7.0, which miscompile it.
"""

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress
from bench.timing import deadline, milliseconds, quantiles, relative_l2
from tigon.kernels import (
    gated_delta_rule,
    gated_delta_rule_ref,
    gated_delta_step,
    gated_delta_step_ref,
)
from tigon.kernels.delta import gated_delta_backward as backward
from tigon.kernels.delta import gated_delta_forward as forward
from tigon.kernels.delta.gated_delta_tiles import make_chunks

K, H, D = 16, 32, 128
SHAPES = {"1 x 8192": [8192], "8 x 1024": [1024] * 8, "1 x 32768": [32768]}
AIMS = {"forward": 0.30, "backward": 0.90}  # milliseconds at 8192 tokens
NAMES = ("q", "k", "v", "g", "beta")
Inputs = list[Tensor]


def draw(tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> Inputs:
    """Unit keys, scaled unit queries, and heads that remember and forget at every pace."""
    q, k = (F.normalize(torch.randn(1, tokens, heads[0], dim), dim=-1) for _ in "qk")
    v = torch.randn(1, tokens, heads[1], dim)
    pace = torch.logspace(-4, 1.3, heads[1])
    g = -pace * F.softplus(torch.randn(1, tokens, heads[1]))
    beta = torch.randn(1, tokens, heads[1]).sigmoid().to(dtype)
    return [x.to(dtype) for x in (q * dim**-0.5, k, v)] + [g, beta]


def bounds_of(lengths: list[int]) -> Tensor | None:
    """None for one sequence."""
    if len(lengths) == 1:
        return None
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def run_all(rule: Callable[..., Any], inputs: Inputs, ups: Inputs, **how: Any) -> dict[str, Tensor]:
    """Outputs, states and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, final = rule(*leaves, **how)
    ups = [up.to(y.dtype) for up, y in zip(ups, (o, final), strict=True)]
    grads = torch.autograd.grad((o, final), leaves, ups)
    return {"o": o, "state": final} | {f"d{n}": x for n, x in zip(NAMES, grads, strict=True)}


def check(lengths: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype) -> Record:
    """The error of every result, of the kernels and of plain torch with float32 inside."""
    torch.manual_seed(0)
    tokens, rows = sum(lengths), len(lengths)
    inputs = draw(tokens, heads, dim, dtype)
    state = torch.randn(rows, heads[1], dim, dim)
    ups = [torch.randn(1, tokens, heads[1], dim), torch.randn(rows, heads[1], dim, dim)]
    how: Record = {"cu_seqlens": bounds_of(lengths)}
    exact = run_all(
        gated_delta_rule_ref, [x.double() for x in inputs], ups, state=state.double(), **how
    )
    sides = {"tigon": gated_delta_rule, "torch": gated_delta_rule_ref}
    found: Record = {}
    for side, rule in sides.items():
        values = run_all(rule, inputs, ups, state=state, **how)
        found[side] = {n: relative_l2(x, exact[n]) for n, x in values.items()}
    return found


def check_step() -> list[float]:
    """The errors of outputs and of the state after five tokens, beside float64."""
    torch.manual_seed(0)
    inputs = [x.view(3, 5, *x.shape[2:]) for x in draw(15, (K, H), D, torch.bfloat16)]
    state = torch.randn(3, H, D, D)
    moved, exact = state.clone(), state.double()
    o = gated_delta_step(*inputs, moved)
    truth = gated_delta_step_ref(*(x.double() for x in inputs), exact)
    return [relative_l2(o, truth), relative_l2(moved, exact)]


def named(lengths: list[int]) -> str:
    """The lengths, or how many there are of one."""
    return f"{len(lengths)} x {lengths[0]}" if len({*lengths}) == 1 else str(lengths)


CHECKS = {
    f"{named(lengths)} x {heads[0]}/{heads[1]} x {dim}, {str(dtype)[6:]}": (
        lengths,
        heads,
        dim,
        dtype,
    )
    for lengths, heads, dim, dtype in [
        ([300], (2, 4), 128, torch.bfloat16),
        ([1, 64, 0, 130, 65], (2, 4), 128, torch.bfloat16),
        ([300], (2, 4), 128, torch.float16),
        ([100, 200], (2, 6), 64, torch.bfloat16),
        ([200], (1, 2), 24, torch.bfloat16),
        ([300], (2, 4), 128, torch.float32),
        ([70, 100], (2, 4), 24, torch.float32),
        ([8192], (K, H), D, torch.bfloat16),
        ([1024] * 8, (K, H), D, torch.bfloat16),
    ]
}


def check_one(name: str) -> Record:
    """The errors of a check, or what failed; Triton keeps its kernels on disk."""
    torch.set_default_device("cuda")
    try:
        return check(*CHECKS[name])
    except Exception as error:  # such as too much shared memory
        return {"error": f"{type(error).__name__}: {error}"}


def stages(lengths: list[int]) -> dict[str, Callable[[], Any]]:
    """Each kernel on its own."""
    q, k, v, g, beta = draw(sum(lengths), (K, H), D, torch.bfloat16)
    do = torch.randn(v.shape).to(v.dtype)
    chunks = make_chunks(q, bounds_of(lengths))
    prepared = forward.prepare(q, k, g, beta, chunks)
    o, dv, dq, dk = (torch.empty_like(x) for x in (v, v, q, k))
    final = q.new_empty(len(lengths), H, D, D, dtype=torch.float32)
    boxes, gates = forward.takes_boxes(q), prepared.gates
    scans = partial(backward.run_scans, q, k, v, do, prepared, chunks, None, None, dv, boxes)
    scanned = scans()
    dgates = q.new_empty(1 + D // backward.key_block(q), 2, *g.shape, dtype=torch.float32)
    mix = partial(backward.run_mix, q, k, do, gates, chunks, scanned[0], dv, dgates[0], boxes)
    return {
        "chunks": partial(make_chunks, q, bounds_of(lengths)),
        "prepare": partial(forward.prepare, q, k, g, beta, chunks),
        "scan": partial(forward.run_scan, q, k, v, prepared, chunks, None, o, final),
        "scans": scans,
        "mix": mix,
        "states": partial(
            backward.run_states,
            *(q, k, do, gates, chunks, scanned, mix(), dv, dq, dk, dgates[1:], boxes),
        ),
    }


def median(run: Callable[[], Any]) -> float:
    return quantiles(milliseconds(run, total=30.0, least=5, most=30))[1]


def times(rule: Callable[..., Any], lengths: list[int], back: bool = True) -> Record:
    """Milliseconds of the forward pass and of the backward pass alone."""
    inputs = [x.requires_grad_() for x in draw(sum(lengths), (K, H), D, torch.bfloat16)]
    bounds = bounds_of(lengths)
    run = partial(rule, *inputs, cu_seqlens=bounds)
    found: Record = {"forward": median(run)}
    if back:
        o = run()[0]
        do = torch.randn(o.shape).to(o.dtype)
        found["backward"] = median(lambda: torch.autograd.grad(o, inputs, do, retain_graph=True))
    return found


def decode(rows: int, tokens: int) -> Record:
    """Milliseconds of a step, and the state's bytes over them."""
    given = [
        x.expand(rows, *x.shape[1:]).contiguous() for x in draw(tokens, (K, H), D, torch.bfloat16)
    ]
    state = torch.randn(rows, H, D, D)
    ms = median(lambda: gated_delta_step(*given, state))
    return {"ms": ms, "tb_per_s": 2 * state.numel() * 4 / ms / 1e9}


def time_fla() -> Record:
    """FLA's, whose autotuner takes a minute; with its backward pass where that does not raise."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(*inputs: Tensor, cu_seqlens: Tensor | None) -> Any:
        bounds = None if cu_seqlens is None else cu_seqlens.long()
        return chunk_gated_delta_rule(
            *inputs, scale=1.0, output_final_state=True, cu_seqlens=bounds
        )

    name = "1 x 8192"  # of packed sequences its autotuner took more than a minute
    try:
        found = times(rule, SHAPES[name], back=False)
        with suppress(Exception):
            found = times(rule, SHAPES[name])
        return {name: found}
    except Exception as error:
        return {name: {"error": f"{type(error).__name__}: {error}"}}


def run(job: Job) -> None:
    torch.set_default_device("cuda")
    if "checks" in job.only:  # side by side, since compiling takes longest
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            found = pool.map(check_one, CHECKS, chunksize=1)
        job.add(checks=dict(zip(CHECKS, found, strict=True)))
        progress(f"failed: {[n for n, found in job.record['checks'].items() if 'error' in found]}")
    if "times" in job.only:
        for name, lengths in SHAPES.items():
            kernels = {n: median(one) for n, one in stages(lengths).items()}
            found = times(gated_delta_rule, lengths) | {"kernels": kernels}
            progress(f"{name}: {found}")
            job.add(times=job.record.get("times", {}) | {name: found})
    if "step" in job.only:
        shapes = [(1, 1), (8, 1), (64, 1), (256, 1), (64, 8)]
        job.add(step={f"{b} x {t}": decode(b, t) for b, t in shapes}, step_error=check_step())
        progress(f"{job.record['step']}, {job.record['step_error']}")
    if "fla" in job.only:
        with deadline(job.options.limit):
            job.add(fla=time_fla(), fla_version=harness.installed("fla-core"))
        progress(f"{job.record['fla']}")
    print(verdicts(job.record))


def show(record: Record) -> str:
    timed, fla = record.get("times", {}), record.get("fla", {})
    kernels = list(next(iter(timed.values()), {}).get("kernels", {}))
    rows, back = [], any("backward" in found for found in fla.values())
    for name, found in timed.items():
        theirs = fla.get(name, {}).get("forward")
        ratio = theirs / found["forward"] if theirs else None
        cells = [found["forward"], theirs, ratio, found["backward"]]
        cells += [fla.get(name, {}).get("backward")] * back
        rows.append([name, *map(figure, [*cells, *(found["kernels"][n] for n in kernels)])])
    head = ["sequences x tokens", "forward, ms", "FLA forward, ms", "FLA / Tigon", "backward, ms"]
    head += ["FLA backward, ms"] * back
    lines = [f"{heading(record, {'fla-core': record.get('fla_version')})}."]
    lines.append(markdown([*head, *(f"{n}, ms" for n in kernels)], rows))
    errors = [
        [name, *(figure(error, 2) for error in of["tigon"].values())]
        for name, of in record.get("checks", {}).items()
        if "error" not in of
    ]
    names = ["o", "state", *(f"d{n}" for n in NAMES)]
    lines.append(markdown(["tokens x heads x dim: error of", *names], errors))
    return "\n\n".join(lines)


def verdicts(record: Record) -> str:
    one = record.get("times", {}).get("1 x 8192", {})
    return "\n".join(
        harness.verdict(f"{n}, ms", one.get(n), aim, most=True) for n, aim in AIMS.items()
    )


CASES = ["checks", "times", "step", "fla"]
OPTIONS = (("--limit", {"type": float, "default": 120.0, "help": "seconds of FLA"}),)
BENCH = Bench(run, show, CASES, "docs/kernels.md", options=OPTIONS)
