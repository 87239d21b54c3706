"""The server beside batched generate: tokens per second with many clients, and the first token.

Random weights of the shape of Llama-3.1-8B on a GPU, or with --tiny of a few layers on a CPU. The
clients are another process, which reads streams. docs/serving.md shows the figures.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from bench import generate_cases, harness, timing
from bench.generate_cases import LLAMA_8B
from bench.harness import ROOT, Bench, Job, Record, figure, progress, report, verdict
from tigon.serve.app import Service
from tigon.serve.engine import Engine
from tigon.serve.run import SWITCH_SECONDS, listen, make_server
from tigon.tokenizer import Tokenizer

TINY = LLAMA_8B | {"vocab_size": 1201, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"max_position_embeddings": 512}
LIBRARIES = {name: name for name in ("starlette", "uvicorn", "h11", "tokenizers", "triton")}
LEAST_SHARE = 0.8  # of generate's tokens per second
MOST_STEPS = 2.0  # that a first token waits for, beside its own prompt's pass


@dataclass(frozen=True)
class Case:
    """Clients that begin at once, each with a prompt, and how much they are answered."""

    name: str
    clients: int
    prompt: int  # tokens
    new: int
    stream: bool = True
    temperature: float = 0.0


CASES = (
    Case("64 streams", 64, 1024, 256),
    Case("64 at once", 64, 1024, 256, stream=False),
    Case("64 sampled", 64, 1024, 256, temperature=1.0),
    Case("first token", 32, 1024, 512),
)


def small(case: Case) -> Case:
    """The same with sizes for a CPU."""
    return Case(case.name, 6, 40, 24, case.stream, case.temperature)


def tokenizer(vocab: int) -> Tokenizer:
    """Bytes, and words of letters up to the size of the vocabulary."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = (f"Ġ{a}{b}{c}{d}" for a in letters for b in letters for c in letters for d in letters)
    pieces += [word for word, _ in zip(words, range(vocab - len(pieces)), strict=False)]
    backend = tokenizers.Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@contextmanager
def serving(model: Any, rows: int) -> Iterator[tuple[Service, int]]:
    """A server in a thread, as `tigon serve` runs it, and its port."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    service = Service(Engine(model, rows, 4 * rows), tokenizer(model.config.vocab_size), "m", ())
    with listen("127.0.0.1", 0) as listener:
        server = make_server(service)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.1)
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
        try:
            yield service, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            sys.setswitchinterval(interval)


def ask(port: int, groups: list[list[dict[str, Any]]], pause: float = 0.0) -> list[list[Record]]:
    """What clients of another process note of their requests; groups begin `pause` s apart."""
    job = json.dumps({"port": port, "groups": groups, "pause": pause})
    command = [sys.executable, "-m", "bench.serve_side"]
    done = subprocess.run(
        command, input=job, capture_output=True, text=True, cwd=ROOT, env=None, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout)


def requests(case: Case, vocab: int, count: int, new: int) -> list[dict[str, Any]]:
    prompts = torch.randint(260, vocab, (count, case.prompt), device="cpu").tolist()
    asked = {"max_tokens": new, "stream": case.stream, "temperature": case.temperature, "seed": 1}
    return [asked | {"prompt": prompt} for prompt in prompts]


def batched(model: Any, case: Case, rounds: int) -> list[float]:
    """Seconds of generate for all prompts in one batch."""
    options: dict[str, Any] = {"max_new_tokens": case.new, "eos_token_id": []}
    if case.temperature:
        options |= {"do_sample": True, "temperature": case.temperature, "seed": 1}
    found = []
    for _ in range(rounds + 1):
        ids = torch.randint(260, model.config.vocab_size, (case.clients, case.prompt), device="cpu")
        start = timing.now()
        model.generate(ids.to(model.device), **options)
        found.append(timing.now() - start)
    return found[1:]


def throughput(
    model: Any, service: Service, port: int, case: Case, rounds: int, alone: list[float]
) -> Record:
    """Tokens per second of the clients together, and of generate for the same rows."""
    tokens, vocab, found = case.clients * case.new, model.config.vocab_size, []
    for _ in range(rounds + 1):  # the first compiles and captures
        steps = service.engine.counts.steps
        (rows,) = ask(port, [requests(case, vocab, case.clients, case.new)])
        assert all(row["tokens"] == case.new for row in rows), rows[0]
        found.append(max(row["end"] for row in rows) - min(row["start"] for row in rows))
        steps = service.engine.counts.steps - steps
    return {
        "served_s": sorted(found[1:]),
        "steps": steps,
        "generate_s": sorted(alone),
        "tokens_per_s": tokens / statistics.median(found[1:]),
        "generate_tokens_per_s": tokens / statistics.median(alone),
        "first_token_s": statistics.median(row["first"] - row["start"] for row in rows),
    }


def first_token(model: Any, service: Service, port: int, case: Case, rounds: int) -> Record:
    """Seconds until the first token, alone and while others are answered, and of their steps."""
    vocab, probe = model.config.vocab_size, 8
    alone = [ask(port, [requests(case, vocab, 1, probe)])[0][0] for _ in range(rounds + 3)]
    found, gaps = [], []
    for _ in range(rounds + 1):
        others = requests(case, vocab, case.clients, case.new)
        # The others' prompts are read when half of what they write is
        pause = ask(port, [others])[0][0]["end"]
        rows = ask(port, [others, requests(case, vocab, 1, probe)], pause=0.5 * pause)
        found.append(rows[1][0]["first"] - rows[1][0]["start"])
        gaps.append((rows[0][0]["end"] - rows[0][0]["first"]) / (case.new - 1))
    single = statistics.median(row["first"] - row["start"] for row in alone[3:])
    step = statistics.median(gaps[1:])
    waited = statistics.median(found[1:]) - single
    return {"alone_s": single, "beside_s": sorted(found[1:]), "step_s": step,
            "steps_waited": waited / step}  # fmt: skip


def run(job: Job) -> None:
    tiny = bool(job.options.tiny)
    config, device = (TINY, "cpu") if tiny else (LLAMA_8B, "cuda")
    job.record |= {"config": config, "cases": []}
    model = generate_cases.ours(config, device)
    if tiny:
        model = model.float()
    rounds = 1 if job.quick or tiny else 3
    rows = max(case.clients for case in map(small, CASES)) + 1 if tiny else 64
    chosen = [small(case) if tiny else case for case in CASES if case.name in job.only]
    # Before the server, whose cache takes most of the memory
    alone = {c.name: batched(model, c, rounds) for c in chosen if c.name != "first token"}
    job.add()
    with serving(model, rows) as (service, port):
        for case in chosen:
            progress(case.name)
            given = model, service, port, case, rounds
            measured = throughput(*given, alone[case.name]) if case.name in alone else None
            found = {**asdict(case), **(measured or first_token(*given))}
            job.append("cases", found, table([found]))


def table(cases: list[Record]) -> str:
    parts = []
    many = [case for case in cases if "tokens_per_s" in case]
    if many:
        head = ("clients", "tokens/s", "generate's", "share", "first token, s (median of all)")
        rows = [
            (case["name"], f"{case['tokens_per_s']:,.0f}", f"{case['generate_tokens_per_s']:,.0f}",
             figure(share(case)), figure(case["first_token_s"]))
            for case in many
        ]  # fmt: skip
        parts.append(harness.markdown(head, rows))
    for case in cases:
        if "steps_waited" in case:
            ms = [figure(1e3 * case[key]) for key in ("alone_s", "step_s")]
            beside = figure(1e3 * statistics.median(case["beside_s"]))
            parts.append(
                f"First token of a prompt of {case['prompt']} tokens: {ms[0]} ms alone, {beside} "
                f"ms beside {case['clients']} others, whose steps take {ms[1]} ms."
            )
    return "\n\n".join(parts)


def share(case: Record) -> float:
    return float(case["tokens_per_s"] / case["generate_tokens_per_s"])


def verdicts(record: Record) -> Iterator[str]:
    """The targets, each with what was reached."""
    for case in record["cases"]:
        if "steps_waited" in case:
            what = f"{case['name']}: decode steps waited for"
            yield verdict(what, case["steps_waited"], MOST_STEPS, most=True)
        else:
            yield verdict(f"{case['name']}: share of generate's tokens/s", share(case), LEAST_SHARE)


def show(record: Record) -> str:
    return report(record, table(record["cases"]), verdicts(record))


NAMES = [case.name for case in CASES]
BENCH = Bench(run, show, NAMES, "docs/serving.md", libraries=LIBRARIES, tiny=True)
