"""One side of bench/distillation.py in a process of its own: prints its figures as JSON lines.

python -m bench.distillation_side '{"side": "tigon"}'   # see Request

# T tokens, C and D model dims of student and teacher, V vocab
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from bench.compare_side import LLAMA_1B, TINY, laps
from bench.harness import Record, progress
from bench.peers import imported, wide
from bench.preference_side import WORDS, write_tokenizer
from bench.processes import say
from bench.timing import GIB, MIB, peak_mib, peaks, reset_peaks
from bench.train_cases import ADAM, LLAMA_8B, fill, fill_ours
from bench.train_peer import Options, peer_model
from bench.train_side import free, guarded
from tigon.kernels import linear_kl
from tigon.train import load, start
from tigon.train.build import build_run, read_inputs
from tigon.train.model import apply_model_settings
from tigon.train.optim import build_optimizer
from tigon.train.trainer import forward_backward, update_weights

OURS, FORMULA = "tigon", "transformers + Liger, formula on logits"
FUSED, CHUNKED = "transformers + Liger, LigerFusedLinearJSD", "LigerFusedLinearJSDLoss"
DIVERGENCES = {"KL(teacher || student)": 0.0, "KL(student || teacher)": 1.0, "JSD": 0.5}
TOKENS, TINY_TOKENS, CLIP = 4096, 48, 1.0
FIRST = 3  # steps that are not timed: they compile and tune, and make states
TEMPLATE = (
    "{% for m in messages %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Request:
    """What a process is asked to measure."""

    side: str  # OURS, or "peers": all others
    liger: bool = True  # whether it is installed
    steps: int = 6  # that are timed
    tiny: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def tokens(self) -> int:
        return TINY_TOKENS if self.tiny else TOKENS

    def shapes(self) -> tuple[Record, Record]:
        """The config.json of student and teacher."""
        small = TINY if self.tiny else {}
        student, teacher = (
            shape | {key: small[key] for key in small if key in shape} | {"eos_token_id": 1}
            for shape in (LLAMA_1B, LLAMA_8B)
        )
        if self.tiny:  # so that a mistake of one for the other is noticed
            teacher |= {"hidden_size": 2 * small["hidden_size"]}
        return student, teacher

    def ids(self) -> list[int]:
        """The row: words, and eos."""
        words = min(WORDS, self.shapes()[0]["vocab_size"])
        return [*random.Random(0).choices(range(2, words), k=self.tokens - 1), 1]


Head = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def our_head(x: Tensor, w: Tensor, y: Tensor, v: Tensor, beta: float) -> Tensor:
    return linear_kl(x, w, y, v, beta=beta, denominator=float(len(x)))


def formula(x: Tensor, w: Tensor, y: Tensor, v: Tensor, beta: float) -> Tensor:
    """x [T, C], w [V, C] of the student, y [T, D], v [V, D] of the teacher: GKD's divergence, as
    TRL's GKDTrainer has it, in fp32 of bf16 logits."""
    student = F.log_softmax(wide(x @ w.T), -1)
    with torch.no_grad():
        teacher = F.log_softmax(wide(y @ v.T), -1)
    if beta in (0, 1):
        ends = (student, teacher) if beta == 0 else (teacher, student)
        return kl_div(*ends) / len(x)
    weights = torch.tensor([1 - beta, beta], device=x.device).log()
    mixture = torch.logsumexp(torch.stack([student + weights[0], teacher + weights[1]]), dim=0)
    both = beta * kl_div(mixture, teacher) + (1 - beta) * kl_div(mixture, student)
    return both / len(x)


def kl_div(q: Tensor, p: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities, summed."""
    return F.kl_div(q, p, reduction="sum", log_target=True)


def fused(x: Tensor, w: Tensor, y: Tensor, v: Tensor, beta: float) -> Tensor:
    make: Any = imported("liger_kernel.transformers:LigerFusedLinearJSD")
    return make(jsd_beta=beta)(x, w, y, v, None)


def chunked(x: Tensor, w: Tensor, y: Tensor, v: Tensor, beta: float) -> Tensor:
    make: Any = imported("liger_kernel.chunked_loss:LigerFusedLinearJSDLoss")
    loss = make(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=x.is_cuda)
    return loss(x, w, y, v, torch.zeros(len(x), dtype=torch.long, device=x.device))


HEADS: dict[str, Head] = {OURS: our_head, FORMULA: formula, FUSED: fused, CHUNKED: chunked}


def head_alone(head: Head, beta: float, request: Request) -> Record:
    """Forward and backward, given the last hidden states of both models."""
    draw = torch.Generator(request.device).manual_seed(0)

    def made(*shape: int, std: float = 1.0) -> Tensor:
        empty = torch.empty(*shape, device=request.device, dtype=torch.bfloat16)
        return empty.normal_(std=std, generator=draw)

    student, teacher = request.shapes()
    count, vocab = request.tokens - 1, student["vocab_size"]
    x = made(count, student["hidden_size"]).requires_grad_()
    w = made(vocab, student["hidden_size"], std=0.02).requires_grad_()
    y, v = made(count, teacher["hidden_size"]), made(vocab, teacher["hidden_size"], std=0.02)

    def run() -> Tensor:
        x.grad = w.grad = None
        loss = head(x, w, y, v, beta)
        loss.backward()
        return loss.detach()

    loss = float(run())
    assert x.grad is not None and w.grad is not None
    row = {"loss": loss, "gradient_norm": float(x.grad.float().norm())}
    laps(run, 2)
    times = laps(run, 2 if request.tiny else 10)
    kept = x.grad.nbytes + w.grad.nbytes
    x.grad = w.grad = None
    free()
    more = peak_mib(run) * MIB - kept
    return row | {"ms": median(times), "gib": more / GIB if x.is_cuda else None}


def steps(step: Callable[[], tuple[float, float]], request: Request) -> Record:
    """Whole steps: the loss and gradients' norm of the first one, and milliseconds."""
    loss, norm = step()
    reset_peaks()
    for _ in range(FIRST - 1):
        step()
    times = laps(step, request.steps)
    row = {"loss": loss, "gradient_norm": norm, "ms": median(times)}
    row |= {"ms_least": min(times), "ms_most": max(times)}
    return row | peaks()


def write_row(directory: Path, request: Request) -> None:
    """A conversation of one row; config.json of both, and a tokenizer of a token a word."""
    for name, shape in zip(("student", "teacher"), request.shapes(), strict=True):
        (directory / name).mkdir()
        write_tokenizer(directory / name, min(WORDS, shape["vocab_size"]), TEMPLATE)
        (directory / name / "config.json").write_text(json.dumps(shape))
    content = " ".join(f"w{i}" for i in request.ids()[:-1])
    row = {"messages": [{"role": "assistant", "content": content}]}
    (directory / "chat.jsonl").write_text(json.dumps(row) + "\n")


def our_steps(request: Request) -> Iterator[tuple[str, Record]]:
    """The trainer's own steps; models whose weights are drawn instead of read."""
    student_shape, teacher_shape = request.shapes()
    options: Any = {"dtype": torch.bfloat16, "device": request.device}
    teacher = tigon.Llama.from_config(teacher_shape, **options)
    fill_ours(teacher)
    teacher.requires_grad_(False).eval()
    with tempfile.TemporaryDirectory() as name, start(request.device) as world:
        directory = Path(name)
        write_row(directory, request)
        values = {"task": "distill", "model": directory / "student"}
        values |= {"teacher": directory / "teacher", "data": directory / "chat.jsonl"}
        values |= {"run_dir": directory / "run", "train_on": "all"}
        values |= {"seq_len": request.tokens, "batch_size": 1, "max_grad_norm": CLIP}
        values |= {"lr": ADAM["lr"], "beta1": ADAM["betas"][0], "beta2": ADAM["betas"][1]}
        values |= {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0, "steps": 999}
        values |= {"optimizer": "adamw_bf16", "param_dtype": "bfloat16"}
        values["activation_checkpointing"] = "false"
        config = load(None, [f"{key}={value}" for key, value in values.items()])
        inputs = read_inputs(config, world)
        config = inputs.config
        student = apply_model_settings(tigon.Llama.from_config(student_shape, **options), config)
        teacher.use_attention(config.attention)
        objective: Any = inputs.task
        objective.teacher = teacher
        for label, beta in DIVERGENCES.items():
            progress(f"{OURS}: {label}")
            objective.beta = beta
            fill_ours(student)
            optimizer = build_optimizer(student, config)
            run = build_run(inputs, world, student, optimizer, None)
            count = iter(range(config.steps))

            def step(run: Any = run, count: Iterator[int] = count) -> tuple[float, float]:
                number = next(count)
                values, scale = forward_backward(run, number)
                update_weights(run, number, scale)
                run.optimizer.zero_grad()
                return values["loss"], values["grad_norm"]

            with run.prefetcher:
                [rows] = run.prefetcher(0)
                assert rows.input_ids.flatten().tolist() == request.ids()  # the peers' row
                yield label, guarded(lambda s=step: steps(s, request))
            del optimizer, run, step
            free()


def their_steps(request: Request) -> Iterator[tuple[str, str, Record]]:
    """transformers' models with Liger's kernels in the layers, torch's fused AdamW, and a head."""
    students, teachers = request.shapes()
    attention = Options("sdpa" if request.tiny else best_attention(request))
    teacher = peer_model(teachers, "llama", attention, request.device, request.liger)
    teacher.requires_grad_(False).eval()
    student = peer_model(students, "llama", attention, request.device, request.liger).train()
    ids = torch.tensor([request.ids()], device=request.device)
    for side in (FORMULA, FUSED) if request.liger else (FORMULA,):
        for label, beta in DIVERGENCES.items():
            progress(f"{side}: {label}")
            fill(student.named_parameters())
            optimizer = torch.optim.AdamW(student.parameters(), fused=True, **ADAM)

            def step(
                optimizer: Any = optimizer, head: Head = HEADS[side], beta: float = beta
            ) -> tuple[float, float]:
                with torch.no_grad():
                    y = teacher.model(ids).last_hidden_state[0, :-1]
                x = student.model(ids).last_hidden_state[0, :-1]
                loss = head(x, student.lm_head.weight, y, teacher.lm_head.weight, beta)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(student.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                found = torch.stack([loss.detach().float(), norm.float()]).tolist()
                return found[0], found[1]

            yield side, label, guarded(lambda s=step: steps(s, request))
            del optimizer, step
            free()


def best_attention(request: Request) -> str:
    """flash-attn-4, where transformers can use it: one block of the teacher tries."""
    shape = request.shapes()[1] | {"num_hidden_layers": 1, "vocab_size": 64}
    name = "flash_attention_4"

    def tries() -> Record:
        model = peer_model(shape, "llama", Options(name), request.device, request.liger)
        ids = torch.zeros(1, 256, dtype=torch.long, device=request.device)
        model.model(ids).last_hidden_state.sum().backward()
        return {}

    row = guarded(tries)
    say("attention", name="sdpa" if row else name, **row)
    free()
    return "sdpa" if row else name


def main(text: str) -> None:
    request = Request(**json.loads(text))
    ours = request.side == OURS
    if ours:
        for label, row in our_steps(request):
            say("step", side=OURS, divergence=label, **row)
    else:
        if not request.tiny:
            logging: Any = imported("transformers:logging")
            logging.set_verbosity_error()
        for side, label, row in their_steps(request):
            say("step", side=side, divergence=label, **row)
    free()
    # Last of all CHUNKED, which torch.compile takes some time for
    for side in (OURS,) if ours else (FORMULA, FUSED, CHUNKED):
        if side in (FUSED, CHUNKED) and not request.liger:
            continue
        for label, beta in DIVERGENCES.items():
            progress(f"head alone, {side}: {label}")
            row = guarded(lambda s=side, b=beta: head_alone(HEADS[s], b, request))
            say("head", side=side, divergence=label, **row)
            free()


if __name__ == "__main__":
    main(sys.argv[1])
