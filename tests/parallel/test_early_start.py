"""Kernels that read weights before they wait, where FSDP2 writes the weights just before."""

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import tigon
from tests.parallel.ranks import run_on_ranks
from tests.small import LLAMA
from tigon.kernels import runtime
from tigon.parallel import shard_blocks

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
