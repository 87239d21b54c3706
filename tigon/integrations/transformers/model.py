"""Tigon's models as transformers' `PreTrainedModel`: a class per family, made when it is asked for.

A model here shares the modules of a native one, whose forward pass it calls, and has transformers'
config, names of parameters and outputs.

# B batch, T tokens, n kept tokens, C model dim, V vocab
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tigon.integrations.transformers.cache import open_cache
from tigon.integrations.transformers.calls import capture, check_options, make_batch, refuse_liger
from tigon.integrations.transformers.decoder import (
    finish,
    follow_reference,
    make_native,
    read_flags,
)
from tigon.integrations.transformers.generation import TigonGeneration
from tigon.integrations.transformers.native import (
    assemble_parameters,
    check_config,
    load_native,
    warn_of_attention,
)
from tigon.integrations.transformers.outputs import defer_logits, to_transformers
from tigon.layers import Embedding
from tigon.models import MODELS
from tigon.models.arguments import BATCH, PASS, TARGETS, select_keys
from tigon.models.causal_lm import CausalLM
from tigon.models.config import vocabulary_keys
from tigon.models.inputs import Batch
from tigon.models.moe import MoEConfig
from tigon.models.targets import Targets

OPTIONS = PASS - BATCH - TARGETS  # keywords that choose the outputs
# Of transformers' configs, what changes no layer
FIELDS = frozenset(
    (
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("router_aux_loss_coef",),
        *("bos_token_id", "eos_token_id", "pad_token_id", "return_dict"),
        *("id2label", "label2id", "problem_type"),
    )
)


class TigonPreTrainedModel(PreTrainedModel):
    """A Tigon model as transformers' PreTrainedModel; `native` is the model whose modules it has.

    `tigon_options` are defaults of keywords of `forward`, for calls with labels.
    """

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    family: ClassVar[type[CausalLM]]
    config_class: ClassVar[type[PreTrainedConfig]]  # type: ignore[misc]
    config: Any
    native: CausalLM

    def __init__(
        self,
        config: PreTrainedConfig,
        native: CausalLM | None = None,
        *,
        tigon_options: Mapping[str, Any] | None = None,
    ):
        options = check_options(tigon_options)
        super().__init__(config)
        if native is None:
            native = make_native(self.family, config, type(self).__name__)
        self.tigon_options = options
        follow_reference(native, config, type(self).__name__)
        # Past nn.Module's own __setattr__, which would give all parameters two names
        self.__dict__ |= {"native": native, "_modules": native._modules}
        self._set_statics()
        self.register_load_state_dict_pre_hook(assemble_parameters)
        self.train(native.training)

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module's; ValueError for the forward pass of Liger's loss."""
        if name == "forward":
            refuse_liger(value)
        super().__setattr__(name, value)

    @classmethod
    def from_native(
        cls, native: CausalLM, config: PreTrainedConfig | None = None, **options: Any
    ) -> Self:
        """Makes a model of a native one; options are those of the class. Raises ValueError for a
        config of another model."""
        if config is None:
            config = cls.config_class.from_dict(native.config.to_dict())
        else:
            check_config(native, config)
            config._attn_implementation = None  # Auto classes put it there
        config.name_or_path, config.dtype = native.config.source.name, native.dtype
        return cls(config, native, **options)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        path_or_repo: str | os.PathLike[str],
        *args: Any,
        config: PreTrainedConfig | None = None,
        tigon_options: Mapping[str, Any] | None = None,
        attn_implementation: str | None = None,
        **options: Any,
    ) -> Self:
        """As tigon.integrations.transformers.from_pretrained, for a checkpoint of this class.

        Auto classes also give a `config`, which may differ from the file's in what does not change
        the native model, such as output_router_logits and pad_token_id; else raises ValueError.
        `attn_implementation` names kernels of transformers, and has no effect but a warning.
        """
        warn_of_attention(attn_implementation, config)
        if config is not None and issubclass(cls, TigonForSequenceClassification):
            options["num_labels"] = config.num_labels
        changes = {name: options.pop(name) for name in FIELDS & {*options}}
        native = load_native(path_or_repo, **options)
        found = find_class(native)
        if not issubclass(found, cls):
            name = native.config.source.name
            raise ValueError(f"{name!r} is a {found.__name__}, no {cls.__name__}")
        model = found.from_native(native, config, tigon_options=tigon_options)
        model.config.update(changes)
        return model

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """As PreTrainedModel's, but removes a new directory if a file of it cannot be written."""
        is_new = is_main_process and not os.path.exists(save_directory)
        try:
            super().save_pretrained(save_directory, is_main_process, **kwargs)
        except BaseException:
            if is_new:
                shutil.rmtree(save_directory, ignore_errors=True)
            raise

    def _set_statics(self) -> None:
        """Sets what transformers' `post_init` would: names of tied parameters, and no plans."""
        native = self.native
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if native.ties_head else {}
        self._tied_weights_keys, self.all_tied_weights_keys = tied, tied
        self._no_split_modules = {type(block).__name__ for block in native.model.layers}
        self.init_parallel_plans()
        if native.generation_config and self.can_generate():
            self.generation_config = GenerationConfig.from_dict(dict(native.generation_config))

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def num_labels(self) -> int:
        """The scores of a sequence classifier."""
        return int(self.config.num_labels)

    @classmethod
    def can_generate(cls) -> bool:
        """Whether the class has `generate`, which transformers reads off the names of bases."""
        return issubclass(cls, TigonGeneration)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: files have the names and forms of transformers' own class."""
        return False

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether Trainer gives the number of the step's targets, by which the loss is divided;
        not if each sequence counts the same, since then they are no denominator."""
        return self.tigon_options.get("loss_reduction", "token") == "token"

    def _follow_config(self, router_logits: bool) -> None:
        """Lets the native config follow what may be changed in transformers'."""
        config = self.native.config
        if not isinstance(config, MoEConfig):
            return
        coef = self.config.router_aux_loss_coef
        if (config.output_router_logits, config.router_aux_loss_coef) != (router_logits, coef):
            changes: dict[str, Any] = {"router_aux_loss_coef": coef}
            self.native.config = replace(config, output_router_logits=router_logits, **changes)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Embedding:
        """Resizes embedding and head as the native `resize_token_embeddings`, and both configs;
        returns the embedding."""
        arguments = new_num_tokens, pad_to_multiple_of, mean_resizing
        keys = vocabulary_keys(self.native.config)
        embedding = self.native.resize_token_embeddings(*arguments)
        sizes = dict.fromkeys(keys, self.native.config.vocab_size)
        self.config.get_text_config().update(sizes)
        return embedding

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Has no effect, which a warning says of all but sdpa and eager: Tigon's kernels stay."""
        warn_of_attention(attn_implementation, None)

    def get_decoder(self) -> nn.Module:
        """Returns the decoder, which transformers' method looks for in names that it has not."""
        return cast(nn.Module, self.model)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Ties the head's weight to that of the embedding, if the config says so."""
        if self.native.ties_head:
            self.get_output_embeddings().weight = self.get_input_embeddings().weight

    # Checkpointing, by the native options

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recomputes every n-th block in backward; with `offload` saved activations wait in host
        memory. `use_reentrant` has no effect; ValueError for other options of torch's."""
        options = {**(activation_checkpointing_kwargs or {})}
        options.pop("use_reentrant", None)
        if options:
            raise ValueError(
                f"activation_checkpointing_kwargs={options}: Tigon's blocks take every_n_layers "
                "and offload; leave the rest out"
            )
        self.native.activation_checkpointing = every_n_layers
        self.native.activation_offload = offload

    def activation_checkpointing_disable(self) -> None:
        """Keeps the activations of all blocks for backward."""
        self.native.activation_checkpointing = self.native.activation_offload = False

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether backward recomputes any block."""
        return bool(self.native.activation_checkpointing)

    @property
    def gradient_checkpointing(self) -> bool:  # type: ignore[override]
        """`is_activation_checkpointing`, by the name that PEFT asks modules for."""
        return self.is_activation_checkpointing


class TigonForCausalLM(TigonPreTrainedModel, TigonGeneration):
    """A language model; its subclasses, one per family, have transformers' names."""

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, cached + T]
        position_ids: Tensor | None = None,  # [B or 1, T]
        cache: Any = None,
        inputs_embeds: Tensor | None = None,  # [B, T, C]
        labels: Tensor | None = None,  # [B, T], unshifted, -100 ignored
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        loss_weights: Tensor | None = None,  # [B, T]
        seq_idx: Tensor | None = None,  # [B, T], numbers of packed sequences
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns transformers' output: logits [B, n, V], or with labels the loss, and the logits
        too in evaluation mode.

        `return_logits`, or `skip_logits` as its opposite, chooses whether a call with labels has
        logits. `metrics`, `loss_reduction`, `num_items_in_batch`, `label_smoothing`, `z_loss`,
        `shift_labels` and all other keywords of the native `forward` are keywords here, too; what
        they ask for are fields of the output. `seq_idx` or `cu_seq_lens_q` bound packed sequences.
        Raises ValueError for output_attentions, and TypeError for an unknown keyword.
        """
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "logits_to_keep": logits_to_keep,
            "loss_weights": loss_weights,
            "seq_idx": seq_idx,
            "cache": cache,
            "use_cache": use_cache,
            **kwargs,
        }
        if labels is not None or kwargs.get("shift_labels") is not None:
            defaults = {**({} if self.training else {"return_logits": True}), **self.tigon_options}
            if skip_logits is not None:
                defaults["return_logits"] = not skip_logits
            arguments = {**defaults, **arguments}
        return self._run(arguments)

    def _run(self, arguments: dict[str, Any]) -> Any:
        """Runs the native forward with transformers' arguments: returns transformers' output."""
        arguments["cache"] = cache = open_cache(self.native, self.config, arguments)
        hidden_states, router_logits = read_flags(self.config, arguments)
        self._follow_config(router_logits)
        batch = make_batch(self.native, arguments)
        targets = Targets.of(batch, **select_keys(TARGETS, arguments))
        options = select_keys(OPTIONS, arguments)
        with capture(self.native, batch, hidden_states, router_logits) as captured:
            return_hidden = options.pop("return_hidden", False)
            out = self.native(batch=batch, targets=targets, return_hidden=True, **options)
        chosen = options.get("return_logits", self.native.defaults.return_logits)
        if out.loss is not None and chosen is None:
            out.logits = defer_logits(self.native, out.hidden, targets)
        if out.loss is not None and out.aux_loss is not None and targets.share is not None:
            # transformers adds aux_loss of every micro-batch, not this batch's share of it
            coef = self.config.router_aux_loss_coef
            out.loss = out.loss + coef * (1 - targets.share) * out.aux_loss
        output = to_transformers(
            out,
            isinstance(self.native.config, MoEConfig),
            cache=cache,
            hidden_states=captured.hidden_states(out.hidden),
            hidden=out.hidden if return_hidden else None,
            router_logits=captured.logits_of_routers(),
        )
        return finish(output, self.config, arguments.get("return_dict"))


class TigonForSequenceClassification(TigonPreTrainedModel):
    """A sequence classifier, with the head `score`; its subclasses have transformers' names."""

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, T]
        position_ids: Tensor | None = None,  # [B or 1, T]
        cache: Any = None,
        inputs_embeds: Tensor | None = None,  # [B, T, C]
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the scores [B, labels] of each row's last token that is no padding, and with
        labels the loss that config.problem_type names."""
        arguments = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "cache": cache,
            "use_cache": use_cache,
            **kwargs,
        }
        arguments["cache"] = cache = open_cache(self.native, self.config, arguments)
        flags = read_flags(self.config, arguments)
        batch = make_batch(self.native, arguments)
        last = self._last_tokens(input_ids, batch)
        with capture(self.native, batch, *flags) as captured:
            out = self.native(batch=batch, logits_to_keep=last[:, None], return_hidden=flags[0])
        scores, loss = out.logits[:, 0], None
        if labels is not None:
            values = {"logits": scores, "pooled_logits": scores, "labels": labels}
            loss = self.loss_function(**values, config=self.config)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=scores, cache=cache, hidden_states=captured.hidden_states(out.hidden)
        )
        return finish(output, self.config, kwargs.get("return_dict"))

    def _last_tokens(self, input_ids: Tensor | None, batch: Batch) -> Tensor:
        """The index [B] of each row's last token that is not pad_token_id, as in transformers."""
        rows, tokens = batch.shape
        pad = self.config.get_text_config().pad_token_id
        if pad is None and rows > 1:
            raise ValueError(
                f"{rows} rows and no config.pad_token_id: set it, so that the last token of each "
                "row is known"
            )
        if pad is None or input_ids is None:
            return torch.full((rows,), tokens - 1, device=batch.device)
        return (torch.arange(tokens, device=batch.device) * (input_ids != pad)).argmax(-1)


# The classes of families, by transformers' names


def _class_names() -> dict[str, tuple[type[CausalLM], type[TigonPreTrainedModel]]]:
    """Maps transformers' names of classes to the native class and the base of each."""
    names: dict[str, tuple[type[CausalLM], type[TigonPreTrainedModel]]] = {}
    for family in MODELS.values():
        config = family.config_class
        if not config.wrapper_type:
            names[config.architecture] = family, TigonForCausalLM
            if (classifier := config.classifier()) is not None:
                names[classifier] = family, TigonForSequenceClassification
    return names


CLASS_NAMES = _class_names()


def find_class(model: CausalLM) -> type[TigonPreTrainedModel]:
    """The class under transformers' name of a native model; ValueError if there is none."""
    name = model.config.transformers_class
    if name not in CLASS_NAMES:
        raise ValueError(
            f"transformers has no class for text alone of model_type {model.config.model_type!r}: "
            "train it with tigon train"
        )
    return globals().get(name) or __getattr__(name)


def __getattr__(name: str) -> Any:
    """Makes a family's class when it is first asked for, so that models can be pickled."""
    if name not in CLASS_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family, base = CLASS_NAMES[name]
    config_class = CONFIG_MAPPING[family.config_class.model_type]
    about = f"`tigon.{family.__name__}` as transformers' `{name}`."
    namespace = {"__module__": __name__, "__doc__": about, "family": family}
    globals()[name] = type(name, (base,), namespace | {"config_class": config_class})
    return globals()[name]
