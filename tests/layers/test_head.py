"""The head against plain autograd in float64: bias, softcap, scale, LoRA, and chunks of rows."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from tests.support.contract import assert_same_gradients, gradients
from tigon.kernels import KL, CrossEntropy, LogProbs, kl_ref
from tigon.layers import LMHead

B, T, C, V = 2, 7, 23, 131
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 1.5},
    "logit_scale": {"logit_scale": 0.3},
    "all": {"bias": True, "softcap": 1.5, "logit_scale": 0.7},
}
heads = pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
chunks = pytest.mark.parametrize("rows", [3, 10_000])


class LoRA(nn.Module):
    """weight + B A, as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, C))
        self.b = nn.Parameter(0.2 * torch.randn(V, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def make_head(**options: Any) -> LMHead:
    head = LMHead(C, V, **options)
    for p in head.parameters():
        nn.init.normal_(p, std=0.7)
    return head


def plain_logits(hidden: Tensor, head: LMHead, softcap: float | None, scale: float) -> Tensor:
    bias = None if head.bias is None else head.bias.double()
    logits = F.linear(hidden.double(), head.weight.double(), bias) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(0, V, (B, T))
    targets[torch.rand(B, T) < 0.3] = -100
    return torch.randn(B, T, C, requires_grad=True), targets, torch.rand(B, T) + 0.1


def compare(head: LMHead, options: dict[str, Any], reduction: str, return_logits: bool) -> None:
    hidden, targets, weights = inputs()
    logits = plain_logits(hidden, head, options.get("softcap"), options.get("logit_scale", 1.0))
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.view(B, T) * weights
    upstream = torch.randn(B, T)
    expected = losses.sum() / 17 if reduction == "sum" else (losses * upstream).sum()
    criterion = CrossEntropy(
        targets=targets,
        weights=weights,
        denominator=17 if reduction == "sum" else None,
        reduction=reduction,
    )
    out = head(hidden, [criterion], return_logits=return_logits)
    value = out.values[0].value
    actual = value if reduction == "sum" else (value * upstream).sum()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(
        *torch.autograd.grad(actual, hidden, retain_graph=True),
        *torch.autograd.grad(expected, hidden, retain_graph=True),
        rtol=1e-4,
        atol=1e-6,
    )
    assert_same_gradients(gradients(actual, head), gradients(expected, head))
    if return_logits:
        torch.testing.assert_close(out.logits.double(), logits, rtol=1e-5, atol=1e-5)


@heads
@chunks
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("return_logits", [False, True])
def test_gradients_equal_plain_autograd(
    options: dict[str, Any], rows: int, reduction: str, return_logits: bool
) -> None:
    head = make_head(**options)
    head.logits_bytes = 16 * V * rows
    compare(head, options, reduction, return_logits)


@heads
@pytest.mark.parametrize("frozen_weight", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_lora_on_the_head(options: dict[str, Any], frozen_weight: bool, reduction: str) -> None:
    head = make_head(**options)
    lora = LoRA()
    parametrize.register_parametrization(head, "weight", lora)
    head.parametrizations.weight.original.requires_grad_(not frozen_weight)
    for return_logits in (False, True):
        compare(head, options, reduction, return_logits)
    hidden, targets, _ = inputs()
    loss = head(hidden, [CrossEntropy(targets=targets)]).values[0].value
    found = gradients(loss, head)
    assert found["parametrizations.weight.0.a"].abs().max() > 0


@heads
def test_logits_without_targets(options: dict[str, Any]) -> None:
    head, (hidden, _, _) = make_head(**options), inputs()
    expected = plain_logits(hidden, head, options.get("softcap"), options.get("logit_scale", 1.0))
    out = head(hidden)
    assert out.values == []
    torch.testing.assert_close(out.logits.double(), expected, rtol=1e-5, atol=1e-5)


@heads
@pytest.mark.parametrize("return_logits", [False, True])
def test_metrics_are_of_the_final_logits(options: dict[str, Any], return_logits: bool) -> None:
    head, (hidden, targets, _) = make_head(**options), inputs()
    z = plain_logits(hidden, head, options.get("softcap"), options.get("logit_scale", 1.0))
    valid = targets != -100
    criterion = CrossEntropy(targets=targets, metrics=("z", "max_logit"))
    metrics = head(hidden, [criterion], return_logits=return_logits).values[0].metrics
    z_expected, max_expected = z.logsumexp(-1) * valid, z.amax(-1) * valid
    torch.testing.assert_close(metrics["z"].double(), z_expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics["max_logit"].double(), max_expected, rtol=1e-5, atol=1e-5)


def distillation(
    reduction: str, teacher: LMHead, states: Tensor, targets: Tensor
) -> list[CrossEntropy | KL]:
    mine = {"targets": targets, "reduction": reduction}
    return [
        CrossEntropy(**mine),
        KL(**mine, teacher_hidden=states, teacher=teacher, beta=0.3, temperature=2.0),
    ]


def compare_distilled(head: LMHead, teacher: LMHead, plain: LMHead, reduction: str) -> None:
    """The head with a teacher against float64; `plain` is the teacher's own head as it was."""
    hidden, targets, _ = inputs()
    states = torch.randn(B, T, C)
    valid = targets != -100
    z = plain_logits(hidden, head, None, 1.0)
    losses = F.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="none").view(B, T)
    logps = ((x / 2).log_softmax(-1) for x in (z, plain_logits(states, plain, 1.5, 0.7).detach()))
    expected = losses.sum() + (kl_ref(*logps, 0.3) * valid).sum()
    for return_logits in (False, True):
        out = head(
            hidden, distillation(reduction, teacher, states, targets), return_logits=return_logits
        )
        total = sum(x.value.sum() for x in out.values)
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(total, (hidden, head.weight)),
            torch.autograd.grad(expected, (hidden, head.weight), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_teacher(reduction: str) -> None:
    teacher = make_head(bias=True, softcap=1.5, logit_scale=0.7)
    compare_distilled(make_head(), teacher, teacher, reduction)
    other = make_head()
    other.weight = nn.Parameter(other.weight[:5].detach())
    hidden, targets, _ = inputs()
    with pytest.raises(ValueError, match="the student has 131 tokens, the teacher 5"):
        make_head()(hidden, distillation(reduction, other, hidden.detach(), targets))


def test_a_sharded_teacher_is_gathered_by_its_own_unit() -> None:
    """Its parameter is a DTensor; inside its forward, forward and backward pass, it is whole."""
    teacher = make_head(bias=True, softcap=1.5, logit_scale=0.7).requires_grad_(False)
    plain = copy.deepcopy(teacher)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(teacher, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)
        assert isinstance(teacher.weight, DTensor)
        compare_distilled(make_head(), teacher, plain, "sum")
        assert isinstance(teacher.weight, DTensor)
        compare_distilled(make_head(), teacher, plain, "none")  # FSDP keeps what backward gathers
        compare_distilled(make_head(), teacher, plain, "sum")
    finally:
        dist.destroy_process_group()


def test_returned_logits_are_values() -> None:
    head, (hidden, targets, _) = make_head(bias=True), inputs()
    out = head(
        hidden, [CrossEntropy(targets=targets), LogProbs(targets=targets)], return_logits=True
    )
    before = out.logits.detach().clone()
    sum(x.value.sum() for x in out.values).backward(retain_graph=True)
    assert torch.equal(out.logits, before)
    logp = out.logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(out.values[1].value, logp * (targets != -100))


def test_no_hidden_states() -> None:
    with pytest.raises(ValueError, match="no hidden states"):
        make_head()(None)
