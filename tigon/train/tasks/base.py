"""The base of all tasks: rows of data, their loss, and the metrics to log."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tigon.data import Encoder, Entry, Loader, MicroBatch, PackedRows, Window, pack_examples
from tigon.data.mixture import Mixture
from tigon.data.packing import MIN_SHARED_FRACTION
from tigon.kernels.loss.api import IGNORE_INDEX
from tigon.models import Batch, CausalLM, Targets
from tigon.tokenizer import Tokenizer
from tigon.train.callbacks import HookRequest, Hooks, PassOutput
from tigon.train.config import Config, LossSettings, ObjectiveSettings
from tigon.train.distributed import World

# Settings that a value in evaluation may differ from, and all that need a prediction of tokens
EVAL_SETTINGS = (
    "metrics",
    "return_logits",
    "logits_to_keep",
    "logits_bytes",
    "label_smoothing",
    "z_loss",
)
TOKEN_SETTINGS = (
    *EVAL_SETTINGS,
    *(f"eval_{name}" for name in EVAL_SETTINGS),
    "hooks",
    "predictions",
)


@dataclass(frozen=True)
class StepInputs:
    """A micro-batch on the device, resolved once for all passes that a step makes over it."""

    micro_batch: MicroBatch  # columns per token and per example, spans of the sequences
    batch: Batch  # what the model reads
    targets: Targets  # what it is to predict
    training: bool = True  # or evaluation
    request: HookRequest | None = None  # what the watchers of this pass need; None without any


@dataclass(frozen=True)
class MicroBatchLoss:
    """What one micro-batch adds to a step; the parts of all micro-batches and ranks add up."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached; of any shape
    output: PassOutput | None = None  # what the pass computed, if it has watchers


class Task:
    """What a run learns from its files, and how.

    A new task is one file: a subclass, and its name in TASKS. It says what becomes of
    the data (`encoder`, `rows`), what a step's losses are divided by (`sums`), and the loss of
    one micro-batch. The loop adds up `sums` over all micro-batches and ranks before the first
    loss is computed, so that a loss can be divided by what the whole step holds; gradients and
    losses then add up, and a run means the same on any number of ranks and micro-batches.
    """

    learns: ClassVar[str] = "rows of its own"  # what --help says of it
    predicts_tokens: ClassVar[bool] = False  # so that it serves the settings of OF_TOKENS
    scores: ClassVar[bool] = False  # whether it learns a score of each sequence, and no token
    # Others that it serves: of ObjectiveSettings, and of OF_TOKENS
    serves: ClassVar[frozenset[str]] = frozenset()
    # What estimates of memory and time take for data: sequences of a row, and their columns
    group: ClassVar[int] = 1
    unit: ClassVar[str] = "example"  # what a person calls a group
    may_cut: ClassVar[bool] = True  # whether what is too long may lose its end
    # Whether answers to one prompt are examples of a group, or of groups of one, and of one pass
    one_prompt: ClassVar[bool] = False
    share_prompts = False  # to compute it once; `sharing.decide` says
    distinct = False  # whether a group is left out whose examples are equal once they are cut
    per_token: ClassVar[Mapping[str, torch.dtype]] = {}
    per_example: ClassVar[Mapping[str, torch.dtype]] = {}

    def __init__(self, config: Config, world: World):
        """Raises ValueError for settings that the objective cannot serve."""
        self.config, self.world = config, world
        for setting in fields(LossSettings):
            if setting.name in TOKEN_SETTINGS and not self.predicts_tokens:
                self._check_unused(setting.name, setting.default)
        for setting in fields(ObjectiveSettings):
            self._check_unused(setting.name, setting.default)
        named = [e.name for e in config.eval_data if isinstance(e, Entry) and e.name is not None]
        if named and not self.predicts_tokens:
            raise ValueError(f"eval_data has name={named[0]}: task={config.task} has no use for it")
        self.hooks = Hooks(config.hooks, config.hook_every)
        self.ends: set[int] = set()  # tokens that end a turn, once data has been opened

    def _check_unused(self, name: str, default: Any) -> None:
        value = getattr(self.config, name)
        if value != default and name not in self.serves:
            task = self.config.task
            hint = ": seq_len is where rows are cut" if name == "max_length" else ""
            without = f"; leave it out, or give {name}={json.dumps(default)}"
            raise ValueError(f"{name}={value!r}: task={task} has no use for it{hint}{without}")

    def check_frozen_models(self, tokenizer: Tokenizer, source: Path | None) -> None:
        """Called before the data are read, where the run goes on from `source`. ValueError for
        another model that must run beside the run's, and does not go with it."""

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        """What makes examples of the data's rows, with all columns that the loss reads."""
        raise NotImplementedError

    def rows(self, window: Window, *, least_shared: float = MIN_SHARED_FRACTION) -> PackedRows:
        """Which examples of a window share a row: whole ones, unless overridden."""
        config = self.config
        return pack_examples(
            window,
            config.seq_len,
            packing=config.packing,
            truncate=config.truncate and self.may_cut,
            max_length=config.max_length,
            share_prompts=self.share_prompts,
            min_fraction=least_shared,
            distinct=self.distinct,
        )

    def notes(self, data: Mixture, *, held_out: bool) -> list[str]:
        """What else a person should know of the data before training, a line each."""
        return []

    def begin(self, model: CausalLM) -> None:
        """Called once, before the first step, when all of the model's settings are made."""

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        """Called on every rank before `begin` of a run, and by no estimate: what is to be computed
        or read before training. `trained`: the model is not as it was at the beginning."""

    def rehearse(self, model: CausalLM) -> None:
        """Called in place of `open` by whoever times a few steps whose losses do not matter."""

    def meta_frozen_model(self, model: CausalLM, dtype: torch.dtype) -> CausalLM | None:
        """Called in place of `open` by estimates of memory, on the meta device: the frozen model
        that runs beside `model` in every step, which the passes that follow call. None: no model
        does. `dtype`: of the computation. ValueError for one that does not go with `model`."""
        return None

    def setting(self, name: str, *, training: bool) -> Any:
        """One of TWINS, as it is in training or in evaluation."""
        twin = None if training else getattr(self.config, f"eval_{name}")
        return getattr(self.config, name) if twin is None else twin

    def targets(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """What the model is told of the loss: labels, where the column "supervised" is True, and
        the column "loss_weights" if there is one."""
        columns = micro_batch.per_token
        labels = micro_batch.input_ids.masked_fill(~columns["supervised"], IGNORE_INDEX)
        weights = {name: columns[name] for name in ("loss_weights",) if name in columns}
        return {"labels": labels, **weights}

    def options(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool
    ) -> dict[str, Any]:
        """More arguments of `Targets.of`."""
        return {}

    def resolve(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool = True
    ) -> StepInputs:
        """The micro-batch, which is on the device, as the model takes it."""
        batch = Batch.of(model, **micro_batch.inputs())
        options = self.options(model, micro_batch, training=training)
        options |= self.targets(micro_batch)
        targets = Targets.of(batch, loss_reduction=self.config.loss_reduction, **options)
        return StepInputs(micro_batch, batch, targets, training)

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """This micro-batch's part of every sum over the whole step that `loss` divides by."""
        return {"items": inputs.targets.items}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """This micro-batch's part of the step's loss, differentiable, and of its metrics.

        `sums` are those of the whole step. No value may wait for the device.
        """
        raise NotImplementedError

    def evaluate(
        self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> MicroBatchLoss:
        """The same for held-out data, all of which counts as one step; without gradients."""
        return self.loss(model, inputs, sums)

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scalars for metrics.jsonl from the metrics of a whole step."""
        return metrics
