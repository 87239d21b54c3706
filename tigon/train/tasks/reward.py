"""Reward models: one score for a whole conversation, higher for the answer that is preferred.

# P pairs, n sequences
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tigon.data import Encoder, Loader, MicroBatch, Mixture, PairEncoder
from tigon.data.mixture import Corpus
from tigon.models import Batch, CausalLM, Targets
from tigon.parallel import gather_output
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.train.distributed import World
from tigon.train.tasks.base import MicroBatchLoss, StepInputs, Task
from tigon.train.tasks.losses import bradley_terry


class Reward(Task):
    """Learns a score of each sequence from pairs, by Bradley and Terry's model with margins.

    The model's head has one score in place of the vocabulary, and is exported as the family's
    ForSequenceClassification. That class finds the last token of a padded sequence by the id of the
    padding, so a padding token is chosen with which no sequence ends. Sequences that do not fit are
    dropped, as the score belongs to the end.
    """

    serves = frozenset(("max_length", "center_rewards_coefficient"))
    refuses = (
        "sample_prompts",
        "train_on",
        "train_on_empty_thinking",
        "loss_reduction",
        "streaming",
        "router_aux_loss_coef",
    )
    group = 2
    unit = "pair"
    scores = True
    may_cut = False
    one_prompt = True
    per_example: ClassVar[Mapping[str, torch.dtype]] = {"margin": torch.float32}

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        self.tokenizer: Tokenizer | None = None

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        self.tokenizer = tokenizer
        return PairEncoder(tokenizer, margin=True, shared_prompt=False)

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        """Chooses the pad token, after which transformers reads scores, for model and tokenizer."""
        corpora = [x.windows.corpus for x in loaders if isinstance(x.windows, Mixture)]
        assert self.tokenizer is not None
        pad = choose_pad(model.config.pad_token_id, self.tokenizer, corpora)
        model.config = replace(model.config, pad_token_id=pad)
        if self.tokenizer.pad_token_id != pad:
            self.tokenizer.use_pad(pad)

    def resolve(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool = True
    ) -> StepInputs:
        """Returns the model's inputs, with targets that have no labels and select all positions."""
        batch = Batch.of(model, **micro_batch.inputs())
        return StepInputs(micro_batch, batch, Targets.of(batch, logits_to_keep=0), training)

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        return {"pairs": torch.full((), len(inputs.micro_batch.spans) // 2, device=model.device)}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns a micro-batch's part of the mean Bradley-Terry loss of pairs of scores, with the
        share of pairs in the right order, the margin and the reward as metrics."""
        micro_batch, pairs = inputs.micro_batch, sums["pairs"].clamp(min=1)
        output = model(batch=inputs.batch, targets=inputs.targets)
        logits = gather_output(model, output, inputs.targets).logits
        assert logits is not None
        scores = logits.flatten()[micro_batch.spans[:, 1] - 1].float()
        chosen, rejected = scores.unflatten(0, (-1, 2)).unbind(1)
        margin = micro_batch.per_example["margin"].unflatten(0, (-1, 2))[:, 0]
        center = self.config.center_rewards_coefficient
        losses = bradley_terry(chosen, rejected, margin, center=center)
        values = {
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "mean_reward": (chosen + rejected) / 2,
        }
        means = {n: x.detach().sum(dtype=torch.float64) / pairs for n, x in values.items()}
        return MicroBatchLoss(losses.sum() / pairs, means)


def choose_pad(given: int | None, tokenizer: Tokenizer, corpora: Sequence[Corpus]) -> int:
    """Returns a padding token with which no sequence ends, and which is not eos.

    It is the model's padding, the tokenizer's, or else one of its special tokens, at best one that
    does not occur in the data. Raises ValueError if there is none.
    """
    ends, seen = {tokenizer.eos_token_id}, set[int]()
    for corpus in corpora:
        for part in range(len(corpus.parts)):
            examples = corpus.open(part)
            ends |= set(np.unique(examples.tokens[examples.offsets[1:] - 1]).tolist())
            seen |= set(np.unique(examples.tokens).tolist())
    added: dict[int, Any] = tokenizer.backend.get_added_tokens_decoder()
    special = sorted(i for i, token in added.items() if token.special)
    known = [i for i in (given, tokenizer.pad_token_id) if i is not None]
    candidates = [*known, *(i for i in special if i not in seen), tokenizer.unk_token_id, *special]
    for token in candidates:
        if token is not None and token not in ends:
            return token
    raise ValueError(
        "the tokenizer has no special token with which no sequence ends, and transformers would "
        "take padding for the end of a sequence: add a pad token to the tokenizer"
    )
