"""A low-rank adapter of the head and of the embedding, against merged weights in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon.kernels
from tests.layers.test_head import HEADS, B, C, T, V, inputs, make_head, plain_logits
from tigon.kernels import KL, CrossEntropy, LogProbs, kl_ref
from tigon.layers import Adapters, Embedding, LMHead, LoRAPart, LowRank, LowRankEmbedding

R, SCALE = 5, 1.7


def adapted(head: LMHead, *, frozen: bool = True) -> LowRank:
    low = LowRank(C, [LoRAPart("lm_head", 0, V, R, SCALE)], dtype=torch.float32, device="cpu")
    for p in low.parameters():
        nn.init.normal_(p, std=0.3)
    head.requires_grad_(not frozen)
    head.lora = Adapters()
    head.lora.add_module("it", low)
    head.lora.chosen = "it"
    return low


def merged_logits(hidden: Tensor, head: LMHead, low: LowRank, options: dict[str, Any]) -> Tensor:
    delta = F.linear(hidden.double(), low.lora_A.double()) @ low.lora_B_lm_head.double().t()
    bias = None if head.bias is None else head.bias.double()
    raw = F.linear(hidden.double(), head.weight.double(), bias) + SCALE * delta
    z, cap = raw * options.get("logit_scale", 1.0), options.get("softcap")
    return z if cap is None else cap * torch.tanh(z / cap)


def expected_of(z: Tensor, criteria: list[Any], targets: Tensor, teacher: Tensor) -> list[Tensor]:
    real, found = targets != -100, []
    losses = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="none").view(B, T)
    for c in criteria:
        if isinstance(c, KL):
            found.append(kl_ref(z.log_softmax(-1), teacher, c.beta) * real)
        else:
            found.append(losses if isinstance(c, CrossEntropy) else -losses)
    return found


KINDS: dict[str, tuple[str, ...]] = {
    "sum": ("ce",),
    "rows": ("ce rows",),
    "log-probabilities": ("logprobs",),
    "sums": ("ce", "kl"),
    "mixed": ("ce", "kl", "logprobs"),
}


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 10_000])
@pytest.mark.parametrize("path", ["reference", pytest.param("triton", marks=pytest.mark.kernel)])
def test_criteria_and_gradients(options: dict[str, Any], kind: str, rows: int, path: str) -> None:
    if path == "triton" and options not in (HEADS["plain"], HEADS["all"]):
        return
    head = make_head(**options)
    head.logits_bytes = (16 if path == "reference" else 4 * 192 // V + 1) * V * rows
    low = adapted(head, frozen=kind != "mixed")
    hidden, targets, _ = inputs()
    teacher, states = make_head(), torch.randn(B, T, C)
    every = {
        "ce": CrossEntropy(targets=targets),
        "ce rows": CrossEntropy(targets=targets, reduction="none"),
        "logprobs": LogProbs(targets=targets),
        "kl": KL(targets=targets, teacher_hidden=states, teacher=teacher, beta=0.3),
    }
    criteria = [every[name] for name in KINDS[kind]]
    z = merged_logits(hidden, head, low, options)
    of_teacher = plain_logits(states, teacher, None, 1.0).detach().log_softmax(-1)
    upstream = torch.randn(B, T)
    found = []
    with tigon.kernels.use(path):
        for value, _ in head(hidden, criteria).values:
            found.append(value.sum() if value.dim() == 0 else (value * upstream).sum())
    expected = [
        x.sum() if value.dim() == 0 else (x * upstream).sum()
        for x, value in zip(
            expected_of(z, criteria, targets, of_teacher),
            [torch.zeros(()) if name in ("ce", "kl") else upstream for name in KINDS[kind]],
            strict=True,
        )
    ]
    torch.testing.assert_close(sum(found).double(), sum(expected), rtol=1e-5, atol=1e-5)
    learned = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    with tigon.kernels.use(path):
        actual = torch.autograd.grad(sum(found), learned)
    for a, b in zip(actual, torch.autograd.grad(sum(expected), learned), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_logits_alone_and_beside_a_loss() -> None:
    head = make_head(**HEADS["all"])
    low = adapted(head)
    hidden, targets, _ = inputs()
    z = merged_logits(hidden, head, low, HEADS["all"])
    out = head(hidden, [CrossEntropy(targets=targets)], return_logits=True, at=hidden[0].detach())
    torch.testing.assert_close(out.logits.double(), z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.logits_at.double(), z[0], rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.values[0].value, low.lora_A)
    loss = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(found, torch.autograd.grad(loss, low.lora_A), rtol=1e-4, atol=1e-5)
    assert head.lora is not None
    head.lora.chosen = None
    plain = plain_logits(hidden, head, 1.5, 0.7)
    torch.testing.assert_close(head(hidden).logits.double(), plain, rtol=1e-5, atol=1e-5)


def test_a_teacher_lends_its_head_with_what_is_added() -> None:
    student, teacher = make_head(), make_head()
    low = adapted(teacher)
    hidden, targets, _ = inputs()
    states = torch.randn(B, T, C)
    z = merged_logits(states, teacher, low, {}).detach().log_softmax(-1)
    expected = kl_ref(plain_logits(hidden, student, None, 1.0).log_softmax(-1), z, 0.0)
    criterion = KL(targets=targets, teacher_hidden=states, teacher=teacher)
    value = student(hidden, [criterion]).values[0].value
    torch.testing.assert_close(
        value.double(), (expected * (targets != -100)).sum(), rtol=1e-5, atol=1e-5
    )


def test_no_weight_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the size of the weight there is nothing but the weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and "view" not in str(func) and "t.default" not in str(func):
                shapes.append((tuple(out.shape), str(func)))
            return out

    head = make_head()
    adapted(head)
    hidden, targets, _ = inputs()
    head.logits_bytes = 16 * V * 3
    with Seen():
        head(hidden, [CrossEntropy(targets=targets)]).values[0].value.backward()
    big = [x for x in shapes if x[0] and torch.Size(x[0]).numel() >= V * C]
    assert not [x for x in big if "detach" not in x[1] and "alias" not in x[1]]


@pytest.mark.parametrize("scale", [1.0, 3.5])
@pytest.mark.parametrize("pad", [None, 2])
def test_the_embedding(scale: float, pad: int | None) -> None:
    embedding = Embedding(V, C, padding_idx=pad, scale=scale)
    part = LoRAPart("embed_tokens", 0, V, R, SCALE)
    low = LowRankEmbedding(C, part, dtype=torch.float32, device="cpu")
    for p in low.parameters():
        nn.init.normal_(p)
    embedding.lora = Adapters()
    embedding.lora.add_module("it", low)
    ids = torch.randint(0, 9, (B, T))
    assert torch.equal(embedding(ids), F.embedding(ids, embedding.weight) * scale)
    embedding.lora.chosen = "it"
    whole = embedding.weight + SCALE * (low.lora_embedding_B @ low.lora_embedding_A).t()
    expected, up = F.embedding(ids, whole, pad) * scale, torch.randn(B, T, C)
    torch.testing.assert_close(embedding(ids), expected)
    learned = [low.lora_embedding_A]  # B of a padding token gets a gradient, as PEFT's does
    found = torch.autograd.grad(embedding(ids), learned, up)
    torch.testing.assert_close(found, torch.autograd.grad(expected, learned, up))
