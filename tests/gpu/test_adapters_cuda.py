"""Models under adapters on the GPU: kernels are as near to float32 as plain torch is, in bf16."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from bench.compare_side import LLAMA_1B, QWEN3_MOE
from tigon import LoraConfig
from tigon.kernels import use
from tigon.kernels.linear.quantized import quantize_nf4
from tigon.models.pretrained.quantization import quantize_model

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# All experts have all tokens: rounding sends no token elsewhere
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[LoraConfig, bool]] = {
    "dropout": (LoraConfig(rank=16, targets=ALL, dropout=0.25), False),
    "dora": (LoraConfig(rank=16, targets=ALL, dora=True), False),
    "nf4": (LoraConfig(rank=16, targets=ALL), True),
    "nf4, dropout": (LoraConfig(rank=16, targets=ALL, dropout=0.25), True),
    "ends": (LoraConfig(rank=8, targets=("v_proj", "embed_tokens", "lm_head")), False),
    "ends, dora": (LoraConfig(rank=8, targets=("embed_tokens", "lm_head"), dora=True), False),
    "experts": (
        LoraConfig(rank=5, targets=("experts.gate_up_proj", "experts.down_proj", "q_proj")),
        False,
    ),
}


def model(case: str, dtype: torch.dtype) -> Any:
    """The same numbers in any dtype: all are bf16's."""
    config, few = CASES[case]
    kind, values = (
        (tigon.Qwen3Moe, QWEN3_MOE | EXPERTS)
        if case == "experts"
        else (tigon.Llama, LLAMA_1B | {"tie_word_embeddings": False})
    )
    made: Any = kind.from_config(values | SMALL, dtype=dtype, device=DEVICE)
    fill(made, "")
    if few:
        quantize_model(made, "nf4")
    made.add_adapter(config, dtype=dtype)
    fill(made, ".lora")
    return made.train()


@torch.no_grad()
def fill(made: Any, part: str) -> None:
    for name, p in made.named_parameters():
        if part in name and "magnitude" not in name and "norm" not in name:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.copy_((0.06 * torch.randn(p.shape, generator=draw)).bfloat16())


def results(made: Any) -> dict[str, Tensor]:
    """The loss and what trains, by name."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (2, 300), generator=draw).to(DEVICE)
    keys = torch.randint(-(2**62), 2**62, ids.shape, generator=draw).to(DEVICE)
    more = {"dropout_keys": keys} if any(c.dropout for c in made.adapters.values()) else {}
    loss = made(ids, labels=ids, **more).loss
    loss.backward()
    learned = {n: p for n, p in made.named_parameters() if p.requires_grad}
    assert learned and all(".lora" in name for name in learned)
    return {"loss": loss.detach()} | {n: p.grad for n, p in learned.items()}


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_the_adapter(case: str) -> None:
    with use("reference"):
        exact, plain = (results(model(case, dtype)) for dtype in (torch.float32, torch.bfloat16))
    found = results(model(case, torch.bfloat16))

    def off(values: dict[str, Tensor], name: str) -> float:
        return float((values[name].float() - exact[name]).norm() / exact[name].norm())

    yardstick = max(off(plain, name) for name in exact)
    assert found.keys() == exact.keys() and 1e-4 < yardstick < 0.1
    for name in exact:
        assert off(found, name) <= 2 * yardstick, name
    if CASES[case][0].dropout:  # it did drop something
        undropped = model(case, torch.float32).eval()
        assert off(results(undropped), "loss") > 1e-4


@pytest.mark.parametrize("case", ["dropout", "nf4, dropout"])
def test_recomputed_blocks_draw_the_same(case: str) -> None:
    found = []
    for again in (False, True):
        made = model(case, torch.bfloat16)
        made.activation_checkpointing = again
        found.append(results(made))
    for name, value in found[0].items():
        # Attention adds in any order; another draw would be half of the gradient
        assert (found[1][name].float() - value.float()).norm() <= 0.02 * value.float().norm(), name


def test_four_bits_on_gpu_as_on_cpu() -> None:
    """But where the mean of the scales, summed in another order, is rounded otherwise."""
    weight = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    here, there = quantize_nf4(weight), quantize_nf4(weight.to(DEVICE))
    for a, b in zip(here, there, strict=True):
        assert a.shape == b.shape and (a != b.cpu()).float().mean() < 1e-2
    assert torch.equal(here[0], there[0].cpu())  # codes
