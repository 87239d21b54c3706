"""Answers that share a prompt, as exact in bf16 as answers behind copies of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from bench.train_cases import LLAMA_8B
from tests.gpu.attention import need
from tigon import LoraConfig
from tigon.kernels import use
from tigon.kernels.loss.terms import LogProbs

pytestmark = pytest.mark.gpu
VOCAB, DEVICE = 8192, "cuda"
# Tokens of a prompt and of both answers: the batch of bench/preference.py
PAIRS = [(180, 106, 455), (56, 157, 199), (108, 358, 243), (350, 671, 294)]


def model(dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    values = LLAMA_8B | {"num_hidden_layers": 4, "vocab_size": VOCAB, "tie_word_embeddings": False}
    made = tigon.Llama.from_config(values, dtype=torch.bfloat16, device=DEVICE).train()
    made.add_adapter(LoraConfig(rank=16, alpha=32), **options)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.normal_(std=0.02)
    return made.to(dtype)


def row(*, shared: bool, pairs: list[Any] = PAIRS) -> tuple[dict[str, Any], Tensor]:
    """What the model takes of all pairs; of each token, 1 if it is of a chosen answer and -1 if of
    a rejected one."""
    draw = torch.Generator().manual_seed(1)
    ids, positions, prefixes, signs = [], [], [], []
    end = 0
    for prompt, *answers in pairs:
        text, begin = torch.randint(VOCAB, (prompt,), generator=draw), end
        for sign, size in zip((1, -1), answers, strict=True):
            before = prompt - 1 if shared and sign < 0 else 0
            ids += [text[before:], torch.randint(VOCAB, (size,), generator=draw)]
            positions.append(torch.arange(before, prompt + size))
            prefixes.append([begin, begin + before])
            signs += [torch.zeros(prompt - before), torch.full((size,), float(sign))]
            end += prompt - before + size
    lengths, row, sign = torch.tensor([len(x) for x in positions]), torch.cat(ids), torch.cat(signs)
    given = {
        "input_ids": row[None],
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens": F.pad(lengths.cumsum(0), (1, 0)).int(),
        "labels": torch.where(sign != 0, row, -100)[None],
    }
    given = {name: x.to(DEVICE) for name, x in given.items()}
    given["max_length_q"] = int(lengths.max())
    if shared:
        given["prefixes"] = torch.tensor(prefixes)
    return given, sign.to(DEVICE)


def found(model: Any, *, shared: bool) -> dict[str, Tensor]:
    """Log-probabilities of both kinds of answers with adapters and without, gradients of the sum of
    the former less that of the latter."""
    given, sign = row(shared=shared)
    of_next = F.pad(sign[1:], (0, 1))
    how: dict[str, Any] = {"criteria": (LogProbs(),), "metrics": (), "return_logits": False}
    with torch.no_grad(), model.adapters_disabled():
        base = model(**given, **how).logprobs[0]
    own = model(**given, **how).logprobs[0]
    model.zero_grad()
    (own * of_next).sum().backward()
    values = {}
    for name, kind in (("chosen", 1), ("rejected", -1)):
        values |= {name: own[of_next == kind], f"{name}, base": base[of_next == kind]}
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {name: x.detach().double() for name, x in (values | grads).items()}


@pytest.mark.parametrize("backend", ["fa4", "flash"])
def test_shared_prompts_are_as_exact_as_copies(backend: str) -> None:
    need(backend)
    made = model(torch.bfloat16)
    made.attention = backend
    once, twice = (found(made, shared=shared) for shared in (True, False))
    with use("reference"):
        truth = found(model(torch.float32), shared=False)
    for name, exact in truth.items():
        wrong, bound = ((x[name] - exact).norm() for x in (once, twice))
        assert exact.norm() > 0 and wrong <= 1.5 * bound, f"{name}: {wrong:.3g}, twice {bound:.3g}"
    for name in ("chosen", "rejected", "chosen, base", "rejected, base"):
        # Of a few tokens that are wrong: the errors of bf16 are all alike
        worst, bound = ((x[name] - truth[name]).abs().max() for x in (once, twice))
        assert worst <= 2 * bound, f"{name}: a token is off by {worst:.3g}, twice by {bound:.3g}"
