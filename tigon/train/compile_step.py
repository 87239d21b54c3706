"""Compiles the kernels of a run's first step, and of its evaluations, while its model is loaded, on
one GPU.

They are found by a pass of fake tensors over made-up tokens. A file beside Triton's kernels says
that it was done for a model, settings and versions.

# B rows of a micro-batch, T tokens of a row
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tigon.kernels.precompile import compile_kernels
from tigon.kernels.runtime import runs_triton, triton
from tigon.models import CausalLM
from tigon.models.decoder import recomputed_blocks
from tigon.settings.config import micro_batch_rows
from tigon.train.choices import StepChoice
from tigon.train.distributed import eval_mode
from tigon.train.memory import dummy_batch
from tigon.train.model import compute_dtype, meta_model, set_fp8, weights_dtype
from tigon.train.optim import build_optimizer
from tigon.train.optim.adamw import LowPrecisionOptimizer
from tigon.train.optim.clip import clip
from tigon.train.tasks import CrossEntropyTask, Task
from tigon.version import __version__

LIBRARIES = ("torch", "triton", "flash-attn-4")
# Settings that no kernel depends on, and that change from run to run
NO_EFFECT = ("run_dir", "data", "eval_data", "model", "lr", "seed", "steps", "epochs")


@contextmanager
def compile_step(task: Task, source: Path | None, choice: StepChoice | None) -> Iterator[None]:
    """Compiles kernels of a step and an evaluation while the `with` block runs, then waits.

    Does nothing on a CPU or several ranks, and for tasks with columns or pairs of their own.
    """
    config, device = task.config, task.world.device
    plain = isinstance(task, CrossEntropyTask) and not (task.per_token or task.one_prompt)
    if not plain or task.world.size > 1 or not has_kernels(device):
        yield
        return
    model = meta_model(config, weights_dtype(config, device), source)
    if (done := _done_file(model, task, choice)).exists():
        yield
        return
    if config.lora is None:
        model.to(dtype=compute_dtype(config, device))
    set_fp8(model, config)
    if choice is not None:
        choice.apply(model)
    with compile_kernels(partial(run_step, model, task, device)) as compilation:
        yield
    if compilation.complete:
        with suppress(OSError):
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()


def has_kernels(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on this device; the first call launches one."""
    return device.type == "cuda" and runs_triton(torch.empty(0, device=device))


def _done_file(model: CausalLM, task: Task, choice: StepChoice | None) -> Path:
    """Returns the file, in Triton's cache, that says that a step's kernels are compiled there."""
    settings = {name: x for name, x in asdict(task.config).items() if name not in NO_EFFECT}
    chosen = None if choice is None else choice.describe()
    versions = [_version(name) for name in LIBRARIES]
    gpu = torch.cuda.get_device_name(task.world.device)
    evaluates = bool(task.config.held_out)
    facts = model.config.to_dict(), settings, evaluates, chosen, __version__, *versions, gpu
    key = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
    return Path(triton.knobs.cache.dir, f"tigon-{key}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def run_step(model: CausalLM, task: Task, device: torch.device) -> None:
    """Makes a step, and an evaluation if the run has held-out data, of rows of two sequences of
    made-up tokens, with a model on meta that it moves to the device."""
    keep_distinct_blocks(model)
    allocate(model, device)
    config = task.config
    rows, tokens = micro_batch_rows(config), config.seq_len
    first = tokens // 2 + 1  # sequences of one length would be rows to attention
    row = np.array([[0, first], [first, tokens]])
    spans = np.concatenate([row + tokens * i for i in range(rows)])
    positions = torch.arange(tokens, device="cpu") % first
    batch = replace(
        dummy_batch(rows, tokens, task, device="cpu"),
        position_ids=positions.expand(rows, -1),
        cu_seq_lens=torch.tensor([0, *spans[:, 1].tolist()], dtype=torch.int32, device="cpu"),
        longest=first,
        spans=torch.tensor(spans, device="cpu"),
        parts=torch.zeros(len(spans), dtype=torch.int64, device="cpu"),
        host_spans=spans,
    )
    batch = batch.to(device)
    inputs = task.resolve(model, batch)
    task.loss(model, inputs, task.sums(model, inputs)).loss.backward()
    optimizer = build_optimizer(model, config)
    _, scale = clip(model, optimizer, config.max_grad_norm)
    if isinstance(optimizer, LowPrecisionOptimizer):
        optimizer.launch_first_update(scale)
    if config.held_out:  # without gradients kernels save less: they are other ones
        with eval_mode(model), torch.no_grad():
            inputs = task.resolve(model, batch, training=False)
            task.evaluate(model, inputs, task.sums(model, inputs))


def keep_distinct_blocks(model: CausalLM) -> None:
    """Removes blocks whose kernels other blocks launch. Two of each kind stay, since the model's
    first block has no residual, and so do the blocks whose keys and values they read."""
    blocks: list[Any] = list(model.model.layers)
    by_kind: dict[Any, list[int]] = {}
    for i, block in enumerate(blocks):
        by_kind.setdefault(_kind(block), []).append(i)
    indices = {i for same in by_kind.values() for i in same[:2]}
    indices |= {s for i in indices if (s := blocks[i].kv_source) is not None}
    order = sorted(indices)
    for i in order:
        if (source := blocks[i].kv_source) is not None:
            blocks[i].kv_source = order.index(source)
    if (setting := model.activation_checkpointing) != "experts":
        recomputed = recomputed_blocks(setting, len(blocks))
        model.activation_checkpointing = [n for n, i in enumerate(order) if i in recomputed]
    model.model.layers = nn.ModuleList([blocks[i] for i in order])


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Returns what blocks that launch the same kernels have in common."""
    modules = [
        (type(m), [(k, v) for k, v in vars(m).items() if isinstance(v, int | float | str | tuple)])
        for m in block.modules()
    ]
    weights = [(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()]
    return repr(modules), *weights


def allocate(model: CausalLM, device: torch.device) -> None:
    """Allocates parameters and buffers under FakeTensorMode, where `materialize` does not work."""
    made: dict[Tensor, Tensor] = {}  # tied ones once
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is None:
                    continue
                if x not in made:
                    empty = torch.empty(x.shape, dtype=x.dtype, device=device)
                    learns = isinstance(x, nn.Parameter)
                    made[x] = nn.Parameter(empty, x.requires_grad) if learns else empty
                held[name] = made[x]  # type: ignore[assignment]
