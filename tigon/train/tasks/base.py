"""The base of all tasks: rows of data, their loss, and the metrics to log."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from tigon.data import Encoder, Entry, Loader, MicroBatch, PackedRows, Window, pack_examples
from tigon.data.mixture import Mixture
from tigon.data.packing import MIN_SHARED_FRACTION
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.models import Batch, CausalLM, CausalLMOutput, Targets
from tigon.models.moe import aux_loss_coef
from tigon.settings.config import Config, LossSettings, TaskSettings
from tigon.tokenizer import Tokenizer
from tigon.train.callbacks import OutputRequest, PassOutput, UserCallback
from tigon.train.distributed import World

# Settings with a variant for evaluation (eval_...), and all settings of tasks that predict tokens
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
    targets: Targets  # labels and the reduction of the loss
    training: bool = True  # or evaluation
    request: OutputRequest | None = None  # outputs that callbacks need of this pass


@dataclass(frozen=True)
class MicroBatchLoss:
    """Holds the part of a step's loss and metrics that one micro-batch adds."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached; of any shape
    output: PassOutput | None = None  # for callbacks, if `request` is given


class Task:
    """Defines a run's loss: how rows of data become examples, and the loss of a micro-batch.

    A new task is one file: a subclass, and its name in TASKS and in TASK_ROWS. It defines how data
    are encoded and packed (`encoder`, `rows`), what losses are divided by (`sums`), and the loss of
    a micro-batch. `sums` are reduced over all micro-batches and ranks of a step before the first
    loss, which can then be divided by a sum over the step: gradients and losses add up, and a run
    means the same on any number of ranks and micro-batches.
    """

    predicts_tokens: ClassVar[bool] = False  # whether it serves all of TOKEN_SETTINGS
    scores: ClassVar[bool] = False  # whether it learns a score for each sequence, and no token
    # Further settings that it serves: of TaskSettings and TOKEN_SETTINGS
    serves: ClassVar[frozenset[str]] = frozenset()
    refuses: ClassVar[Sequence[str]] = ()  # settings that all other tasks serve
    group: ClassVar[int] = 1  # examples that stay in one row
    unit: ClassVar[str] = "example"  # the name of a group in messages
    may_cut: ClassVar[bool] = True  # whether long examples may lose their end
    # Whether the examples of a group, or of several groups of one, answer the same prompt
    one_prompt: ClassVar[bool] = False
    share_prompts = False  # whether a shared prompt is computed once; set when the data are opened
    distinct = False  # whether groups are dropped whose examples are equal after truncation
    # Columns that the loss reads
    per_token: ClassVar[Mapping[str, torch.dtype]] = {}
    per_example: ClassVar[Mapping[str, torch.dtype]] = {}

    def __init__(self, config: Config, world: World):
        """Raises ValueError for settings that the task does not use."""
        self.config, self.world = config, world
        for setting in fields(LossSettings):
            if setting.name in TOKEN_SETTINGS and not self.predicts_tokens:
                self._check_unused(setting.name, setting.default)
        for setting in fields(TaskSettings):
            self._check_unused(setting.name, setting.default)
        for name in self.refuses:
            self._check_unused(name, getattr(Config, name))
        named = [e.name for e in config.eval_data if isinstance(e, Entry) and e.name is not None]
        if named and not self.predicts_tokens:
            raise ValueError(f"eval_data has name={named[0]}: task={config.task} has no use for it")
        self.callbacks = [UserCallback(name) for name in config.hooks]
        self.ends: set[int] = set()  # tokens that end a turn, once data has been opened
        self.digests: dict[str, str] = {}  # of the reference or teacher, which checkpoints keep

    def _check_unused(self, name: str, default: Any) -> None:
        """Raises ValueError for a setting that is given and that the task has no use for."""
        value = getattr(self.config, name)
        if value != default and name not in self.serves:
            task = self.config.task
            hint = ": seq_len is where rows are cut" if name == "max_length" else ""
            without = f"; leave it out, or give {name}={json.dumps(default)}"
            raise ValueError(f"{name}={value!r}: task={task} has no use for it{hint}{without}")

    def check_frozen_models(self, tokenizer: Tokenizer, source: Path | None) -> None:
        """Raises ValueError if the reference or teacher does not fit the model, which is read from
        `source`. Called before the data are read."""

    def check_digest(self, name: str, find: Callable[[], str]) -> str:
        """Returns the digest of the "reference" or "teacher", which rank 0 computes by `find`, for
        checkpoints to keep; that of the checkpoint, if the model's files are gone. Raises
        ValueError if the resumed run began with another model."""
        known, config = self.digests.get(name), self.config

        def find_or_keep() -> str:
            try:
                found = find()
            except OSError:
                if known is None:
                    raise
                return known
            if known not in (None, found):
                raise ValueError(
                    f"{getattr(config, name) or config.model or config.init} is not the {name} "
                    f"that the run began with: give {name} and its files as they were, or begin "
                    "another run_dir"
                )
            return found

        self.digests[name] = self.world.share(find_or_keep)
        return self.digests[name]

    def encoder(self, tokenizer: Tokenizer) -> Encoder:
        """Returns the encoder of data rows to examples with all columns that the loss reads."""
        raise NotImplementedError

    def rows(self, window: Window, *, least_shared: float = MIN_SHARED_FRACTION) -> PackedRows:
        """Returns the examples of a window in rows; by default no example is split. Prompts are not
        shared in a window where that saves less than the share `least_shared` of its tokens."""
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
        """Returns notes on the data to print before training; by default none."""
        return []

    def open(self, model: CausalLM, loaders: Sequence[Loader], *, trained: bool) -> None:
        """Loads or computes the reference or teacher; called on every rank before the first step.

        `trained` says that the model has been trained since its initial weights. Estimates call
        `rehearse` or `meta_frozen_model` instead.
        """

    def rehearse(self, model: CausalLM) -> None:
        """Prepares for timing a few steps, whose losses do not matter; replaces `open`."""

    def meta_frozen_model(self, model: CausalLM, dtype: torch.dtype) -> CausalLM | None:
        """Returns the reference or teacher on the meta device, or None; replaces `open` in memory
        estimates. Raises ValueError if it does not fit `model`. `dtype` is the compute dtype."""
        return None

    def setting(self, name: str, *, training: bool) -> Any:
        """Returns one of EVAL_SETTINGS for training, or for evaluation."""
        value = None if training else getattr(self.config, f"eval_{name}")
        return getattr(self.config, name) if value is None else value

    def targets(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Returns "labels", the input ids with IGNORE_INDEX where the column "supervised" is False,
        and the column "loss_weights" if there is one."""
        columns = micro_batch.per_token
        labels = micro_batch.input_ids.masked_fill(~columns["supervised"], IGNORE_INDEX)
        weights = {name: columns[name] for name in ("loss_weights",) if name in columns}
        return {"labels": labels, **weights}

    def options(self, micro_batch: MicroBatch, *, training: bool) -> dict[str, Any]:
        """Returns further arguments of `Targets.of`; by default all positions count."""
        return {"logits_to_keep": 0}

    def resolve(
        self, model: CausalLM, micro_batch: MicroBatch, *, training: bool = True
    ) -> StepInputs:
        """Returns the model's inputs and targets for a micro-batch on the device."""
        batch = Batch.of(model, **micro_batch.inputs())
        options = self.options(micro_batch, training=training)
        options |= self.targets(micro_batch)
        targets = Targets.of(batch, loss_reduction=self.config.loss_reduction, **options)
        return StepInputs(micro_batch, batch, targets, training)

    def sums(self, model: CausalLM, inputs: StepInputs) -> dict[str, Tensor]:
        """Returns this micro-batch's part of each sum over the step that `loss` divides by."""
        return {"items": inputs.targets.items}

    def loss(self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]) -> MicroBatchLoss:
        """Returns this micro-batch's part of the step's loss and metrics.

        `sums` are those of the whole step. It must not wait for values of the device; the model
        itself waits only for counts, such as that of the targets. Context parallelism: all ranks
        return the loss of whole rows (`tigon.parallel.gather_output`).
        """
        raise NotImplementedError

    def evaluate(
        self, model: CausalLM, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> MicroBatchLoss:
        """Returns the same for held-out data, which count as one step, without gradients."""
        return self.loss(model, inputs, sums)

    def balance(
        self, model: CausalLM, output: CausalLMOutput, inputs: StepInputs, sums: dict[str, Tensor]
    ) -> Tensor | float:
        """Returns this micro-batch's part of the loss that balances experts, 0 without it."""
        coef = aux_loss_coef(model.config)
        if coef is None or output.aux_loss is None or not inputs.training:
            return 0.0
        return coef * inputs.targets.items / sums["items"].clamp(min=1) * output.aux_loss

    def metrics_to_log(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the scalars for metrics.jsonl from the metrics of a step, which are sums over its
        micro-batches and ranks; by default these sums."""
        return metrics
