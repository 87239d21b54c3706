"""FSDP2 warns of wrong gradients if a module that it wraps returns a view. No block does, and no
head, whatever computes their last product."""

from typing import Any

import pytest
from torch import Tensor

from tests.parallel.test_tensor import TWO, batches, random_model
from tigon.kernels import use
from tigon.models import LoraConfig


@pytest.mark.slow(first=8)
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", ["llama", "granite", "gemma2", "olmo2", "qwen2_moe", "qwen3_moe"])
def test_blocks_return_no_views(name: str, adapted: bool, kernels: Any) -> None:
    model = random_model(*TWO[name])
    if adapted:
        model.add_adapter(LoraConfig(rank=2))
    returned: list[Tensor | None] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda block, given, out: returned.extend(out))
    with use(kernels):
        model(**batches()[0])
    assert len(returned) == 3 * 2
    assert all(x._base is None for x in returned if x is not None)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_an_adapted_head_returns_no_views(kernels: Any) -> None:
    model = random_model(*TWO["llama"])
    model.add_adapter(LoraConfig(rank=2, targets=("embed_tokens", "lm_head")))
    batch = batches()[0]
    del batch["labels"]
    with use(kernels):
        assert model(**batch).logits._base is None
