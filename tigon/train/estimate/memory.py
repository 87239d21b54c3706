"""The memory that a run takes on each GPU, by kind; no GPU is needed to know it.

What is there all the time, weights and states of the optimizer, is multiplied out. The rest is that
of a step of the real model on the meta device, which `meter` weighs, with what FSDP2 allocates
around it, which `gathering` adds, or what sharding=gradients does, which `reducing` adds.

# B rows of a micro-batch, T tokens of a row
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tigon.data import MicroBatch
from tigon.data.packing import MAX_KEY_COPIES
from tigon.kernels import use
from tigon.models import CausalLM, quantised_bytes
from tigon.parallel import MeshSizes, take_part
from tigon.train.config import Config, sizes_of
from tigon.train.estimate.beside import count_in
from tigon.train.estimate.gathering import GRADIENTS, Gathering, held, padded, ranks_of, whole
from tigon.train.estimate.meter import Ledger, Meter, tensors_of, watch_head
from tigon.train.estimate.reducing import Reducing
from tigon.train.model import is_sharded, set_fp8, sum_dtype
from tigon.train.objectives import Objective
from tigon.train.optim import ema_bytes, freeze, hidden_matrices, parts_of, state_bytes

# What cuBLAS takes once for each of two threads, forward's and backward's, from sm_90 on
CUBLAS = 2 * 32 * 2**20

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "average of weights",
    "gathered weights",
    "activations",
    "logits and loss",
    "communication",
    "teacher",
    "reference",
    "other",
)


@dataclass(frozen=True)
class Estimate:
    """Bytes of each GPU when it holds most, as torch.cuda.max_memory_allocated counts them."""

    kinds: dict[str, int]
    host: (
        int  # bytes of host memory for each rank: a copy for async_save, states that are offloaded
    )

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def estimate(
    model: CausalLM, objective: Objective, config: Config, world: int, compute: torch.dtype
) -> Estimate:
    """Of the first rank, for a whole model on the meta device, which is used up: hooks stay on it.

    `world` is the number of GPUs, `compute` the dtype of the computation there. Of experts that
    ranks share, each gets as many tokens as the others. ValueError for a model that ranks cannot
    share as the settings say.
    """
    param_dtype = getattr(torch, config.param_dtype)
    sizes = sizes_of(config, world)
    sharded = is_sharded(config, sizes.dividing, compute)
    take_part(model, sizes)
    set_fp8(model, config)
    freeze(model, config)
    shares = ranks_of(model, sizes.shards)
    hidden = hidden_matrices(model)
    states = average = 0.0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            numbers = padded(parameter, shares[parameter]) / shares[parameter]
            states += numbers * state_bytes(config, hidden=name in hidden)
            average += numbers * ema_bytes(config)
    lora = config.lora is not None  # the base in the computation's dtype, unlike the adapter
    own = {p: held(p, n, p.dtype if lora else param_dtype) for p, n in shares.items()}
    parameters = sum(own.values())
    saved = sum(size for p, size in own.items() if p.requires_grad) if lora else parameters
    copied = saved + states + average  # by async_save
    kept = states + average if config.optimizer_offload else 0.0
    cast = model.to("meta") if lora and not sharded else model.to("meta", compute)
    ledger = _weigh(cast, objective, config, sizes, param_dtype if sharded else None, compute)
    if sharded and config.sharding == "gradients":  # whole, besides shards of another dtype
        shards = parameters if compute != param_dtype else 0
        parameters = whole(model, sizes.shards, compute) + shards
    there = {"parameters": parameters + quantised_bytes(model)}  # each rank has all of the latter
    if not config.optimizer_offload:
        there |= {"optimizer": int(states), "average of weights": int(average)}
    kinds = dict.fromkeys(KINDS, 0) | ledger.at_peak | there
    kinds["other"] += CUBLAS
    host = int(kept + copied * config.async_save)
    return Estimate({kind: size for kind, size in kinds.items() if size}, host)


def _weigh(
    model: CausalLM,
    objective: Objective,
    config: Config,
    sizes: MeshSizes,
    sharded: torch.dtype | None,
    compute: torch.dtype,
) -> Ledger:
    """Two micro-batches of a step, if it has several: with the first one's gradients there."""
    ledger, world = Ledger(), sizes.shards
    meter = Meter(ledger, tensors_of(model))
    watch_head(meter, model.lm_head)
    gathering: Gathering | Reducing | None = None
    if sharded is not None and config.sharding == "gradients":
        gathering = Reducing(model, meter, world, sum_dtype(config), sharded)
    elif sharded is not None:
        one = config.batch_size == config.micro_batch_size * sizes.data
        shares = ranks_of(model, world)
        gathering = Gathering(model, meter, shares, model.dtype, sharded, one_backward=one)
        gathering.keeps = not config.optimizer_in_backward
    elif config.optimizer_in_backward:
        for part in parts_of(model):
            _free_together(part, meter)
    else:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: meter.relabel(p.grad, GRADIENTS)
                )
    count = max(1, -(-config.batch_size // (sizes.data * config.micro_batch_size)))
    # The gradients that graphs write stay, as if there had been another one
    last = 1 if config.cuda_graphs else min(count, 2) - 1
    other = objective.outline_beside(model, compute)
    if other is not None:
        count_in(other, meter, config, sizes, compute)
    objective.begin(model)
    model.train()
    with use("triton"), meter:
        for index in range(last + 1):
            rows = min(config.micro_batch_size, -(-config.batch_size // sizes.data))
            inputs = objective.resolve(model, stand_in(rows, config.seq_len, objective))
            sums = objective.sums(model, inputs)
            if gathering is not None:
                gathering.begin(reduce=index == last)
            loss = objective.loss(model, inputs, sums).loss
            meter.phase = "other"
            loss.backward()
            del loss, inputs, sums
            meter.phase = "activations"
            if gathering is not None:
                gathering.end()
    return ledger


def _free_together(part: list[nn.Parameter], meter: Meter) -> None:
    """With optimizer_in_backward: gradients go when the last one of a part is there."""
    missing = set(part)

    def arrived(parameter: Any) -> None:
        meter.relabel(parameter.grad, GRADIENTS)
        missing.discard(parameter)
        if not missing:
            for p in part:
                p.grad = None

    for parameter in part:
        parameter.register_post_accumulate_grad_hook(arrived)


def stand_in(rows: int, tokens: int, of: Objective | type[Objective] = Objective) -> MicroBatch:
    """A micro-batch of full rows on the meta device, with an objective's columns.

    Where prompts are shared they are all of a row but for a token of each other answer: how long
    they are is not known before the data are, and this is when attention copies most of their keys
    and values.
    """
    options: dict[str, Any] = {"device": "meta"}
    ids = torch.zeros(rows, tokens, dtype=torch.int64, **options)
    sequences, longest, prefixes = rows * of.group, -(-tokens // of.group), None
    if of.share_prompts:
        copies = (
            of.group - 1 or MAX_KEY_COPIES
        )  # of a group of one, with as many others as rows have
        sequences, longest = rows * (1 + copies), tokens - copies
        prefixes = np.array([[0, 0], *[[0, longest]] * copies])
        prefixes = (prefixes + tokens * np.arange(rows)[:, None, None]).reshape(-1, 2)
    per_token = {"supervised": torch.bool, **of.per_token}
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
            n: torch.ones(sequences, dtype=d, **options) for n, d in of.per_example.items()
        },
        sources=(),
        prefixes=prefixes,
    )
