"""Distillation: learns the distributions of a teacher, and optionally the labels.

# B lines, T tokens of a line, K tokens whose log-probabilities were stored
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.data import Encoder, Loader, TopEncoder
from tigon.kernels.loss.terms import KL, CrossEntropy, LossTerm
from tigon.models import MODELS, Batch, CausalLM
from tigon.models import CausalLMOutput as Output
from tigon.models.pretrained.load import read_config
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.train.model import (
    check_frozen,
    load_frozen,
    meta_model,
    meta_model_from_path,
    sampled_digest,
)
from tigon.train.tasks.base import MicroBatchLoss, StepInputs
from tigon.train.tasks.language_modeling import CrossEntropyTask
from tigon.weights import Repository


class Distill(CrossEntropyTask):
    """Minimizes `(1 - w) t^2 D + w CE` of each token that fine-tuning would learn.

    D is the divergence of the distributions at temperature t: KL(teacher || model) with `beta` 0,
    KL(model || teacher) with 1, between them the generalized Jensen-Shannon divergence of GKD
    (arXiv 2306.13649). w is `cross_entropy_weight`; t^2 keeps the scale of gradients (arXiv
    1503.02531). The teacher is a model with the same vocabulary, or its most likely tokens are in
    the rows: the other tokens are then one outcome. "kl", the mean of D, is logged in addition to
    the metrics of fine-tuning.
    """

    serves = frozenset(("beta", "teacher", "temperature", "cross_entropy_weight"))

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.beta = 0.0 if config.beta is None else config.beta
        self.weight = config.cross_entropy_weight
        self.scale = (1 - self.weight) * config.temperature**2
        self.teacher: CausalLM | None = None

    def check_frozen_models(self, tokenizer: Tokenizer, source: Path | None) -> None:
        if path := self.config.teacher:
            check_frozen(self.config, path, tokenizer)
            model = meta_model(self.config, torch.float32, source)
            self._check_size(model, max(tokenizer.backend.get_vocab().values()))

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        if not self.config.teacher:
            return TopEncoder(tokenizer)
        return self.chat_encoder(tokenizer)

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        """Loads the teacher, if it is a model; raises ValueError if the run began with another."""
        if path := self.config.teacher:
            self.check_digest("teacher", partial(sampled_digest, path))
        self.rehearse(model)

    def rehearse(self, model: CausalLM) -> None:
        path, world = self.config.teacher, self.world
        if not path:
            return
        with world.raise_on_all_ranks():
            size = model.config.vocab_size
            self.teacher = load_frozen(self.config, world, path, vocab_size=size)

    def meta_frozen_model(self, model: CausalLM, dtype: torch.dtype) -> CausalLM | None:
        """Returns the teacher on the meta device, which an estimate's passes use then; None if the
        rows have its distributions."""
        if path := self.config.teacher:
            self.teacher = meta_model_from_path(path, dtype, vocab_size=model.config.vocab_size)
        return self.teacher

    def _check_size(self, model: CausalLM, last: int) -> None:
        """Raises ValueError unless both vocabularies have the same size, or the teacher's head only
        has further rows beyond the `last` token, which are dropped."""
        own = model.config.vocab_size
        other = read_config(Repository(self.config.teacher), MODELS).vocab_size
        if other == own or last < own < other:
            return
        hint = ""
        if last < other:
            hint = (
                f"; rows from {other} on belong to no token: cut the model to {other} rows, with "
                f"resize_token_embeddings({other}) and save_pretrained of transformers"
            )
        raise ValueError(
            f"teacher={self.config.teacher} has a vocabulary of {other} tokens, and the model "
            f"one of {own}: distributions over both cannot be compared{hint}"
        )

    def criteria(self, inputs: StepInputs) -> tuple[LossTerm, ...]:
        # Metrics need the cross-entropy even if its weight is 0
        return self._divergence(inputs), CrossEntropy(coefficient=self.weight)

    def _divergence(self, inputs: StepInputs) -> LossTerm:
        """Returns the KL term, from the teacher's hidden states or stored distributions."""
        options: dict[str, Any] = {"beta": self.beta, "temperature": self.config.temperature}
        columns = inputs.micro_batch.per_token
        if self.teacher is not None:
            teacher = self.teacher
            with torch.no_grad():
                batch = Batch.of(teacher, **inputs.micro_batch.inputs())
                hidden = teacher(batch=batch, logits_to_keep=1, return_hidden=True).hidden
            kl = KL(teacher_hidden=hidden, teacher=teacher.lm_head, **options)
        elif "teacher_tokens" in columns:
            tokens, logprobs = (
                F.pad(columns[name][:, 1:], (0, 0, 0, 1))
                for name in ("teacher_tokens", "teacher_logprobs")
            )
            kl = KL(teacher_tokens=tokens.long(), teacher_logprobs=logprobs, **options)
        else:  # an estimate, whose rows have no distributions
            return CrossEntropy(coefficient=self.scale)
        return replace(kl, coefficient=self.scale)

    def _part(
        self, loss: Tensor, output: Output, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> MicroBatchLoss:
        """Adds "kl", the divergence without its factor, to the metrics of a micro-batch."""
        part = super()._part(loss, output, inputs, sums)
        divergence = output.criteria[0].detach().double() / self.scale
        if not inputs.training:  # a sum, there
            divergence = divergence / sums["items"].clamp(min=1)
        return replace(part, metrics=part.metrics | {"kl": divergence})
