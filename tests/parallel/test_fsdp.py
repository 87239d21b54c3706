"""FSDP2 warns of wrong gradients if a module that it wraps returns a view: no block or head does.
Kernels that read weights early do not start where FSDP2 gathers them."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import tigon
from tests.parallel.ranks import run_on_ranks
from tests.parallel.test_tensor import TWO, batches, random_model
from tests.support.small import LLAMA
from tigon.kernels import runtime, use
from tigon.models import LoraConfig
from tigon.parallel import shard_blocks


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


ROW: Any = SimpleNamespace(numel=lambda: 4096, device=SimpleNamespace(type="cuda", index=0))


def gathered() -> None:
    runtime.is_hopper = lambda _: True
    assert runtime.pdl_options(ROW) == {"PDL": True, "launch_pdl": True}
    model = tigon.Llama.from_config(LLAMA)
    shard_blocks(model, init_device_mesh("cpu", (2,)), compute=torch.float32, keeps_ends=False)
    assert runtime.pdl_options(ROW) == {"PDL": False}
    del model
    gc.collect()
    assert runtime.pdl_options(ROW) == {"PDL": True, "launch_pdl": True}  # of other models


def test_no_kernel_starts_early_where_weights_are_gathered() -> None:
    run_on_ranks(2, gathered)
