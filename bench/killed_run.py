"""A run of `tigon train` on all GPUs whose rank is killed, and that goes on with half of them.

From a sharded checkpoint of Llama-3.1-8B's shape on the disk: the run is on its way after its first
checkpoint when one of its ranks is killed. It must end by itself, go on from the checkpoint with
half as many ranks and, since these read the same rows, with the same losses; and the model that it
exports must have the loss that the run found at its end.

    python -m bench killed_run --root DIRECTORY   # about 300 s on four GPUs, and 130 GB of files
    python -m bench killed_run --tiny             # four processes on the CPU
    python -m bench killed_run --write-docs       # needs no GPU
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from bench import end_to_end_files as files
from bench import harness
from bench.harness import Bench, Job, Record, figure, heading, markdown, progress, verdict
from bench.processes import environment, python_command
from tigon.train import checkpoint
from tigon.train.logging import read_metrics

MODEL, SAVED, STEPS, KILLED = "Llama-3.1-8B", 15, 30, 21  # steps; a rank is killed in or after
KILLED_STATUS = 128 + signal.SIGKILL
LOSSES, EXPORT = 0.2, 1.0  # differences in %: gradients in another order; windows, not rows
DOCUMENT = "docs/checkpoints.md"


def settings(root: Path, tiny: bool, gpus: int) -> list[str]:
    chats = root / f"chats-{files_wanted(root, tiny).chats}"
    values = {
        "model": root / MODEL,
        "data": chats / "train.jsonl",
        "eval_data": chats / "eval.jsonl",
        "run_dir": root / "run",
        "seq_len": 256 if tiny else 8192,
        "batch_size": 2 * gpus,
        "micro_batch_size": 1,
        "steps": STEPS,
        "lr": 1e-5,
        "save_every": SAVED,
        "keep_last": 1,
        "param_dtype": "bfloat16",
        "optimizer": "adamw_bf16",
        "resume": "auto",
    }
    return [f"{key}={value}" for key, value in values.items()]


def files_wanted(root: Path, tiny: bool) -> files.Request:
    return files.Request(str(root), MODEL, 300 if tiny else 8000, 20 if tiny else 100, tiny)


def command(arguments: list[str], log: Path, seconds: float, killed: Path | None = None) -> int:
    """Runs a command of Tigon and returns its exit code; all of its processes end with it.

    `killed`: a run whose last rank is killed when its metrics have step KILLED and its first
    checkpoint, written while training goes on, is complete.
    """
    end = time.monotonic() + seconds
    with log.open("w") as out:
        process = subprocess.Popen(
            python_command("-m", "tigon", *arguments),
            env=environment(), stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < end:
                if killed is not None and is_due(killed):
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                    os.kill(int(children.split()[-1]), signal.SIGKILL)
                    progress("a rank was killed")
                    killed = None
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def train(root: Path, job: Job, gpus: int, ranks: int, kill: bool) -> Record:
    """Returns what a run on so many ranks finds, in whose middle one is killed, or to its end."""
    run, log = root / "run", root / f"{'killed' if kill else 'resumed'}.log"
    began, given = time.monotonic(), settings(root, job.options.tiny, gpus)
    arguments = ["train", *given, "--nproc", str(ranks)]
    status = command(arguments, log, job.options.limit, run if kill else None)
    rows = read_metrics(run / "metrics.jsonl")
    found = {"ranks": ranks, "status": status, "seconds": time.monotonic() - began}
    found["losses"] = {row["step"]: row["loss"] for row in rows if "loss" in row}
    found["eval_loss"] = next((row["eval_loss"] for row in rows if "eval_loss" in row), None)
    text = log.read_text(errors="replace")
    begun = re.search(r"^steps: (\d+) to", text, re.MULTILINE)
    found["start"] = int(begun[1]) if begun else STEPS
    if status != (KILLED_STATUS if kill else 0):
        found["error"] = text.strip().rpartition("\n")[2]
    return found


def is_due(run: Path) -> bool:
    """Whether the run has come as far as a rank of it is to be killed."""
    steps = (row["step"] for row in read_metrics(run / "metrics.jsonl"))
    has_checkpoint = checkpoint.latest(run / "checkpoints") is not None
    return has_checkpoint and max(steps, default=-1) >= KILLED


def reload(root: Path, job: Job) -> Record:
    """Returns the loss of the exported model on the rows of the run's evaluation."""
    data = root / f"chats-{files_wanted(root, job.options.tiny).chats}/eval.jsonl"
    given = ["eval", "perplexity", str(root / "run/hf"), str(data), "--context", "8192"]
    log = root / "reload.log"
    command(given, log, job.options.limit)
    text = log.read_text(errors="replace")
    found = re.search(r"\bloss +([\d.]+)", text)
    return {"loss": float(found[1])} if found else {"error": text[-500:]}


def run(job: Job) -> None:
    tiny = job.options.tiny
    gpus = 4 if tiny else torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit(f"needs two GPUs or more, and there are {gpus}")
    job.record |= {"machine": f"{gpus} x {job.record.get('gpu', 'CPU')}", "steps": STEPS}
    root = job.options.root or Path(tempfile.mkdtemp())
    job.record["root"] = str(root)
    shutil.rmtree(root / "run", ignore_errors=True)
    progress("files")
    files.write(files_wanted(root, tiny))
    for name, count, kill in (("killed", gpus, True), ("resumed", gpus // 2, False)):
        progress(f"{name}: {count} ranks")
        job.add(**{name: train(root, job, gpus, count, kill)})
    progress("reload")
    job.add(reloaded=reload(root, job))
    job.whole = not tiny


def compared(record: Record) -> list[tuple[float, float]]:
    """Returns losses of the steps that both runs made: those after what the second began with."""
    before, after = (
        {int(s): x for s, x in record[n]["losses"].items()} for n in ("killed", "resumed")
    )
    start = record["resumed"]["start"]
    return [(before[step], after[step]) for step in sorted(before) if start < step in after]


def show(record: Record) -> str:
    names = [name for name in ("killed", "resumed") if name in record]
    rows = [
        [
            name,
            *(str(record[name][key]) for key in ("ranks", "status")),
            figure(record[name]["seconds"]),
        ]
        for name in names
    ]
    said = [f"{name}: {harness.failure(record[name])}" for name in names if "error" in record[name]]
    if len(names) == 2:
        pairs = compared(record)
        apart = max((100 * abs(b / a - 1) for a, b in pairs), default=None)
        what = f"losses of {len(pairs)} steps made again with half the ranks: apart by at most, %"
        said.append(verdict(what, apart, LOSSES, most=True))
        expected, loss = record["resumed"]["eval_loss"], record.get("reloaded", {}).get("loss")
        apart = 100 * abs(loss / expected - 1) if loss and expected else None
        what = "loss of the exported model: apart from the run's by, %"
        said.append(verdict(what, apart, EXPORT, most=True))
    table = markdown(("run", "ranks", "exit code", "seconds"), rows)
    where = f", files in {record['root']}" if "root" in record else ""
    return "\n\n".join([f"{heading(record, {})}{where}.", table, "\n".join(said)])


OPTIONS = (
    ("--root", {"type": Path, "help": "where files and runs go (default: a temporary folder)"}),
    ("--limit", {"type": float, "default": 200.0, "help": "seconds that a run may take"}),
)
BENCH = Bench(run, show, ("run",), DOCUMENT, options=OPTIONS, tiny=True)
