"""Answers as their log-probabilities, by the model and by what it is compared with.

# B lines, T tokens of a line, n sequences
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.data import Loader, MicroBatch, Mixture
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.kernels.loss.terms import LogProbs
from tigon.models import CausalLM, CausalLMOutput, aux_loss_coef
from tigon.tokenizer import Tokenizer
from tigon.train import reference
from tigon.train.config import Config
from tigon.train.distributed import World, reshard
from tigon.train.model import (
    base_digest,
    build_model,
    check_frozen,
    load_frozen,
    meta_model,
    meta_model_from_path,
    sampled_digest,
)
from tigon.train.tasks.base import StepInputs, Task

COMMON_SETTINGS = frozenset(("max_length", "logits_bytes", "eval_logits_bytes"))


class AnswerTask(Task):
    """A task over the log-probabilities of answers.

    Where it needs a reference (`refers`), its log-probabilities are a column of the micro-batches,
    computed before training. They are computed anew at each step where the reference is the model
    without its adapters, and for a stream, whose rows are not known before.
    """

    unit = "answer"
    refers: bool = False
    default_beta: ClassVar[float] = 0.1
    losses: ClassVar[Sequence[str]] = ()  # the values of loss_type; the first is the default

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        for name in ("loss_reduction", "train_on"):
            value = getattr(config, name)
            if value != getattr(Config, name):
                raise ValueError(f"{name}={value}: task={config.task} has no use for it")
        self.beta = self.default_beta if config.beta is None else config.beta
        self.loss_type: str = config.loss_type or next(iter(self.losses), "")
        if self.losses and self.loss_type not in self.losses:
            raise ValueError(
                f"loss_type={config.loss_type} of task={config.task} is not one of "
                f"{', '.join(self.losses)}"
            )
        self.live: Callable[[StepInputs], Tensor] | None = None

    def encoder_options(self) -> dict[str, bool]:
        """What the encoders of all such objectives take."""
        config = self.config
        return {
            "train_on_empty_thinking": config.train_on_empty_thinking,
            "skip_bad_rows": config.bad_rows == "skip",
        }

    def check_frozen_models(self, tokenizer: Tokenizer, source: Path | None) -> None:
        if path := self.config.reference:
            check_frozen(self.config, path, tokenizer)

    def options(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool
    ) -> dict[str, Any]:
        return {"logits_to_keep": 0}

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        config, world = self.config, self.world
        if not self.refers:
            return
        streams = not all(isinstance(loader.windows, Mixture) for loader in loaders)
        digest = _sample_digest if streams else reference.weights_digest
        known = partial(reference.shared_digest, config, world, trained=trained)
        if config.lora is not None and config.lora.quantize is None:
            known = partial(known, base=lambda: digest(replace(config, reference="")))
        if self._keeps_to_base(model):
            known(lambda: reference.WITHOUT_ADAPTERS)  # resume.check_base has seen to its weights
            self.live = lambda inputs: self._base_logprobs(model, inputs)
            return
        if streams:
            known(lambda: digest(config))
            other = self._reference_model()
            self.live = lambda inputs: self._logprobs_by(other, inputs.micro_batch)
            return

        @cache
        def chosen() -> CausalLM:  # only if the cache does not have what it would compute
            if config.reference or trained:
                return self._reference_model()
            return model

        def make() -> reference.Pass:
            by = chosen()
            return lambda rows: self._logprobs_by(by, rows)

        weights = known(lambda: digest(config))
        for loader, name in zip(loaders, ("data", "eval_data"), strict=False):
            how: dict[str, Any] = {"shared": self.share_prompts, "distinct": self.distinct}
            how |= {"weights": weights, "name": name}
            # Whether shared prompts pay is said of a window, and the training's are others
            rows = partial(self.rows, least_shared=0.0)
            reference.attach(loader, config, world, make, rows, **how)
        reshard(model)
        chosen.cache_clear()
        gc.collect()  # what is sharded refers to itself, and would keep its memory for a while

    def rehearse(self, model: CausalLM) -> None:
        if self._keeps_to_base(model):
            self.live = lambda inputs: self._base_logprobs(model, inputs)
        else:
            self.live = lambda inputs: inputs.micro_batch.input_ids.new_zeros((), dtype=torch.float)

    def meta_frozen_model(self, model: CausalLM, dtype: torch.dtype) -> CausalLM | None:
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
        """One besides the model that is trained."""
        config, world = self.config, self.world
        with world.raise_on_all_ranks():
            if config.reference:
                other = load_frozen(config, world, config.reference)
            else:
                other = build_model(config, world).requires_grad_(False).eval()
        return other

    def reference_logprobs(self, inputs: StepInputs) -> Tensor:
        """fp32 [B, T], as those of the model."""
        if self.live is not None:
            return self.live(inputs)
        return inputs.micro_batch.per_token[reference.COLUMN]

    def forward(self, model: CausalLM, inputs: StepInputs) -> CausalLMOutput:
        """With the log-probabilities of what is learned, fp32 [B, T], each at the token before."""
        return model(
            batch=inputs.batch,
            targets=inputs.targets,
            criteria=(LogProbs(),),
            metrics=(),
            return_logits=False,
            logits_bytes=self.setting("logits_bytes", training=inputs.training),
        )

    @torch.no_grad()
    def _base_logprobs(self, model: CausalLM, inputs: StepInputs) -> Tensor:
        with model.adapters_disabled():
            logprobs = self.forward(model, inputs).logprobs
        assert logprobs is not None
        return logprobs

    @torch.no_grad()
    def _logprobs_by(self, other: CausalLM, rows: MicroBatch) -> Tensor:
        training = other.training
        other.eval()
        inputs = Task.resolve(self, other, rows, training=False)  # whatever a subclass adds
        logprobs = self.forward(other, inputs).logprobs
        other.train(training)
        assert logprobs is not None
        return logprobs

    def balance(
        self, model: CausalLM, output: CausalLMOutput, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> Tensor | float:
        """This micro-batch's part of what balances experts, in training."""
        coef = aux_loss_coef(model.config)
        if coef is None or output.aux_loss is None or not inputs.training:
            return 0.0
        return coef * inputs.targets.items / sums["items"].clamp(min=1) * output.aux_loss


def _sample_digest(config: Config) -> str:
    """Returns a digest from samples of the weights, so that large ones are not read twice."""
    return sampled_digest(config.reference) if config.reference else base_digest(config)


def target_mask(inputs: StepInputs) -> Tensor:
    """Bool [B, T]: where a token is predicted that the loss is of."""
    assert inputs.targets.labels is not None
    return inputs.targets.labels != IGNORE_INDEX


def answer_mask(inputs: StepInputs) -> Tensor:
    """Bool [B, T]: where a token of an answer is predicted."""
    said = inputs.micro_batch.per_token["supervised"]
    return target_mask(inputs) & F.pad(said[:, 1:], (0, 1))


def sum_per_sequence(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """The sum of values [B, T] over each sequence: [n], added up in fp64.

    So it does not depend on what else is in a row. Values of padding must be 0.
    """
    sequence = sequence_indices(micro_batch, values)
    sums = values.new_zeros(len(micro_batch.spans) + 1, dtype=torch.float64)
    sums = sums.index_add(0, sequence.flatten(), values.flatten().double())
    return sums[:-1].float()


def sequence_indices(micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """int64 [B, T], the number of the sequence that each position is in; of padding, that of the
    next one, or n."""
    places = torch.arange(like.numel(), device=like.device)
    stops = micro_batch.spans[:, 1].contiguous()
    return torch.searchsorted(stops, places, right=True).view(like.shape)


def is_padding(micro_batch: MicroBatch, sequence: Tensor) -> Tensor:
    """Bool [B, T], given the sequence that each position is in."""
    starts = F.pad(micro_batch.spans[:, 0], (0, 1), value=sequence.numel())
    places = torch.arange(sequence.numel(), device=sequence.device)
    return places.view(sequence.shape) < starts[sequence]
