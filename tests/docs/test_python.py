"""Blocks of Python in README and the manual run, page by page, on tiny models in place of real
ones, and on the CPU in place of a GPU."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gguf import GGMLQuantizationType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import default_data_collator

import tigon
import tigon.train
from tests.docs.pages import ROOT, Block, blocks
from tests.models.fp8_checkpoints import DYNAMIC, to_fp8
from tests.models.gguf_files import write_gguf
from tigon.train.optim import build_optimizer

Names = dict[str, Any]
PYTHON = [block for block in blocks() if block.language == "python"]
PAGES = sorted({block.page for block in PYTHON if not block.skip})


def common(stack: ExitStack) -> Names:
    """What pages take for granted: a model, and tokens for it."""
    torch.manual_seed(0)
    model, small = tigon.from_pretrained("MODEL"), tigon.from_pretrained("MODEL")
    ids = torch.randint(300, (2, 12))
    labels = ids.clone()
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padding
    return {
        **{"tigon": tigon, "torch": torch, "dist": dist, "path": "MODEL", "MODEL": "MODEL"},
        **{"model": model, "small": small, "teacher": small, "student": model},
        **{"ids": ids, "labels": labels, "mask": mask, "micro_batches": ids.split(1)},
        **{"tokenizer": tigon.Tokenizer.from_pretrained("MODEL"), "path_or_repo": "MODEL"},
    }


def one_rank(stack: ExitStack) -> Names:
    """A mesh of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    return {"mesh": init_device_mesh("cpu", (1,)), "fully_shard": fully_shard}


def of_a_run(stack: ExitStack) -> Names:
    """What a loop that saves checkpoints has."""
    world = stack.enter_context(tigon.train.start("cpu"))
    model = tigon.from_pretrained("MODEL")
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"run_dir": Path("runs/saved"), "world": world, "step": 1, "metadata": {}}
    return names | {"model": model, "optimizer": optimizer}


def of_a_head(stack: ExitStack) -> Names:
    """The operands of a loss."""
    hidden = torch.randn(6, 8)
    return {"hidden": hidden, "head": torch.nn.Linear(8, 30), "targets": torch.randint(30, (6,))}


def of_scores(stack: ExitStack) -> Names:
    """A question and its answers, as tokens."""
    return {"question": [5, 6, 7], "answers": [[8, 9], [10]]}


def in_backward(stack: ExitStack) -> Names:
    """An optimizer that may update in the backward pass."""
    model = tigon.from_pretrained("MODEL")
    config = tigon.train.load(None, ["model=m", "data=d", "run_dir=r"])
    return {"model": model, "optimizer": build_optimizer(model, config)}


def quantized_files(stack: ExitStack) -> Names:
    """Checkpoints in fp8 and in GGUF."""
    shutil.copytree("tiny", "Qwen/Qwen3-8B-FP8")
    to_fp8(Path("Qwen/Qwen3-8B-FP8"), (32, 16), DYNAMIC)
    for name in ("models", "Qwen/Qwen3-0.6B-GGUF"):
        Path(name).mkdir()
        write_gguf(Path("tiny"), Path(name, "Qwen3-0.6B-Q8_0.gguf"), GGMLQuantizationType.Q8_0)
    return {}


def adapters(stack: ExitStack) -> Names:
    """Two adapters."""
    for name in ("math", "french"):
        shutil.copytree("owner/adapter", f"owner/{name}")
    return {}


def before_a_run(stack: ExitStack) -> Names:
    """No run yet."""
    shutil.rmtree("runs")
    return {}


def of_a_dataset(stack: ExitStack) -> Names:
    """Tokenized rows, and what makes a batch of them."""
    rows = [{"input_ids": torch.randint(300, (9,)).tolist()} for _ in range(4)]
    dataset = [row | {"labels": row["input_ids"]} for row in rows]
    return {"dataset": dataset, "collate": default_data_collator}


OWN: dict[str, Callable[[ExitStack], Names]] = {
    "README.md": before_a_run,
    "docs/adapters.md": adapters,
    "docs/checkpoints.md": of_a_run,
    "docs/context.md": one_rank,
    "docs/formats.md": quantized_files,
    "docs/generation.md": of_scores,
    "docs/kernels.md": of_a_head,
    "docs/neighbours.md": of_a_dataset,
    "docs/optimizers.md": in_backward,
    "docs/weights.md": lambda stack: quantized_files(stack) | one_rank(stack),
}


@pytest.fixture
def names(request: pytest.FixtureRequest, desk: Path) -> Iterator[Names]:
    """What the blocks of a page find."""
    with ExitStack() as stack:
        yield common(stack) | OWN.get(request.param, lambda _: {})(stack)


def run(block: Block, names: Names) -> None:
    """Executes it as the page's reader would, but for the device."""
    text = block.text.replace('"cuda"', '"cpu"')
    exec(compile("\n" * block.line + text, ROOT / block.page, "exec"), names)


@pytest.mark.parametrize(("names", "page"), [(p, p) for p in PAGES], indirect=["names"], ids=PAGES)
def test_the_blocks_of_a_page(page, names):
    for block in PYTHON:
        if block.page == page and not block.skip:
            run(block, names)
    if page == "docs/migration.md":  # both sides of a script
        assert abs(names["ours"].loss - names["theirs"].loss).item() < 1e-5


def test_blocks_that_are_left_out():
    """Each says why; a test that runs it instead is there."""
    left_out = [block for block in blocks() if block.skip]
    for block in left_out:
        assert len(block.skip.split()) > 2, block
        for path in re.findall(r"tests/[\w/.]+", block.skip):
            assert os.path.exists(ROOT / path), f"{block}: {path}"
    assert len(left_out) < 0.2 * len(blocks())
