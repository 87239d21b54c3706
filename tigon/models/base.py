"""The forward contract that every family shares.

# B batch, T tokens, n kept tokens, C model dim, V vocab
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self, Unpack, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tigon.distributed.collectives import Ranks
from tigon.kernels.attention.backends import Backend, check_backend
from tigon.kernels.runtime import autocast_dtype
from tigon.layers import Experts, LMHead, QuantizedWeight, RotaryEmbedding, StaticCache
from tigon.layers.kv_state import StateSpec
from tigon.layers.lm_head import run_head
from tigon.models.arguments import Defaults, ItemArguments, PassArguments, expand_kwargs_signature
from tigon.models.config import ModelConfig
from tigon.models.decoder import Decoder, PreNormBlock, Recompute, TransformerBlock
from tigon.models.inputs import Batch
from tigon.models.loss import LossTerms, resolve_arguments
from tigon.models.outputs import CausalLMOutput
from tigon.models.pretrained.names import SCORE, CheckpointNames
from tigon.models.targets import Targets, take_logits_at
from tigon.utils import memory
from tigon.weights import ShardSpec


class LanguageModel(nn.Module):
    """A decoder and its head, of a language model or, if the config has `labels`, of a sequence
    classifier: all of a model but generation, files and adapters, which `CausalLM` adds."""

    config_class: ClassVar[type[ModelConfig]]
    block_class: ClassVar[type[TransformerBlock]] = PreNormBlock
    decoder_class: ClassVar[type[Decoder]] = Decoder
    scales_embedding: ClassVar[bool] = False  # of token ids, by sqrt(hidden_size)
    checkpoint_names: CheckpointNames = CheckpointNames()

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.defaults = Defaults()
        self.activation_checkpointing = False
        self.activation_offload = False  # saved activations wait in host memory
        self.graphs: Callable[..., Any] | None = None  # replays `model`, and is called instead
        self.attention: Backend = "auto"
        self.tensor_ranks: Ranks | None = None  # share each layer, and make the same calls
        self.context_ranks: Ranks | None = None  # share the tokens of each row, before `forward`
        self.fsdp_ranks: Ranks | None = None  # gather weights for the same calls
        self.tensor_parallel: Any = None  # tigon.parallel.TensorParallel, to sum gradients
        self.zero2: Any = None  # tigon.parallel.zero2.Zero2, with sharding=gradients
        self.compute_dtype: torch.dtype | None = None  # to which FSDP or ZeRO-2 casts the weights
        # Drop padding before the blocks and fill it with zeros after them. True: wherever no number
        # changes; False: never; None: where it is faster (16 bits on a GPU, varlen attention)
        self.drop_padding: bool | None = None
        self.adapters: dict[str, Any] = {}  # name -> LoraConfig
        self.active_adapter: str | None = None
        self.trainable_before_adapters: set[str] = set()  # names of parameters
        self.shard_specs: dict[str, ShardSpec] = {}  # parameter name -> this rank's shard
        self.files_digest = ""  # of the checkpoint; ranks that share the model compare theirs
        self.first_call_hook: RemovableHandle | None = None  # compares digests and inputs
        self.model = self.make_decoder(config)
        if config.labels:
            self.lm_head = LMHead(config.hidden_size, config.labels)
            self.checkpoint_names = self.checkpoint_names._replace(head=SCORE)
        else:
            self.lm_head = self.make_head(config)
        self.logit_options = self.lm_head.options  # also of a head that replaces it
        if self.ties_head:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)

    @property
    def activation_checkpointing(self) -> Recompute:
        """What backward recomputes: True all blocks, n every n-th, False none, or their indices;
        "experts": what experts compute with gate_up, which is most of what a block of them keeps.

        The latter needs kernels: plain torch keeps it. ValueError where there are no experts.
        """
        return self._recompute

    @activation_checkpointing.setter
    def activation_checkpointing(self, setting: Recompute) -> None:
        if isinstance(setting, int):
            known = setting >= 0
        else:
            known = isinstance(setting, Collection) and not isinstance(setting, str)
        if not known and setting != "experts":
            raise ValueError(
                f"activation_checkpointing={setting!r} is not True, False, N for every n-th block, "
                "a collection of blocks' indices, or 'experts'"
            )
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        if setting == "experts" and not experts:
            raise ValueError(
                f"activation_checkpointing=experts, but {self.config.architecture} has no experts: "
                "give true for all blocks, or N for every n-th"
            )
        for module in experts:
            module.recompute_gate_up = setting == "experts"
        self._recompute = setting

    @property
    def ties_head(self) -> bool:
        """Whether the head's weight is that of the embedding; never in a sequence classifier."""
        return self.config.tie_word_embeddings and not self.config.labels

    def make_decoder(self, c: Any, **options: Any) -> Decoder:
        """Makes the decoder of a config; families add their options."""
        if self.scales_embedding:
            options["embedding_scale"] = c.hidden_size**0.5
        options.setdefault("input_scale", getattr(c, "embedding_multiplier", 1.0))
        return self.decoder_class(c, self.block_class, **options)

    def make_head(self, c: Any, **options: Any) -> LMHead:
        """Makes the head, with the config's softcap and divisor of logits if it has them; families
        add their options."""
        softcap = getattr(c, "final_logit_softcapping", None)
        options.setdefault("logit_scale", 1 / getattr(c, "logits_scaling", 1.0))
        return LMHead(c.hidden_size, c.vocab_size, softcap=softcap, **options)

    @property
    def device(self) -> torch.device:
        """The device of the embedding's weight."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding's weight."""
        return self.model.embed_tokens.weight.dtype

    @property
    def causal(self) -> bool:
        """Whether tokens see only those before them, so that the model can generate."""
        return True

    @property
    def dynamic_rope(self) -> RotaryEmbedding | None:
        """The RoPE whose frequencies change first as a text grows; None: cached keys stay valid."""
        return self.model.dynamic_rope

    @property
    def communication_groups(self) -> tuple[Ranks, ...]:
        """The groups of ranks that make the same calls of the model: tensor-parallel and FSDP."""
        return tuple(ranks for ranks in (self.tensor_ranks, self.fsdp_ranks) if ranks is not None)

    @property
    def cache_restart(self) -> int | None:
        """Length at which `generate` prefills again as RoPE's table changes; None: never."""
        return None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Applies a conversion to all tensors, as `to` and `half` do; raises ValueError, before
        any, if it changes the dtype of quantized weights."""
        if (weight := self._quantized_weight) is not None:  # before anything is converted
            weight.check(fn)
        old_dtype = self.dtype
        super()._apply(fn, recurse)
        if self.dtype != old_dtype:
            self.warn_of_overflow()
        return self

    def warn_of_overflow(self) -> None:
        """Warns if the model is in float16 and its family's activations exceed it."""
        if self.dtype == torch.float16 and self.config.overflows_float16:
            warnings.warn(
                f"activations of {self.config.architecture} exceed the range of float16, so that "
                "logits become nan: use bfloat16 or float32",
                stacklevel=2,
            )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As nn.Module's, but raises ValueError for True if any weight is quantized."""
        if requires_grad and (weight := self._quantized_weight) is not None:
            raise ValueError(
                f"the model's weights are quantized ({weight.kind}) and cannot be trained: "
                "add_adapter adds weights that can"
            )
        return super().requires_grad_(requires_grad)

    @property
    def _quantized_weight(self) -> QuantizedWeight | None:
        """The first quantized weight among the submodules, or None."""
        return next((m for m in self.modules() if isinstance(m, QuantizedWeight)), None)

    def use_attention(self, backend: Backend) -> Self:
        """Chooses the attention backend, "auto" or a name of docs/attention.md; returns the model.

        Raises for an unknown name and for a package that is not installed. A backend raises in the
        forward pass for what it does not support.
        """
        check_backend(backend)
        self.attention = backend
        return self

    def static_cache(
        self,
        rows: int,
        capacity: int,
        *,
        chunk: int = 16,
        quantize: Literal["int8"] | None = None,
        rollback: int = 0,
    ) -> StaticCache:
        """An empty cache for `past_key_values`, with room for `capacity` tokens in each row.

        Inside `torch.autocast` it has autocast's dtype, in mixed precision `compute_dtype`.
        `rollback`: how many tokens `crop` can drop where layers keep one state for all tokens.
        Raises ValueError for a cache larger than the device's memory.
        """
        device = self.device
        dtype = autocast_dtype(device) or self.compute_dtype or self.dtype
        spec = StateSpec(rows, capacity, dtype, device, chunk, quantize)
        cache = partial(StaticCache, self.model.make_states, rollback=rollback)
        try:
            needed = cache(spec._replace(device="meta")).nbytes
        except RuntimeError:  # sizes that no tensor can have
            needed = memory.UNKNOWN
        subject = f"a cache of {capacity} tokens in each of {rows} rows takes"
        memory.check_memory(needed, device, subject)
        return cache(spec)

    @expand_kwargs_signature
    def num_items(
        self,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        **kwargs: Unpack[ItemArguments],
    ) -> Tensor:
        """Counts this batch's part of the global loss denominator, an int64 scalar: its targets, or
        with loss_reduction="sequence" its sequences that have targets.

        Takes the keywords of `forward`. The sum over all micro-batches and ranks is the
        `num_items_in_batch` of each. `Targets.items` is the same number.
        """
        tokens = labels if shift_labels is None else shift_labels
        if input_ids is None and isinstance(tokens, Tensor):
            input_ids = tokens.new_zeros(tokens.shape, dtype=torch.int64)  # any tokens will do
        arguments: dict[str, Any] = {**kwargs, "labels": labels, "shift_labels": shift_labels}
        return resolve_arguments(self, input_ids, **arguments)[1].items

    @expand_kwargs_signature
    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        *,
        batch: Batch | None = None,
        targets: Targets | None = None,
        **kwargs: Unpack[PassArguments],
    ) -> CausalLMOutput:
        """Returns logits, or with labels the loss (and logits too with `return_logits=True`).

        `logits_to_keep` selects positions before the head, for logits, labels and metrics: int k
        the last k, 0 all; an index or bool tensor; an index per row. `logits_at` returns logits
        [n, V] of other positions without a gradient: an index [n] into the flattened batch, or
        bool [B, T]. `logits_bytes` limits the logits in memory at a time.

        `loss_reduction`: "token" (mean over targets), "sequence" (mean over sequences of their
        means), "sum" or "none". `num_items_in_batch` replaces the mean's denominator.
        `label_smoothing`, `z_loss` and `class_weights` [V] are options of the cross-entropy; class
        weights multiply the loss weights and do not change the denominator.

        `metrics`: "predicted_tokens", "entropy", "max_logit", "z", and with labels "accuracy" and
        "nll". No [B, T, V] tensor is made for them; without labels they replace the logits.
        Mixtures of experts add "expert_load" [layers, experts], the share of assignments that each
        expert got, and "aux_loss", which is smallest if all experts get the same.

        If the config has output_router_logits, "token" and "sequence" losses include
        router_aux_loss_coef times aux_loss, as in transformers; other losses do not, but
        `out.aux_loss` may be added. With `num_items_in_batch`, aux_loss is scaled by the batch's
        share of the items, so that losses add up over micro-batches and ranks.

        `criteria` (of tigon.kernels) replace the cross-entropy by several terms that share one
        pass over the logits: `CrossEntropy()`, `KL(...)` from a teacher, `LogProbs()`. A teacher's
        hidden states are `teacher(ids, logits_to_keep=1, return_hidden=True).hidden`. Their tensors
        are [B, T, ...]; targets, weights and denominator are filled in. The loss is the sum of
        cross-entropies and divergences; `out.criteria` has each, and `out.logprobs` [B, n] the
        log-probabilities. Without labels KL counts all real positions.

        `batch` and `targets` (`Batch.of`, `Targets.of`) are the same arguments resolved ahead of
        time, instead of the keywords.
        """
        batch, targets, options = resolve_arguments(
            self, input_ids, batch=batch, targets=targets, **kwargs
        )
        terms = LossTerms(self.config, targets, options.get("criteria"), options.get("metrics"))
        hidden, router_stats = self._run_blocks(batch, terms.need_routing)
        output = terms.output(
            run_head(
                self.lm_head,
                self.logit_options,
                targets.take(hidden),
                terms,
                active=terms.active,
                return_logits=bool(options.get("return_logits", self.defaults.return_logits)),
                at=take_logits_at(hidden, options.get("logits_at")),
                logits_bytes=options.get("logits_bytes"),
            ),
            router_stats,
        )
        output.past_key_values = batch.cache
        output.hidden = hidden if options.get("return_hidden") else None
        return output

    def _dropout_keys(self, batch: Batch) -> Tensor | None:
        """Seeds of the active adapter's dropout, int64 [B, T]: the batch's, or else drawn by
        torch's generator; None in a pass without dropout."""
        name = self.active_adapter
        has_dropout = name is not None and self.adapters[name].dropout
        if not (self.training and has_dropout) or batch.cache is not None:
            return None
        if batch.dropout_keys is not None:
            return batch.dropout_keys
        bounds = torch.iinfo(torch.int64)
        keys = torch.randint(bounds.min, bounds.max, batch.shape, device=batch.device)
        if self.tensor_ranks is None:
            return keys
        return self.tensor_ranks.gather(keys)[: len(keys)]  # those of the first rank

    def _run_blocks(self, batch: Batch, needs_routing: bool) -> tuple[Tensor, Sequence[Tensor]]:
        """Runs the decoder: returns the last hidden states [B, T, C] and router statistics."""
        embeds = batch.inputs_embeds
        if embeds is None:
            assert batch.input_ids is not None
            embeds = self.model.embed(batch.input_ids)
        embeds, position_ids, mask, real_token_indices = batch.drop_padding(embeds)
        options: dict[str, Any] = {} if batch.shard is None else {"shard": batch.shard}
        if (keys := self._dropout_keys(batch)) is not None:
            if real_token_indices is not None:
                keys = keys.flatten()[real_token_indices][None]
            options["dropout_keys"] = keys
        decoder = self.model if self.graphs is None else self.graphs
        hidden, router_stats = decoder(
            embeds,
            position_ids,
            mask,
            batch.cache,
            self.activation_checkpointing,
            needs_routing,
            self.activation_offload,
            **options,
        )
        return batch.restore_padding(hidden, real_token_indices), router_stats
