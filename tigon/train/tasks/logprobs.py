"""Log-probabilities of answers under the model and its reference, for tasks that compare them.

# B lines, T tokens of a line, n sequences
"""

import gc
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.data import Loader, MicroBatch, Mixture
from tigon.kernels.loss.terms import LogProbs
from tigon.models import CausalLM, CausalLMOutput
from tigon.parallel import gather_output
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.distributed import World, reshard
from tigon.train.model import (
    build_model,
    check_frozen,
    load_frozen,
    meta_model,
    meta_model_from_path,
)
from tigon.train.tasks.base import StepInputs, Task

COMMON_SETTINGS = frozenset(("max_length", "logits_bytes", "eval_logits_bytes"))


class AnswerTask(Task):
    """Base of the tasks over log-probabilities of answers.

    If the task `refers` to a reference, its log-probabilities are a column of the micro-batches,
    computed before training. They are computed in each step if the reference is the model without
    its adapters, and for a stream, whose rows are not known before.
    """

    refuses = ("loss_reduction", "train_on")
    unit = "answer"
    refers: bool = False
    default_beta: ClassVar[float] = 0.1
    losses: ClassVar[Sequence[str]] = ()  # the values of loss_type; the first is the default

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.beta = self.default_beta if config.beta is None else config.beta
        self.loss_type: str = config.loss_type or next(iter(self.losses), "")
        if self.losses and self.loss_type not in self.losses:
            raise ValueError(
                f"loss_type={config.loss_type} of task={config.task} is not one of "
                f"{', '.join(self.losses)}"
            )
        self.live: Callable[[StepInputs], Tensor] | None = None

    def check_frozen_models(self, tokenizer: Tokenizer, source: Path | None) -> None:
        if path := self.config.reference:
            check_frozen(self.config, path, tokenizer)

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        """Computes and stores the reference's log-probabilities, or each step's."""
        config, world = self.config, self.world
        if not self.refers:
            return
        weights = self.check_digest("reference", partial(reference.model_digest, config))
        if self._keeps_to_base(model):
            return
        if not all(isinstance(loader.windows, Mixture) for loader in loaders):
            other = self._reference_model()
            self.live = lambda inputs: self._logprobs_by(other, inputs.micro_batch)
            return

        @cache
        def load_reference() -> CausalLM:  # only if the cache lacks the log-probabilities
            if config.reference or trained:
                return self._reference_model()
            return model

        def compute(rows: MicroBatch) -> Tensor:
            return self._logprobs_by(load_reference(), rows)

        # Training decides by window whether shared prompts pay, and its windows differ from these
        rows = partial(self.rows, least_shared=0.0)
        options: dict[str, Any] = {"shared": self.share_prompts, "distinct": self.distinct}
        for loader, name in zip(loaders, ("data", "eval_data"), strict=False):
            reference.attach(
                loader, config, world, compute, rows, weights=weights, name=name, **options
            )
        reshard(model)
        load_reference.cache_clear()
        gc.collect()  # a sharded model refers to itself, and would keep its memory for a while

    def rehearse(self, model: CausalLM) -> None:
        """Puts zeros in place of another reference's log-probabilities, for a dry run's steps."""
        self.live = lambda inputs: inputs.micro_batch.input_ids.new_zeros((), dtype=torch.float)

    def meta_frozen_model(self, model: CausalLM, dtype: torch.dtype) -> CausalLM | None:
        """Returns the reference that a stream needs in every step, on the meta device; None if its
        log-probabilities are computed before training or by the model without its adapter."""
        config = self.config
        if not (self.refers and config.streaming) or self._keeps_to_base(model):
            return None
        if config.reference:
            other = meta_model_from_path(config.reference, dtype)
        else:
            other = meta_model(config, getattr(torch, config.param_dtype))
        self.live = lambda inputs: self._logprobs_by(other, inputs.micro_batch)
        return other

    def _keeps_to_base(self, model: CausalLM) -> bool:
        return model.active_adapter is not None and not self.config.reference

    def _reference_model(self) -> CausalLM:
        """Returns the frozen model of `reference`, or else the run's initial model."""
        config, world = self.config, self.world
        with world.raise_on_all_ranks():
            if config.reference:
                other = load_frozen(config, world, config.reference)
            else:
                other = build_model(config, world).requires_grad_(False).eval()
        return other

    def reference_logprobs(self, model: CausalLM, inputs: StepInputs) -> Tensor:
        """Returns the reference's log-probabilities, fp32 [B, T]."""
        if self._keeps_to_base(model):
            with torch.no_grad(), model.adapters_disabled():
                return self.forward(model, inputs)[0]
        if self.live is not None:
            return self.live(inputs)
        return inputs.micro_batch.per_token[reference.COLUMN]

    def forward(self, model: CausalLM, inputs: StepInputs) -> tuple[Tensor, CausalLMOutput]:
        """Returns the log-probabilities of learned tokens, fp32 [B, T], each at the token before,
        and the model's output."""
        output = model(
            batch=inputs.batch,
            targets=inputs.targets,
            criteria=(LogProbs(),),
            metrics=(),
            return_logits=False,
            logits_bytes=self.setting("logits_bytes", training=inputs.training),
        )
        output = gather_output(model, output, inputs.targets)
        assert output.logprobs is not None
        return output.logprobs, output

    @torch.no_grad()
    def _logprobs_by(self, other: CausalLM, rows: MicroBatch) -> Tensor:
        """Returns the log-probabilities of the rows by another model."""
        training = other.training
        other.eval()
        inputs = Task.resolve(self, other, rows, training=False)  # not the override of a subclass
        logprobs, _ = self.forward(other, inputs)
        other.train(training)
        return logprobs


def answer_mask(inputs: StepInputs) -> Tensor:
    """Returns a mask [B, T] of the positions that predict a token of an answer."""
    supervised = inputs.micro_batch.per_token["supervised"]
    return inputs.targets.mask & F.pad(supervised[:, 1:], (0, 1))


def sum_per_sequence(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Returns fp64 sums [n] of values [B, T], 0 on padding, over each sequence."""
    sequence = sequence_indices(micro_batch, values)
    sums = values.new_zeros(len(micro_batch.spans) + 1, dtype=torch.float64)
    sums = sums.index_add(0, sequence.flatten(), values.flatten().double())
    return sums[:-1].float()


def sequence_indices(micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """Returns each position's sequence, int64 [B, T]; padding has the next one's, or n."""
    indices = torch.arange(like.numel(), device=like.device)
    stops = micro_batch.spans[:, 1].contiguous()
    return torch.searchsorted(stops, indices, right=True).view(like.shape)
