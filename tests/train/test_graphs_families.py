"""Replays of every family have the bits of passes without graphs.

A recording keeps the numbers that Python computed in its pass, so each kind of micro-batch comes
again with other tokens, lengths, padding and labels.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tests.models.tiny import CASES, FIRST, SIZES, their_config
from tests.support.flash import on_hopper
from tests.support.graph_operators import flash_on_tape
from tests.train.test_graphs import played
from tigon.layers import Attention
from tigon.models import MODELS, CausalLM
from tigon.models.pretrained.names import stored_buffers
from tigon.train.cuda_graphs import Graphs

__all__ = ["flash_on_tape", "on_hopper", "played"]
T = 32  # tokens; longer than max_position_embeddings, windows and chunks


def make_model(model_type: str, case: str) -> CausalLM:
    """A model whose weights, biases and buffers are random."""
    theirs = their_config(model_type, **SIZES | CASES[model_type][case]).get_text_config()
    config = MODELS[model_type].config_class.from_dict(theirs.to_dict())
    model = MODELS[model_type].from_config(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 else 0.08))
        for buffer in stored_buffers(model).values():
            buffer.add_(torch.randn_like(buffer) * 0.3)
    capped = any(isinstance(m, Attention) and m.softcap for m in model.modules())
    return model.use_attention("reference" if capped else "flash")


def packed(*ends: int, padding: int = 0) -> dict[str, Any]:
    """Bounds as the trainer gives them, with padding at the end as a sequence of its own."""
    cu = torch.tensor([0, *ends, T], dtype=torch.int32)
    mask = torch.arange(T)[None] < T - padding if padding else None
    return {"cu_seq_lens": cu, "max_length_q": int(cu.diff().max()), "attention_mask": mask}


def rows(first: int) -> dict[str, Any]:
    return {"position_ids": torch.arange(first, first + T)[None]}


# Micro-batches of one kind, of which the first is recorded. Texts are shorter and longer than
# those from which RoPE's frequencies change, and than chunks
KINDS: dict[str, list[dict[str, Any]]] = {
    "in windows": [packed(7, 14, 21, 28), packed(3, 4, 10, 16, 22, 28)],
    "packed": [packed(9, 19), packed(3)],
    "padded": [packed(9, 19, padding=13), packed(27, 29, padding=3)],
    "rows": [rows(0), rows(40)],
}
# What lengths decide, and layers that the first case of a family lacks
MORE = [
    ("llama4_text", "plain"),
    ("phi3", "longrope"),
    ("qwen3_next", "plain"),
    ("gpt_oss", "aux loss"),
    ("gemma4_text", "experts"),
    ("gemma3_text", "both sides"),
    ("llama", "rope dynamic"),
    ("llama", "rope longrope short"),
]
ADAPTED = "qwen3_next", "deepseek_v3", "lfm2_moe", "gemma3n_text"


def run(model: CausalLM, ids: Tensor, labels: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = model(ids, labels=labels, **given).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow(first=4)
@pytest.mark.usefixtures("flash_on_tape", "played")
@pytest.mark.parametrize(
    ("model_type", "case", "adapted"),
    [
        *((*row, False) for row in MORE + [row for row in FIRST if row not in MORE]),
        *((*row, True) for row in FIRST if row[0] in ADAPTED),
    ],
)
def test_replays_have_the_bits_of_passes(model_type: str, case: str, adapted: bool) -> None:
    model, said = make_model(model_type, case), []
    if adapted:
        model.add_adapter(tigon.LoraConfig(rank=3, dropout=0.3))
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1)
        model.activation_checkpointing = 2
    plain, made, passes = copy.deepcopy(model), Graphs(model, said.append), 0
    for kind, (recorded, later) in KINDS.items():
        for given in (recorded, recorded, later):
            ids, keys = torch.randint(0, 211, (2, 1, T))
            labels = ids.masked_fill(torch.rand(ids.shape) < torch.rand(()), -100)
            batch = ids, labels, {"dropout_keys": keys, **given}
            found = run(model, *batch)
            passes += 1
        for ours, theirs in zip(found, run(plain, *batch), strict=True):
            assert torch.equal(ours, theirs), kind
    assert len(made.learned) <= len(KINDS) and made.passes == passes - len(made.learned)
    assert not said
