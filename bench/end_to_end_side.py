"""One side of bench/end_to_end.py, from the command to the exported model: prints figures as JSON.

The library runs as its documentation has it. Only clocks are added, around functions by name: each
second of the process belongs to the innermost phase that it is in, so that phases add up to all.

python -m bench.end_to_end_side '{"library": "tigon", "model": "/tmp/model", ...}'   # see Request
"""

import json
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Record = dict[str, Any]
START, DATA, MODEL, COMPILE, STEPS = "start", "data", "model", "compile", "steps"
EVALUATION, SAVE, OTHER = "evaluation", "save", "other"
PHASES = (START, DATA, MODEL, COMPILE, STEPS, EVALUATION, SAVE, OTHER)
GIB = 2**30
SILENCE = 5.0  # seconds of steps after which their number is said
# Functions of each library by the phase that they are. What they call belongs to them, unless it
# has a row of its own
COMPILERS = ("triton.compiler:compile", "cutlass.cute:compile")  # of all libraries' kernels
CLOCKS = {
    "tigon": {
        "tigon.train.build:load_tokenizer": DATA,
        "tigon.train.build:build_loader": DATA,
        "multiprocess.process:BaseProcess.join": DATA,
        "tigon.train.compile_step:run_step": STEPS,
        "tigon.train.build:build_model": MODEL,
        "tigon.train.build:build_optimizer": MODEL,
        "tigon.train.trainer:train_steps": STEPS,
        "tigon.train.trainer:save": SAVE,
        "tigon.train.trainer:evaluate_once": EVALUATION,
        "tigon.train.trainer:export": SAVE,
        "tigon.train.trainer:finish": SAVE,
    },
    "TRL": {
        "datasets:load_dataset": DATA,
        "trl:SFTTrainer._prepare_dataset": DATA,
        "trl.trainer.sft_trainer:create_model_from_path": MODEL,
        "trl:SFTTrainer.__init__": MODEL,
        "trl:SFTTrainer.train": STEPS,
        "trl:SFTTrainer._save_checkpoint": SAVE,
        "trl:SFTTrainer.evaluate": EVALUATION,
        "trl:SFTTrainer.save_model": SAVE,
    },
}


@dataclass(frozen=True)
class Request:
    """What a side is asked to do."""

    library: str  # a key of SIDES
    began: float  # when its process was started, by time.monotonic
    model: str
    data: str
    eval_data: str
    run_dir: str
    length: int  # tokens of a row
    rows: int  # in a step, and in one forward
    steps: int
    lr: float
    rank: int = 0  # of adapters of all projections; 0: all weights are trained
    experts: bool = False  # whether the model has some
    checkpointing: bool = False  # the peer's activation checkpointing
    attention: str = ""  # the peer's
    tiny: bool = False


class Timed:
    """A function with the clock around its calls; whatever else it has stays."""

    def __init__(self, function: Any, clock: "Clock", phase: str) -> None:
        self.function, self.clock, self.phase = function, clock, phase

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter(self.phase)
        if self.phase == COMPILE:
            self.clock.note_compilation(*args)
        try:
            return self.function(*args, **kwargs)
        finally:
            self.clock.leave()

    def __getitem__(self, options: Any) -> Any:  # cute.compile[options](...)
        return Timed(self.function[options], self.clock, self.phase)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __get__(self, owner: Any, kind: Any = None) -> Any:  # a method, as functions are
        return self if owner is None else partial(self, owner)


class Clock:
    """Seconds of each phase, and when optimizer steps end."""

    def __init__(self, began: float) -> None:
        self.phases, self.last = [START], began
        self.seconds, self.ends, self.said = Counter[str](), list[float](), began
        self.compiled: list[tuple[int, str]] = []  # steps before, and what of, once there are some

    def turn(self) -> None:
        """Gives the time since the last turn to the phase that it was in."""
        now = time.monotonic()
        self.seconds[self.phases[-1]] += now - self.last
        self.last = now

    def say(self) -> None:
        """Tells how far it is, on a line of its own: bars of progress do not end theirs."""
        found = {"phases": dict(self.seconds), "phase": self.phases[-1], "steps": len(self.ends)}
        print(f"\n{json.dumps({'kind': 'clock', **found})}", flush=True)
        self.said = self.last

    def enter(self, phase: str) -> None:
        self.turn()
        self.phases.append(phase)
        self.say()

    def leave(self) -> None:
        self.turn()
        self.phases.pop()
        if self.phases == [START]:  # what is between the others is not the start
            self.phases = [OTHER]
        self.say()

    def note_compilation(self, source: Any = None, *_: Any) -> None:
        """Notes a kernel that is compiled after the first step, which holds up its own."""
        if self.ends:
            names = (getattr(source, name, None) for name in ("name", "__name__"))
            self.compiled.append((len(self.ends), next(filter(None, names), type(source).__name__)))

    def watch(self, path: str, phase: str) -> None:
        """Puts the clock around a function, `module:name` or `module:Class.name`."""
        module, _, name = path.partition(":")
        owner: Any = import_module(module)
        *classes, name = name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        setattr(owner, name, Timed(getattr(owner, name), self, phase))

    def step(self, *_: Any) -> None:
        """Notes the end of an optimizer step; the first is complete on the device."""
        import torch

        if not self.ends and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.monotonic())
        if self.ends[-1] > self.said + SILENCE:
            self.turn()
            self.say()

    def start(self, library: str) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        for path, phase in CLOCKS[library].items():
            self.watch(path, phase)
        for path in COMPILERS:
            with suppress(ImportError):
                self.watch(path, COMPILE)
        register_optimizer_step_post_hook(self.step)


def tigon(request: Request, clock: Clock) -> Record:
    """`tigon train` with what a new user must say, and bf16 weights and states as the peer has; of
    an adapter both have float32 by default."""
    command: Any = import_module("tigon.cli.main")
    command._import_interruptibly("tigon.train")  # as the command does, before the clocks
    launch: Any = import_module("tigon.train.launch")
    clock.start("tigon")
    runs: list[Any] = []
    train = launch.train
    launch.train = lambda run: (runs.append(run), train(run))[1]
    values = {
        "model": request.model,
        "data": request.data,
        "eval_data": request.eval_data,
        "run_dir": request.run_dir,
        "seq_len": request.length,
        "batch_size": request.rows,
        "steps": request.steps,
        "lr": request.lr,
    }
    if request.rank:
        values["lora"] = f"{{rank: {request.rank}, alpha: {2 * request.rank}}}"
    else:
        values |= {"param_dtype": "bfloat16", "optimizer": "adamw_bf16"}
    if status := command.main(["train", *(f"{key}={value}" for key, value in values.items())]):
        raise SystemExit(status)
    (run,) = runs
    counts = [run.data.counts(step) for step in range(request.steps)]
    lines = Path(request.run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        "tokens": sum(count[0] for count in counts),
        "learned": sum(count[1] for count in counts),
        "eval_loss": next(row["eval_loss"] for row in rows if "eval_loss" in row),
        "evaluated": run.eval_data.targets,
        "command": f"tigon train {' '.join(f'{k}={v}' for k, v in values.items())}",
    }


def trl(request: Request, clock: Clock) -> Record:
    """SFTTrainer with packing and Liger, attention by variable lengths, its data by all cores.

    Of a mixture it has transformers' grouped products: Liger's experts try hundreds of launches for
    each shape, which takes longer than the run. Adapters are those of attention there, as Tigon's
    all-linear has them: PEFT's would have routers and experts, too."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from bench.varlen import VARLEN, register_varlen

    if request.attention == VARLEN:
        register_varlen()
    clock.start("TRL")
    counts: list[Any] = []
    training_step = SFTTrainer.training_step

    def counted(self: Any, model: Any, inputs: Record, *rest: Any, **more: Any) -> Any:
        counts.append((inputs["input_ids"].numel(), (inputs["labels"] != -100).sum()))
        return training_step(self, model, inputs, *rest, **more)

    SFTTrainer.training_step = counted  # type: ignore[method-assign]
    files = {"train": request.data, "eval": request.eval_data}
    data: Any = datasets.load_dataset("json", data_files=files)
    how: Record = {} if request.tiny else {"attn_implementation": request.attention}
    arguments = SFTConfig(
        output_dir=request.run_dir,
        max_steps=request.steps,
        max_length=request.length,
        per_device_train_batch_size=request.rows,
        per_device_eval_batch_size=request.rows,
        learning_rate=request.lr,
        packing=True,
        assistant_only_loss=True,
        use_liger_kernel=not request.tiny,
        liger_kernel_config={"swiglu": False} if request.experts else None,
        bf16=not request.tiny,
        use_cpu=request.tiny,
        gradient_checkpointing=request.checkpointing,
        model_init_kwargs={"dtype": "bfloat16", **how},
        dataset_num_proc=len(os.sched_getaffinity(0)),
        report_to="none",
    )
    adapter: Any = None
    if request.rank:
        from peft import LoraConfig

        attention = [f"{name}_proj" for name in "qkvo"]
        adapter = LoraConfig(
            r=request.rank,
            lora_alpha=2 * request.rank,
            target_modules=attention if request.experts else "all-linear",
        )
    trainer = SFTTrainer(
        model=request.model,
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        peft_config=adapter,
    )
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(str(Path(request.run_dir, "final")))
    kernels = "Liger, " if arguments.use_liger_kernel else ""
    return {
        "tokens": sum(count for count, _ in counts),
        "learned": sum(int(count) for _, count in counts),
        "eval_loss": found["eval_loss"],
        "command": f"SFTTrainer: {kernels}{trainer.model.config._attn_implementation}",
    }


SIDES = {"tigon": tigon, "TRL": trl}


def figures(clock: Clock, request: Request) -> Record:
    """What the clock says, and the memory."""
    import torch

    gaps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    found: Record = {
        "phases": {phase: clock.seconds[phase] for phase in PHASES},
        "first_step": clock.ends[0] - request.began,
        "gaps": [round(gap, 5) for gap in gaps],
        "steps": len(clock.ends),
        "compiled": clock.compiled,
    }
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return found


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    clock = Clock(request.began)
    found = SIDES[request.library](request, clock)
    clock.turn()
    size = sum(f.stat().st_size for f in Path(request.run_dir).rglob("*") if f.is_file())
    print()
    print(json.dumps({"kind": "side", **found, **figures(clock, request), "written": size}))
    if request.library == "tigon":
        import_module("tigon.cli.main").end(0)  # as the command ends


if __name__ == "__main__":
    main()
