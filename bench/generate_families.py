"""Decoding of the families of 2025 and 2026 beside transformers, in one run on one GPU.

Random weights, the same on both sides, of the shapes of bench/train_cases.py. Ours is `generate` as
it comes, with a static cache and CUDA graphs; transformers' has its dynamic cache, and its static
one, with which it compiles its steps, and the experts that it chooses for decoding; the faster is
shown. A time is that of a token of all rows: of a long generation less a short one. The limit is a
copy's time for the bytes that a step must read: weights without tables that are looked up, of the
experts those that so many rows choose at random, and the states of all layers, of which a
recurrence also writes its own.

Each batch of a model is added to the record as it comes, and what it has at this commit is not
measured again: a run that is cut off goes on with the same command, and parts can be asked for by
name. Others keep their commit, their date and the copy of their run.

    python -m bench generate_families --only E4B,35B
    python -m bench generate_families --tiny          # tiny models on the CPU

# B rows, E experts
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

import tigon
from bench import harness, timing
from bench.compare_side import TINY
from bench.generate import COPIED, COPY, Decoding, fastest_peer
from bench.generate_cases import OURS, STATIC, THEIRS, Decode
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, report, row_of
from bench.measure import in_turn
from bench.train_cases import MODELS, TINY_SHARED, fill_ours
from bench.train_peer import NO_SDPA, Options, peer_model
from bench.train_side import free, guarded

FEWER = {  # layers than published: transformers' compiler takes some seconds for each
    "Gemma4-E4B": {"num_hidden_layers": 12, "num_kv_shared_layers": 6}  # of each kind some
}
NAMES = ("Qwen3.5-0.8B", "gpt-oss-20b", "Gemma4-E4B", "Qwen3.5-35B-A3B", "Qwen3.5-9B")
BATCHES = (1, 64)
CONTEXT = 1024
SMALL = TINY | TINY_SHARED | {"num_hidden_layers": 4}  # one of which is full attention
LIBRARIES = {name: name for name in ("transformers", "triton", "causal-conv1d")}
LIBRARIES["FLA"] = "fla-core"
DOUBT = 0.1  # of the logits' deviations, in the mean over tokens
BANDWIDTH_ON_CPU = 1e10  # with --tiny, where nothing is measured


def decoding(batch: int, tiny: bool) -> Decode:
    context, ours, slow = (5, (2, 4), (3, 4)) if tiny else (CONTEXT, (16, 80), (4, 14))
    return Decode(f"{batch} x {context}", batch, context, ours, slow, 1 if tiny else 2)


def moved(model: Any, case: Decode) -> dict[str, float]:
    """Bytes that a step must read, and those of recurrent states twice."""
    config, head = model.config, model.lm_head.weight
    lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {head}
    read, chosen = 0.0, getattr(config, "num_experts_per_tok", 0)
    for name, weight in model.named_parameters():
        share = 1.0
        if ".experts." in name:
            share -= (1 - chosen / len(weight)) ** case.batch
        read += weight.nbytes * share * (weight not in lookups)
    states = model.static_cache(case.batch, round(case.held(OURS)), chunk=1).states
    cache = sum(state.nbytes * (2 if state.history is None else 1) for state in states)
    return {"parameters": read, "cache": float(cache)}


def build(name: str, tiny: bool) -> dict[str, Any]:
    """Both sides, with weights that their names draw."""
    family, kind, shape = MODELS[name]
    shape = shape | FEWER.get(name, {})
    if tiny:
        shape = shape | {key: SMALL[key] for key in SMALL if key in shape}
    device = "cpu" if tiny else "cuda"
    ours = getattr(tigon, family).from_config(shape, dtype=torch.bfloat16, device=device).eval()
    fill_ours(ours)
    attention = Options("eager" if kind in NO_SDPA else "sdpa")
    theirs = peer_model(shape, kind, attention, device, False).eval()
    return {OURS: ours, THEIRS: theirs}


@torch.inference_mode()
def distance(models: dict[str, Any], tokens: int) -> float:
    """How far ours is from transformers in a pass without a cache: of the last tokens' logits."""
    ids = torch.randint(models[OURS].config.vocab_size, (1, tokens), device=models[OURS].device)
    kept = {"use_cache": False, "logits_to_keep": 16}
    ours, theirs = (models[side](ids, **kept).logits for side in (OURS, THEIRS))
    return timing.relative_l2(ours, theirs)


def measure(job: Job, model: Record, batches: list[int]) -> Record:
    """These batches of a model, which is in the record from the first on."""
    name, tiny = model["name"], job.tiny
    progress(f"{name}: random weights")
    models = build(name, tiny)
    torch.manual_seed(0)
    model["layers"] = models[OURS].config.num_hidden_layers
    model["apart"] = distance(models, decoding(1, tiny).context)
    for batch in batches:
        case = decoding(batch, tiny)
        vocab = models[OURS].config.vocab_size
        torch.manual_seed(batch)
        ids = torch.randint(vocab, (batch, case.context), device=models[OURS].device)
        bytes_read = moved(models[OURS], case)
        attempts = [
            Decoding(side, models[of], ids, case, bytes_read, models[THEIRS])
            for side, of in ((OURS, OURS), (THEIRS, THEIRS), (STATIC, THEIRS))
        ]
        found = in_turn(f"{name}, {case.name}", attempts, case.rounds)
        model["cases"].append({"name": case.name, "batch": batch, "providers": found})
        job.record["models"][name] = model
        job.add("\n".join(" | ".join(row) for row in rows(model)))
    return {}


def run(job: Job) -> None:
    models: dict[str, Record] = job.resume().get("models", {})
    job.record["models"] = models
    own = {key: job.record[key] for key in ("commit", "date", "libraries")}
    for name in job.only:
        model = models.get(name, {})
        if model.get("commit") != own["commit"] or "error" in model or job.options.again:
            model = {"name": name, **own, "cases": []}
        done = [case["batch"] for case in model["cases"]]
        batches = [batch for batch in ((1, 3) if job.tiny else BATCHES) if batch not in done]
        if not batches:
            progress(f"{name}: is measured")
            continue
        free()
        on_cpu = {"bytes_per_second": BANDWIDTH_ON_CPU}
        model["copy"] = on_cpu if job.tiny else COPY.bandwidth(COPIED)
        model |= guarded(lambda model=model, batches=batches: measure(job, model, batches))
        models.setdefault(name, model)  # with its error, if there are no others
        job.add()
    job.whole = not (job.tiny or missing(job.record))


def rows(model: Record) -> Iterator[list[str]]:
    """A row for each batch."""
    if "error" in model:
        yield [model["name"], "", harness.failure(model)]
    for case in model["cases"]:
        sides = [fastest_peer(case) or row_of(case, THEIRS), row_of(case, OURS)]
        cells = [f"{model['name']}, {model['layers']} layers", case["name"]]
        for row in sides:
            if "error" in row:
                cells.append(harness.failure(row))
            else:
                said = row["name"].partition(",")[2]  # of the peer's cache, where it is static
                speed = f"{1e3 * case['batch'] / row['ms'][1]:,.0f}"
                cells.append(f"{figure(row['ms'][1])}, {speed}{',' * bool(said)}{said}")
        if any("error" in row for row in sides):
            yield cells
            continue
        theirs, ours = (row["ms"][1] for row in sides)
        limit = 1e3 * sum(sides[1]["bytes"].values()) / model["copy"]["bytes_per_second"]
        gaps = ", ".join(figure(row["mean_choice"], 2) for row in sides)
        cells += [f"{theirs / ours:.2f}", figure(limit), f"{limit / ours:.2f}", gaps]
        cells += [figure(model.get("apart"), 2), f"{model['commit']}, {model['date'][:10]}"]
        yield cells


def missing(record: Record) -> str:
    models = record["models"].values()
    there = {(model["name"], case["batch"]) for model in models for case in model["cases"]}
    names = [f"{n}, {b} x {CONTEXT}" for n, b in product(NAMES, BATCHES) if (n, b) not in there]
    return f"Not measured: {'; '.join(names)}." if names else ""


def show(record: Record) -> str:
    head = ["model", "rows x context", "transformers: ms, tokens/s", "Tigon: ms, tokens/s"]
    head += ["speed over transformers", "limit, ms", "share of it", "mean logit gap of both"]
    head += ["logits apart", "run"]
    known = [record["models"][name] for name in NAMES if name in record["models"]]
    table = markdown(head, (row for model in known for row in rows(model)))
    title = f"{heading(record)}, the last run."
    return report(record, table, missing(record), eager(known), wrong(record), title=title)


def eager(models: list[Record]) -> str:
    """Says which rows are beside steps of transformers that nothing compiles."""
    each = ((model["name"], case) for model in models for case in model["cases"])
    names = [f"{name}, {case['name']}" for name, case in each if not row_of(case, STATIC)]
    return f"Without transformers' static cache: {'; '.join(names)}." if names else ""


def wrong(record: Record) -> Iterator[str]:
    for model in record["models"].values():
        for case in model["cases"]:
            for row in case["providers"]:
                if not row.get("mean_choice", 0.0) <= DOUBT:
                    where = f"{model['name']}, {case['name']}, {row['name']}"
                    yield f"WRONG: {where}: logits are {figure(row['mean_choice'])} deviations off"


AGAIN = ("--again", {"action": "store_true", "help": "measure models that the record has"})
BENCH = Bench(
    run, show, NAMES, "docs/generation.md", options=[AGAIN], libraries=LIBRARIES, tiny=True
)
