"""The forward contract that every family shares.

# B batch, T tokens, n kept tokens, C model dim, V vocab
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tigon.distributed.collectives import Ranks
from tigon.kernels.attention.api import Backend, check_backend
from tigon.kernels.runtime import autocast_dtype
from tigon.layers import LMHead, QuantizedWeight, RotaryEmbedding, StaticCache
from tigon.models.arguments import (
    BATCH,
    PASS,
    TARGETS,
    Defaults,
    ItemArguments,
    PassArguments,
    among,
    check_keywords,
    spelled_out,
)
from tigon.models.config import Config
from tigon.models.context_batch import Whole, split
from tigon.models.criteria import Asked
from tigon.models.decoder import Block, Decoder
from tigon.models.inputs import Batch
from tigon.models.loss import Targets, positions_at
from tigon.models.moe import ROUTING_METRICS, aux_loss_coef, balance_of
from tigon.models.outputs import CausalLMOutput
from tigon.models.pretrained.names import SCORE, Names
from tigon.utils import memory
from tigon.utils.memory import format_gib
from tigon.weights import Cut


class LanguageModel(nn.Module):
    """A decoder with a language-model head, and the forward contract; see `CausalLM`."""

    config_class: ClassVar[type[Config]]
    block_class: ClassVar[type[Block]]
    checkpoint_names: Names = Names()

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.defaults = Defaults()
        # Blocks that backward computes again: True each, n every n-th, False none, or their indices
        self.activation_checkpointing: bool | int | Collection[int] = False
        self.activation_offload = False  # what backward needs waits in host memory
        self.graphs: Callable[..., Any] | None = None  # called in place of `model`, to replay it
        self.attention: Backend = "auto"
        self.context: Ranks | None = None  # the ranks that share the tokens of each row
        self.weights: Ranks | None = None  # those that gather weights for the same calls
        # Drop padding before the blocks, with zeros in its place after: True wherever it changes
        # no number, False never, None where it is faster: 16 bits, a GPU, variable-length attention
        self.drop_padding: bool | None = None
        self.adapters: dict[str, Any] = {}  # by name, the LoraConfig of each
        self.active_adapter: str | None = None  # the one that is added
        self.trained_without: set[str] = set()  # what trained before there were any
        self.cuts: dict[str, Cut] = {}  # by parameter, what this rank has of it
        self.files = ""  # a digest of what was read; ranks that share the model compare theirs
        self.unchecked: RemovableHandle | None = None  # the hook that does, until the first call
        self.model = self.make_decoder(config)
        if config.labels:
            self.lm_head = LMHead(config.hidden_size, config.labels)
            self.checkpoint_names = self.checkpoint_names._replace(head=SCORE)
        else:
            self.lm_head = self.make_head(config)
        if self.ties_head:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    @property
    def ties_head(self) -> bool:
        """Whether the head's weight is that of the embedding."""
        return self.config.tie_word_embeddings and not self.config.labels

    def make_decoder(self, c: Any, **options: Any) -> Decoder:
        return Decoder(c, self.block_class, **options)

    def make_head(self, c: Any, **options: Any) -> LMHead:
        return LMHead(c.hidden_size, c.vocab_size, **options)

    @property
    def causal(self) -> bool:
        """Whether tokens see only those before them, so that the model can generate."""
        return True

    @property
    def turning_rope(self) -> RotaryEmbedding | None:
        """The RoPE whose table changes first as a text grows; None: cached keys stay valid."""
        return self.model.turning_rope

    @property
    def tensor_ranks(self) -> Ranks | None:
        """The ranks that share each layer, all of which make the same calls; None: there is one."""
        return self.model.tensor

    @property
    def together(self) -> tuple[Ranks, ...]:
        """The groups of this rank whose ranks all make the same calls of the model."""
        return tuple(ranks for ranks in (self.tensor_ranks, self.weights) if ranks is not None)

    @property
    def cache_restart(self) -> int | None:
        """Length at which `generate` processes the text again, since RoPE's table changes."""
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if (few := self._quantised) is not None:  # before anything is converted
            few.check(fn)
        before = self.dtype
        super()._apply(fn, recurse)
        if self.dtype != before:
            self.warn_of_overflow()
        return self

    def warn_of_overflow(self) -> None:
        """A model that computes nan in float16, which transformers loads without a word."""
        if self.dtype == torch.float16 and self.config.overflows_float16:
            warnings.warn(
                f"activations of {self.config.architecture} exceed the range of float16, and its "
                "logits are nan then: take bfloat16 or float32",
                stacklevel=2,
            )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad and (few := self._quantised) is not None:
            raise ValueError(
                f"the model's weights are quantised ({few.kind}) and cannot be trained: "
                "add_adapter adds what can"
            )
        return super().requires_grad_(requires_grad)

    @property
    def _quantised(self) -> QuantizedWeight | None:
        return next((m for m in self.modules() if isinstance(m, QuantizedWeight)), None)

    def use_attention(self, backend: Backend) -> Self:
        """Choose what computes attention: a name that docs/attention.md explains, or "auto".

        Raises for an unknown name and for a package that is not installed; a call that the
        backend does not support raises when it is made.
        """
        check_backend(backend)
        self.attention = backend
        return self

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def static_cache(
        self, rows: int, capacity: int, *, chunk: int = 16, quantize: Literal["int8"] | None = None
    ) -> StaticCache:
        """An empty cache for `past_key_values`, with room for `capacity` tokens in each row.

        Inside `torch.autocast` it keeps what autocast computes. ValueError for more than the device
        has memory for.
        """
        dtype, device = autocast_dtype(self.device) or self.dtype, self.device

        cache = partial(
            StaticCache,
            self.model.make_states,
            rows,
            capacity,
            dtype=dtype,
            chunk=chunk,
            quantize=quantize,
        )
        try:
            needed = cache(device=torch.device("meta")).nbytes
        except RuntimeError:  # sizes that no tensor can have
            needed = memory.UNKNOWN
        if needed > (there := memory.total_memory(device)):
            raise ValueError(
                f"a cache of {capacity} tokens in each of {rows} rows takes {format_gib(needed)}, "
                f"and {device} has {format_gib(there)}"
            )
        return cache(device=device)

    @spelled_out
    def num_items(
        self,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        **given: Unpack[ItemArguments],
    ) -> Tensor:
        """This batch's part of the global denominator: an int64 scalar to add up.

        Takes the same keywords as `forward`; the total of all micro-batches and ranks is the
        `num_items_in_batch` of each. Callers with a `Targets` have it in `items`.
        """
        tokens = labels if shift_labels is None else shift_labels
        if input_ids is None and isinstance(tokens, Tensor):
            # Which tokens they are does not matter
            input_ids = tokens.new_zeros(tokens.shape, dtype=torch.int64)
        asked = dict(given) | {"labels": labels, "shift_labels": shift_labels}
        return self._resolve(input_ids, asked)[1].items

    @spelled_out
    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        *,
        batch: Batch | None = None,
        targets: Targets | None = None,
        **given: Unpack[PassArguments],
    ) -> CausalLMOutput:
        """Labels: a loss and no logits, in training and evaluation alike. No labels: logits.

        `logits_to_keep` picks positions before the head (int k the last k, 0 all; an index or
        bool tensor; an index per row), of logits, labels and metrics together.
        `loss_reduction`: "token" (mean over targets), "sequence" (each sequence weighs the
        same), "sum", "none"; `num_items_in_batch` replaces the mean's denominator.
        `return_logits=True` with labels gives both. `logits_at` gives the logits [n, V] of the
        positions that it names as values without a gradient, and changes nothing else: an index
        [n] into the flattened batch, or bool [B, T]. `logits_bytes` bounds the logits that the
        loss holds at a time. `metrics`: "accuracy", "predicted_tokens", "entropy", "max_logit",
        "nll", "z", without a [B, T, V] tensor; also without labels, in place of logits, but for
        accuracy and nll.

        Mixtures of experts also know, with and without labels, "expert_load" [layers, experts],
        the share of a layer's assignments that each expert got, and "aux_loss", which is least
        when all get the same. Where their config says output_router_logits, "token" and
        "sequence" losses include router_aux_loss_coef times it, as transformers' does, and "sum"
        and "none" ones do not, but `aux_loss` of the output may be added. With
        num_items_in_batch a batch contributes by its share of the items: over micro-batches and
        ranks the losses add up to the cross-entropy and the coefficient times the weighted mean
        of their aux_loss, however many they are.

        `label_smoothing`, `z_loss` and `class_weights` [V] belong to the cross-entropy; class
        weights multiply the loss weights and leave the denominator as it is. `criteria` (of
        tigon.kernels) replace that one cross-entropy: `CrossEntropy()`, `KL(...)` from a teacher,
        `LogProbs()`, of one pass over the logits (a teacher's hidden states are
        `teacher(ids, logits_to_keep=1, return_hidden=True).hidden`). Targets, weights
        and denominator are filled in; their tensors are [B, T, ...]. The loss is the sum of what
        cross-entropies and divergences give, which
        `out.criteria` has one by one; log-probabilities are `out.logprobs` [B, n]. Without labels
        KL counts all real positions.

        `batch` and `targets` (`Batch.of`, `Targets.of`) are the same arguments resolved ahead of
        time, in place of the keywords that they were made from.
        """
        batch, targets = self._resolve(input_ids, given, batch, targets)
        batch.check_cache()
        of_head, of_routing = self._metrics(given.get("metrics"), targets)
        part = split(batch, self.context, self.config.vocab_size)
        asked, mine = Asked(targets, of_head, given.get("criteria"), part), part.batch
        x, partly = self._embedded(mine)
        x, position_ids, mask, places = mine.without_padding(x)
        balanced = aux_loss_coef(self.config) is not None
        run = self.model if self.graphs is None else self.graphs
        hidden, tallies = run(
            x,
            position_ids,
            mask,
            batch.cache,
            self.activation_checkpointing,
            bool(of_routing or (asked.targets.labels is not None and balanced)),
            self.activation_offload,
            **self._dropout(batch, part, places) | part.options | partly,
        )
        hidden = mine.with_padding(hidden, places)
        logits = given.get("return_logits")
        logits = self.defaults.return_logits if logits is None else logits
        at = given.get("logits_at")
        found = self.lm_head(
            part.kept(hidden, targets, criteria=len(asked) > 0),
            asked,
            active=asked.active,
            return_logits=bool(logits),
            at=None if at is None else part.rows(hidden, positions_at(at, batch)),
            logits_bytes=given.get("logits_bytes"),
        )
        head = part.head(found, asked, targets)
        result = asked.output(head.values, head.logits, batch.cache)
        result.logits_at = head.logits_at
        result.hidden = hidden if given.get("return_hidden") else None
        return self._add_routing(result, part.tallies(tallies), asked.targets.share, of_routing)

    def _embedded(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """[B, T, C], and whether the decoder is to add it up over ranks, where it divides it."""
        if batch.inputs_embeds is not None:
            return batch.inputs_embeds, {}
        x, summands = self.model.embed(cast(Tensor, batch.input_ids))
        return x, {"summands": True} if summands else {}

    def _dropout(self, batch: Batch, part: Whole, places: Tensor | None) -> dict[str, Any]:
        """Keys of x: those of the batch, or of torch's generator; none where nothing is dropped.

        `places`: of the real tokens of `part`, where padding is.
        """
        config = None if self.active_adapter is None else self.adapters[self.active_adapter]
        if config is None or not config.dropout or not self.training or batch.cache is not None:
            return {}
        keys, bounds = batch.dropout_keys, torch.iinfo(torch.int64)
        if keys is None:
            keys = torch.randint(bounds.min, bounds.max, batch.shape, device=batch.device)
            for ranks in filter(None, (self.tensor_ranks, self.context)):  # the first one's on all
                keys = ranks.gather(keys)[: len(keys)]
        keys = part.part(keys)
        return {"dropout_keys": keys if places is None else keys.flatten()[places][None]}

    def _resolve(
        self,
        input_ids: Tensor | None,
        given: Mapping[str, Any],
        batch: Batch | None = None,
        targets: Targets | None = None,
    ) -> tuple[Batch, Targets]:
        """The arguments of `forward` as a batch and its targets, unless these are given."""
        check_keywords("forward", given, PASS)
        of_batch, of_targets = among(BATCH, given), among(TARGETS, given)
        if input_ids is not None:
            of_batch["input_ids"] = input_ids
        for name, resolved, others in ("batch", batch, of_batch), ("targets", targets, of_targets):
            if resolved is not None and others:
                raise TypeError(f"{name}= with {', '.join(others)}: they are part of the {name}")
        if targets is not None and batch is None:
            raise TypeError("targets= without batch=: give the batch that they were made from")
        batch = Batch.of(self, **of_batch) if batch is None else batch
        if batch.defaults is not self.defaults:
            raise ValueError("batch= was made by Batch.of for another model: make one for this")
        targets = Targets.of(batch, **of_targets) if targets is None else targets
        if self.config.labels and (targets.labels is not None or given.get("criteria")):
            raise ValueError(
                f"this {type(self).__name__} scores sequences and predicts no token: call it "
                "without labels and criteria, and its logits [B, T, labels] are the scores"
            )
        return batch, targets

    def _metrics(
        self, given: str | Sequence[str] | None, targets: Targets
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those of the head and those of routers; with labels, by default those of `defaults`."""
        if given is None:
            given = () if targets.labels is None else self.defaults.metrics
        names = (given,) if isinstance(given, str) else tuple(given)
        of_head = tuple(name for name in names if name not in ROUTING_METRICS)
        return of_head, tuple(name for name in names if name in ROUTING_METRICS)

    def _add_routing(
        self,
        out: CausalLMOutput,
        tallies: Sequence[Tensor],
        share: Tensor | None,
        metrics: Sequence[str],
    ) -> CausalLMOutput:
        """What routers did, where asked for, and its part of the loss."""
        found, coef = balance_of(self.config, tallies), aux_loss_coef(self.config)
        if found is None:
            if metrics:
                name = type(self).__name__
                raise ValueError(f"metrics={tuple(metrics)}: no layer of this {name} has experts")
            return out
        load, aux_loss = found
        values = {"aux_loss": aux_loss.detach(), "expert_load": load}
        out.metrics |= {name: values[name] for name in metrics}
        if coef is not None:
            out.aux_loss = aux_loss
            if out.loss is not None and share is not None:
                out.loss = out.loss + coef * share * aux_loss
        return out
