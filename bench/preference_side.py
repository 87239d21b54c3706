"""One side of bench/preference.py in a process of its own: prints its figures as JSON lines.

python -m bench.preference_side '{"side": "tigon"}'   # see Request

# P pairs of a step
"""

import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import NormalDist, median
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel

import tigon
from bench.compare_side import TINY
from bench.harness import Record, progress
from bench.peers import imported
from bench.processes import say
from bench.timing import GIB, allocated, peaks
from bench.train_cases import ADAM, LLAMA_8B, fill, fill_ours
from bench.train_peer import Options, peer_model
from bench.train_side import free, guarded
from tigon.settings.config import Config
from tigon.train import load, start
from tigon.train.build import build_run, read_inputs
from tigon.train.model import add_lora, apply_model_settings
from tigon.train.optim import build_optimizer
from tigon.train.tasks.preference import PairTask
from tigon.train.trainer import forward_backward, open_task, update_weights

OURS, TWICE, PEER = "tigon", "tigon, prompts twice", "TRL + PEFT + Liger"
HALF = "tigon, micro-batches of 2"  # pairs, in two rows
EXACT = "tigon, float32"  # whose first step the others are compared with
PAIRS, LONGEST, RANK, BETA, CLIP = 4, 1024, 16, 0.1, 1.0
PROMPT, ANSWER = (192, 0.8), (320, 0.6)  # mean and spread of the lognormal lengths, in tokens
WORDS, EOS, PAD = 2000, "</s>", "<pad>"  # the tokens that occur
FIRST = 2  # steps that are not timed: they compile and tune
LOGGED = ("rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")


@dataclass(frozen=True)
class Request:
    """What a process is asked to measure."""

    side: str
    liger: bool = True  # whether it is installed
    steps: int = 5  # that are timed
    tiny: bool = False


@dataclass(frozen=True)
class Way:
    """How TRL is set up."""

    attention: str
    pairs: int  # of a micro-batch; a step has PAIRS

    @property
    def name(self) -> str:
        return f"{self.attention}, micro-batches of {self.pairs}"


def lengths(tiny: bool) -> list[tuple[int, int, int]]:
    """Tokens of the prompt, and of both answers with their eos, of each pair.

    Both are at equally likely quantiles of their distributions, in an order drawn once: so few
    pairs are not a lucky draw, and a prompt with its answer has at most LONGEST tokens.
    """
    scale = 24 if tiny else 1

    def quantiles(mean: int, spread: float, count: int) -> list[int]:
        normal = NormalDist(math.log(mean / scale) - spread**2 / 2, spread)
        return [max(2, round(math.exp(normal.inv_cdf((i + 0.5) / count)))) for i in range(count)]

    draw = random.Random(0)
    prompts, answers = quantiles(*PROMPT, PAIRS), quantiles(*ANSWER, 2 * PAIRS)
    draw.shuffle(prompts)
    draw.shuffle(answers)
    return list(zip(prompts, answers[::2], answers[1::2], strict=True))


def write_tokenizer(directory: Path, words: int, template: str | None = None) -> list[str]:
    """A token a word; returns those that are no special tokens."""
    vocabulary = {PAD: 0, EOS: 1} | {f"w{i}": i for i in range(2, words)}
    made = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([PAD, EOS])
    made.save(str(directory / "tokenizer.json"))
    names = {"eos_token": EOS, "pad_token": PAD, "tokenizer_class": "PreTrainedTokenizerFast"}
    names |= {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return [*vocabulary][2:]


def write_inputs(directory: Path, tiny: bool) -> Record:
    """The rows, a tokenizer and config.json; returns the latter."""
    words = write_tokenizer(directory, TINY["vocab_size"] if tiny else WORDS)
    shape = LLAMA_8B | ({key: TINY[key] for key in TINY if key in LLAMA_8B} if tiny else {})
    shape |= {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(shape))
    draw = random.Random(1)

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    with (directory / "pairs.jsonl").open("w") as file:
        for prompt, chosen, rejected in lengths(tiny):
            row = {"prompt": text(prompt), "chosen": f" {text(chosen - 1)}"}
            file.write(json.dumps(row | {"rejected": f" {text(rejected - 1)}"}) + "\n")
    return shape


class Clock:
    """When each step ended, by the device's clock if it has one, and the peak memory since the
    first step, which makes the optimizer's states."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()
        if len(self.marks) == 1:
            torch.cuda.reset_peak_memory_stats()

    def found(self) -> Record:
        ends = self.marks[FIRST - 1 :]
        if self.cuda:
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in pairwise(ends)]
        else:
            times = [1e3 * (b - a) for a, b in pairwise(ends)]
        row = {"ms": median(times), "ms_least": min(times), "ms_most": max(times)}
        row["steps"] = len(times)
        return row | peaks()


def settings(directory: Path, steps: int, tiny: bool, side: str = OURS) -> Config:
    """Of tigon.train: bf16 weights and states, as the peer has, unless EXACT; each step has all
    pairs, in one row without padding or in two of nearly the same length. Where a prompt is
    computed once, its last token is there twice."""
    exact, rows = side == EXACT, 2 if side == HALF else 1
    twice = exact or side == TWICE
    each = [(2 * p if twice else p + 1) + a + b for p, a, b in lengths(tiny)]
    room = min(max(sum(some), sum(each) - sum(some)) for some in combinations(each, PAIRS // rows))
    values = {"task": "dpo", "model": directory, "data": directory / "pairs.jsonl"}
    values |= {"run_dir": directory / "run", "seq_len": room, "max_length": LONGEST}
    values |= {"batch_size": rows, "micro_batch_size": 1, "steps": steps}
    values |= {"beta": BETA, "max_grad_norm": CLIP}
    values |= {"lr": ADAM["lr"], "beta1": ADAM["betas"][0], "beta2": ADAM["betas"][1]}
    values |= {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0}
    dtype = "float32" if exact else "bfloat16"
    values |= {"optimizer": "adamw_bf16", "param_dtype": dtype, "dtype": dtype}
    values |= {"activation_checkpointing": str(exact).lower()}
    values |= {"lora.rank": RANK, "lora.alpha": 2 * RANK}
    return load(None, [f"{key}={value}" for key, value in values.items()])


def ours(request: Request, directory: Path, device: str) -> Record:
    """The trainer's own steps, over a model whose weights are drawn instead of read."""
    shape = write_inputs(directory, request.tiny)
    exact = request.side == EXACT
    steps = 1 if exact else FIRST + request.steps
    config = settings(directory, steps, request.tiny, request.side)
    with start(device) as world:
        with patch.object(PairTask, "one_prompt", request.side in (OURS, HALF)):
            inputs = read_inputs(config, world)
        dtype = torch.float32 if exact else torch.bfloat16
        made = tigon.Llama.from_config(shape, dtype=dtype, device=device)
        add_lora(made, config)
        fill_ours(made)
        model = apply_model_settings(made, config)
        inputs.check_model(model)
        optimizer = build_optimizer(model, config)
        run = build_run(inputs, world, model, optimizer, None)
        with patch("tigon.train.reference.model_digest", lambda config: "drawn"):  # no files
            open_task(run)
        free()
        weights, clock, first = allocated() / GIB, Clock(device), {}
        with run.prefetcher:
            for step in range(config.steps):
                values, scale = forward_backward(run, step)
                update_weights(run, step, scale)
                run.optimizer.zero_grad()
                first = first or {name: values[name] for name in ("loss", "grad_norm", *LOGGED)}
                clock.mark()
    timed = {} if exact else clock.found()
    return {"first": first, "weights_gib": weights, **timed}


def theirs(request: Request, directory: Path, device: str, way: Way) -> Record:
    """TRL's DPOTrainer as it is, with its adapters in bf16 as the base is: its own choice of
    float32 is slower."""
    shape = write_inputs(directory, request.tiny)
    (directory / "config.json").unlink()  # the model is given
    datasets: Any = imported("datasets:Dataset")
    imported("datasets:disable_progress_bars")()
    read: Any = imported("transformers:AutoTokenizer")
    chosen: Any = imported("peft:LoraConfig")(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peer_model(shape, "llama", Options(way.attention), device, liger=False)
    rows = [json.loads(line) for line in (directory / "pairs.jsonl").open()]
    clock = Clock(device)
    trainer: Any = imported("trl:DPOTrainer")(
        model=model,
        args=arguments(request, directory, way),
        train_dataset=datasets.from_list(rows),
        processing_class=read.from_pretrained(directory),
        peft_config=chosen,
        callbacks=[marking(clock)],
    )
    trained = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    for _, parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)
    fill((name.removeprefix("base_model.model."), p) for name, p in trained)
    weights = allocated() / GIB
    trainer.train()
    logged = next(row for row in trainer.state.log_history if "loss" in row)
    first = {name: logged[name] for name in ("loss", "grad_norm", *LOGGED)}
    return {"first": first, "weights_gib": weights, **clock.found()}


def arguments(request: Request, directory: Path, way: Way) -> Any:
    make: Any = imported("trl:DPOConfig")
    return make(
        output_dir=str(directory / "trl"),
        max_steps=FIRST + request.steps,
        per_device_train_batch_size=way.pairs,
        gradient_accumulation_steps=PAIRS // way.pairs,
        max_length=LONGEST,
        beta=BETA,
        learning_rate=ADAM["lr"],
        adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1],
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        bf16=False,  # the weights are bf16: there is nothing to cast
        gradient_checkpointing=False,
        use_liger_kernel=request.liger,
        use_cpu=request.tiny,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def marking(clock: Clock) -> Any:
    base: Any = imported("transformers:TrainerCallback")

    class Marks(base):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.mark()

    return Marks()


def ways(tiny: bool, attention: str | None = None) -> list[Way]:
    """TRL's settings to try: each attention, and then its best one with smaller micro-batches,
    which have less padding. Its padding-free batches are withdrawn in 1.16."""
    if attention is not None:
        return [Way(attention, PAIRS // 2), Way(attention, 1)]
    return [Way(name, PAIRS) for name in (("sdpa",) if tiny else ("flash_attention_4", "sdpa"))]


def try_all(request: Request, device: str) -> None:
    """TRL with each of its settings; smaller micro-batches with the attention that was faster."""
    found: dict[str, float] = {}
    for attention in (False, True):
        if attention and not found:
            return
        best = min(found, key=found.__getitem__) if attention else None
        for way in ways(request.tiny, best):
            progress(f"{PEER}: {way.name}")
            row = guarded(lambda w=way: alone(request, device, w))
            say("tried", name=way.name, pairs=way.pairs, **row)
            if "ms" in row:
                found[way.attention] = row["ms"]


def alone(request: Request, device: str, way: Way | None) -> Record:
    """Figures of a model that is made for them, and freed after them."""
    free()
    left, began = allocated() / 2**20, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        if way is None:
            row = ours(request, Path(directory), device)
        else:
            row = theirs(request, Path(directory), device, way)
    return {"left_mib": left, **row, "seconds": time.perf_counter() - began}


def main(text: str) -> None:
    request = Request(**json.loads(text))
    if not request.tiny:
        logging: Any = imported("transformers:logging")
        logging.set_verbosity_error()
    device = "cpu" if request.tiny else "cuda"
    if request.side == PEER:
        try_all(request, device)
        return
    progress(request.side)
    say("side", **guarded(lambda: alone(request, device, None)))


if __name__ == "__main__":
    main(sys.argv[1])
