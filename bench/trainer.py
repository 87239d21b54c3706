"""The trainer beside a bare loop over the same batches, in one run.

Llama-3.2-1B's shape with random weights, float32 parameters computed in bf16 on a GPU, and fused
AdamW, on chats of log-normal lengths that are packed into rows. The bare loop is forward, backward,
clipping and the optimizer's step on batches that are on the device before it begins; the trainer
reads, collates, copies, logs and watches besides. Both are timed between optimizer steps, a few
steps after they begin.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import tigon
from bench import timing
from bench.attention_cases import lognormal
from bench.compare_side import LLAMA_1B
from bench.harness import Bench, Job, Record, figure, markdown, progress, report, verdict
from tests.support.small import LLAMA, WORDS, write_tokenizer
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.tokenizer import Tokenizer
from tigon.train import load, prepare, start, train

LEAST = 0.97  # of the bare loop's tokens per second
BEGIN = 5  # steps that are not timed
CASES = {  # rows in a step, rows in a forward
    "2 x 8192": (2, 2),
    "4 micro-batches of 1 x 8192": (4, 1),
}


def write_chats(path: Path, tokens: int, mean: int) -> None:
    """Conversations of about `tokens` tokens in all, each of 1 to 4 turns of a user."""
    lengths = lognormal(tokens, mean)
    with path.open("w") as file:
        for i, length in enumerate(lengths):
            turns = 1 + i % 4
            words = [WORDS[(i + k) % len(WORDS)] for k in range(max(1, int(length) // (2 * turns)))]
            text = " ".join(words)
            roles = [{"role": role, "content": text} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": roles * turns}) + "\n")


def settings(root: Path, case: str, steps: int, seq_len: int, tiny: bool) -> list[str]:
    rows, micro = CASES[case]
    values = {
        "run_dir": tempfile.mkdtemp(dir=root),
        "model": root / "model",
        "data": root / "chats.jsonl",
        "steps": steps,
        "seq_len": seq_len,
        "batch_size": rows,
        "micro_batch_size": micro,
        "param_dtype": "float32",
        "device": "cpu" if tiny else "cuda",
        "export": "false",
        "log_every": 1000,
    }
    return [f"{key}={value}" for key, value in values.items()]


def trainer(arguments: list[str], steps: int) -> Record:
    """Tokens per second of `tigon train`, and what it says of its own waiting."""
    times: list[float] = []
    with start(load(None, arguments).device) as world:
        run = prepare(load(None, arguments), world)
        run.optimizer.register_step_post_hook(lambda *_: times.append(time.perf_counter()))
        train(run)
        tokens = sum(run.data.counts(step)[0] for step in range(BEGIN, steps))
    seconds = times[-1] - times[BEGIN - 1]
    lines = Path(load(None, arguments).run_dir, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][BEGIN:]
    return {"tokens_per_second": tokens / seconds, "seconds": seconds, "rows": rows}


def bare(arguments: list[str], steps: int) -> Record:
    """The same batches, model and optimizer without anything else."""
    with start(load(None, arguments).device) as world:
        run = prepare(load(None, arguments), world)
        device, model, optimizer = world.device, run.model, run.optimizer
        batches = [[b.to(device) for b in run.data.micro_batches(s)] for s in range(steps)]
        tokens = sum(run.data.counts(step)[0] for step in range(BEGIN, steps))
        began = 0.0
        for step, parts in enumerate(batches):
            if step == BEGIN:
                began = timing.now()
            for part in parts:
                supervised = part.per_token["supervised"]
                labels = part.input_ids.masked_fill(~supervised, IGNORE_INDEX)
                (model(**part.inputs(), labels=labels).loss / len(parts)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds = timing.now() - began
    return {"tokens_per_second": tokens / seconds, "seconds": seconds}


def measured(root: Path, case: str, job: Job) -> Record:
    tiny = job.options.tiny
    steps, seq_len = (8, 128) if tiny else (BEGIN + job.options.steps, 8192)
    found: Record = {"name": case, "trainer": [], "bare": []}
    for n in range(job.options.rounds):
        for name, measure in (("trainer", trainer), ("bare", bare)):
            progress(f"{case}, round {n + 1}: {name}")
            arguments = settings(root, case, steps, seq_len, tiny)
            found[name].append(measure(arguments, steps))
            torch.cuda.empty_cache()
    return found


def ratio(case: Record) -> float:
    both = zip(case["trainer"], case["bare"], strict=True)
    return median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in both)


def waiting(case: Record) -> str:
    """The share of the steps in which the trainer waited for data."""
    rows = [row for run in case["trainer"] for row in run["rows"] if "data_seconds" in row]
    total = sum(row["step_seconds"] for row in rows)
    return f"{sum(row['data_seconds'] for row in rows) / total:.2%}" if total else ""


def show(record: Record) -> str:
    rows = [
        [
            case["name"],
            *(
                figure(median(r["tokens_per_second"] for r in case[side]), 5)
                for side in ("trainer", "bare")
            ),
            figure(ratio(case), 4),
            waiting(case),
        ]
        for case in record["cases"]
    ]
    head = ["case", "trainer, tokens/s", "bare loop, tokens/s", "trainer / bare loop"]
    head += ["time waiting for data"]
    what = "tokens/s of the trainer over the bare loop"
    ends = [verdict(f"{c['name']}: {what}", ratio(c), LEAST) for c in record["cases"]]
    return report(record, markdown(head, rows), ends)


def run(job: Job) -> None:
    tiny = job.options.tiny
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        dtype, device = (torch.float32, "cpu") if tiny else (torch.bfloat16, "cuda")
        model = tigon.Llama.from_config(LLAMA if tiny else LLAMA_1B, dtype=dtype, device=device)
        tokenizer = Tokenizer.from_pretrained(write_tokenizer(root / "tokenizer"))
        model.save_pretrained(root / "model", tokenizer=tokenizer)
        del model
        count = 20_000 if tiny else 8192 * 4 * (BEGIN + job.options.steps)
        write_chats(root / "chats.jsonl", count, 40 if tiny else 700)
        for case in job.only:
            job.append("cases", measured(root, case, job))


OPTIONS = (
    ("--rounds", {"type": int, "default": 2}),
    ("--steps", {"type": int, "default": 25, "help": "steps that are timed"}),
)
BENCH = Bench(run, show, list(CASES), "docs/data.md", options=OPTIONS, tiny=True)
