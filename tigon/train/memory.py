"""Estimates the memory of a run on each GPU, by kind.

Weights and optimizer states are multiplied out. The rest is tracked in a step of the real model on
the meta device, with the buffers of FSDP2 or of sharding=gradients. No GPU is needed.

# B rows of a micro-batch, T tokens of a row
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tigon.data import MicroBatch
from tigon.data.packing import MAX_KEY_COPIES
from tigon.kernels import use
from tigon.models import CausalLM
from tigon.models.pretrained.quantization import quantized_bytes
from tigon.parallel import MeshSizes, keep_rank_zero
from tigon.settings.config import Config, mesh_sizes, micro_batch_rows
from tigon.train.memory_tracker import (
    GRADIENTS,
    FSDPTracker,
    Ledger,
    MemoryTracker,
    ZeRO2Tracker,
    model_tensors,
    padded_numel,
    shard_bytes,
    shard_counts,
    unsharded_bytes,
)
from tigon.train.model import has_experts, is_sharded, set_fp8, sum_dtype
from tigon.train.optim import freeze, hidden_matrices, parameter_buckets, state_bytes
from tigon.train.tasks import Task

GIB = 2**30
# Memory that is not for tensors: CUDA's context and NCCL's buffers; and a share for fragmentation
# and the error of the estimate
CONTEXT, SHARE = 2 * GIB, 0.04
# The workspaces of cuBLAS for the threads of forward and backward, from sm_90 on
CUBLAS = 2 * 32 * 2**20

KINDS = (
    "parameters", "gradients", "optimizer", "average of weights", "gathered weights",
    "activations", "logits and loss", "communication", "teacher", "reference", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """Holds a GPU's peak in bytes by kind, as torch.cuda.max_memory_allocated counts it."""

    kinds: dict[str, int]
    host: int  # bytes of host memory per rank: the copy of async_save, offloaded states

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def estimate(
    model: CausalLM, task: Task, config: Config, gpus: int, compute: torch.dtype
) -> Estimate:
    """Returns the memory of the first rank, for a whole model on the meta device.

    The model cannot be used afterwards: hooks stay on it. `compute` is the dtype of the
    computation. Experts are assumed to be balanced. Raises ValueError if the model cannot be
    sharded as configured.
    """
    param_dtype = getattr(torch, config.param_dtype)
    sizes = mesh_sizes(config, gpus)
    sharded = is_sharded(config, sizes.fsdp_ranks, compute)
    keep_rank_zero(model, sizes)
    set_fp8(model, config)
    freeze(model, config)
    shares = shard_counts(model, sizes.shards)
    hidden = hidden_matrices(model)
    states = average = 0.0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            numbers = padded_numel(parameter, shares[parameter]) / shares[parameter]
            states += numbers * state_bytes(config, hidden=name in hidden)
            average += numbers * (4 if config.ema_decay else 0)  # float32
    lora = config.lora is not None  # the base in the computation's dtype, unlike the adapter
    shards = {p: shard_bytes(p, n, p.dtype if lora else param_dtype) for p, n in shares.items()}
    parameters = sum(shards.values())
    saved = sum(size for p, size in shards.items() if p.requires_grad) if lora else parameters
    copied = saved + states + average  # by async_save
    offloaded = states + average if config.optimizer_offload else 0.0
    cast = model.to("meta") if lora and not sharded else model.to("meta", compute)
    stored = param_dtype if sharded else None
    ledger = simulate_step(cast, task, config, sizes, stored, compute)
    if sharded and config.sharding == "gradients":  # whole weights, and shards of another dtype
        masters = parameters if compute != param_dtype else 0
        parameters = unsharded_bytes(model, sizes.shards, compute) + masters
    persistent = {"parameters": parameters + quantized_bytes(model)}  # these are not sharded
    if not config.optimizer_offload:
        persistent |= {"optimizer": int(states), "average of weights": int(average)}
    kinds = dict.fromkeys(KINDS, 0) | ledger.at_peak | persistent
    kinds["other"] += CUBLAS
    host = int(offloaded + copied * config.async_save)
    return Estimate({kind: size for kind, size in kinds.items() if size}, host)


def simulate_step(
    model: CausalLM,
    task: Task,
    config: Config,
    sizes: MeshSizes,
    sharded: torch.dtype | None,
    compute: torch.dtype,
) -> Ledger:
    """Returns the ledger of a step on the meta device, with at most two micro-batches: the second
    one runs while gradients of the first are alive. `sharded` is the dtype of sharded weights."""
    ledger, ranks, rows = Ledger(), sizes.shards, micro_batch_rows(config)
    tracker = MemoryTracker(ledger, model_tensors(model))
    tracker.label_forward(model.lm_head, "logits and loss")
    sharding_tracker: FSDPTracker | ZeRO2Tracker | None = None
    if sharded is not None and config.sharding == "gradients":
        sharding_tracker = ZeRO2Tracker(model, tracker, ranks, sum_dtype(config), sharded)
    elif sharded is not None:
        one = config.batch_size == rows * sizes.data
        shares = shard_counts(model, ranks)
        sharding_tracker = FSDPTracker(
            model, tracker, shares, model.dtype, sharded,
            one_backward=one, keep_shards=not config.optimizer_in_backward,
        )  # fmt: skip
    else:
        for bucket in parameter_buckets(model):
            track_gradients(bucket, tracker, free=config.optimizer_in_backward)
    count = max(1, -(-config.batch_size // (sizes.data * rows)))
    # CUDA graphs keep the gradients of blocks, as if there had been a micro-batch before; those of
    # embedding and head are freed between steps
    last = 1 if config.cuda_graphs is True else min(count, 2) - 1
    decoder = model.model
    captured = (*decoder.first_modules, *decoder.layers, *decoder.last_modules)
    freed = set(model.parameters()) - {p for module in captured for p in module.parameters()}
    frozen = task.meta_frozen_model(model, compute)
    if frozen is not None:
        track_frozen_model(frozen, tracker, config, sizes, compute)
    model.train()
    rows = min(rows, -(-config.batch_size // sizes.data))
    with use("triton"), tracker:
        for index in range(last + 1):
            inputs = task.resolve(model, dummy_batch(rows, config.seq_len, task))
            sums = task.sums(model, inputs)
            if sharding_tracker is not None:
                sharding_tracker.begin(reduce=index == last)
            loss = task.loss(model, inputs, sums).loss
            tracker.phase = "other"
            loss.backward()
            del loss, inputs, sums
            tracker.phase = "activations"
            if sharding_tracker is not None:
                sharding_tracker.end()
            if count == 1 and index < last:  # a graph's second pass is that of the next step
                for parameter in freed:
                    parameter.grad = None
                    if isinstance(sharding_tracker, ZeRO2Tracker):
                        sharding_tracker.added.pop(parameter, None)
    return ledger


def track_gradients(bucket: list[nn.Parameter], tracker: MemoryTracker, *, free: bool) -> None:
    """Counts the gradients of a bucket; with `free` frees them when its last one is there, as
    optimizer_in_backward does."""
    missing = set(bucket)

    def arrived(parameter: Any) -> None:
        tracker.relabel(parameter.grad, GRADIENTS)
        missing.discard(parameter)
        if free and not missing:
            for p in bucket:
                p.grad = None

    for parameter in bucket:
        parameter.register_post_accumulate_grad_hook(arrived)


def dummy_batch(
    rows: int, tokens: int, task: Task | type[Task], *, device: str = "meta"
) -> MicroBatch:
    """Returns a micro-batch of full rows, by default on the meta device, with a task's columns.

    A shared prompt fills its row but for one token of each further answer: the case in which
    attention copies most keys and values.
    """
    options: dict[str, Any] = {"device": device}
    ids = torch.zeros(rows, tokens, dtype=torch.int64, **options)
    sequences, longest, prefixes = rows * task.group, -(-tokens // task.group), None
    if task.share_prompts:
        copies = task.group - 1 or MAX_KEY_COPIES  # groups of one share a prompt with others
        sequences, longest = rows * (1 + copies), tokens - copies
        prefixes = np.array([[0, 0], *[[0, longest]] * copies])
        prefixes = (prefixes + tokens * np.arange(rows)[:, None, None]).reshape(-1, 2)
    per_token = {"supervised": torch.bool, **task.per_token}
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.zeros_like(ids),
        attention_mask=None,
        cu_seq_lens=torch.zeros(sequences + 1, dtype=torch.int32, **options),
        longest=longest,
        spans=torch.zeros(sequences, 2, dtype=torch.int64, **options),
        parts=torch.zeros(sequences, dtype=torch.int64, **options),
        per_token={n: torch.ones(rows, tokens, dtype=d, **options) for n, d in per_token.items()},
        per_example={
            n: torch.ones(sequences, dtype=d, **options) for n, d in task.per_example.items()
        },
        sources=(),
        prefixes=prefixes,
    )


def track_frozen_model(
    other: CausalLM, tracker: MemoryTracker, config: Config, sizes: MeshSizes, compute: torch.dtype
) -> None:
    """Counts a frozen model that runs beside the trained one: a teacher, or a live reference.

    A model that the settings name is sharded as by `load_frozen`, else as the trained one.
    """
    kind = "teacher" if config.teacher else "reference"
    keep_rank_zero(other, sizes if has_experts(other) else replace(sizes, expert=1))
    other.use_attention(config.attention)
    other.requires_grad_(False).eval()
    shares, dtype = shard_counts(other, sizes.shards), other.dtype
    named = bool(config.teacher or config.reference)
    sharded = sizes.fsdp_ranks > 1 if named else is_sharded(config, sizes.fsdp_ranks, compute)
    if zero := sharded and not named and config.sharding == "gradients":
        tracker.ledger.add(kind, unsharded_bytes(other, sizes.shards, compute))
    if not zero or compute != dtype:
        tracker.ledger.add(kind, sum(shard_bytes(p, n, dtype) for p, n in shares.items()))
    other.to("meta", compute)
    tracker.ignore(model_tensors(other))
    tracker.label_forward(other, kind)
    if sharded and not zero:
        FSDPTracker(other, tracker, shares, compute, dtype, kind=kind)


def gpu_memory(device: torch.device) -> int | None:
    """Returns the bytes of a GPU that other processes leave to this one, None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory - held_by_others(device)


def held_by_others(device: torch.device) -> int:
    """Returns the bytes of a GPU that other processes hold, 0 for less than a CUDA context."""
    if device.type != "cuda":
        return 0
    free, memory = torch.cuda.mem_get_info(device)
    held = memory - free - torch.cuda.memory_reserved(device)  # with this process's context
    return held if held > CONTEXT else 0


def memory_budget(config: Config, memory: float) -> int:
    """Returns the bytes for tensors: memory_budget, or most of a GPU's `memory`."""
    if config.memory_budget is not None:
        return int(config.memory_budget * GIB)
    return int(memory * (1 - SHARE)) - CONTEXT
