"""Tigon's decoders as transformers has them: called with ids, with its config, and made alone.

# B batch, T tokens, C model dim
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.modeling_outputs import ModelOutput, MoeModelOutputWithPast
from transformers.modeling_utils import EmbeddingAccessMixin, ModuleUtilsMixin

from tigon.integrations.transformers.cache import open_cache
from tigon.integrations.transformers.calls import capture, make_batch
from tigon.integrations.transformers.projections import split_projections
from tigon.integrations.transformers.stream import (
    MixedIn,
    WrappedBlock,
    is_wrapped,
    keep_hooks,
    mix_in,
    show_stream,
)
from tigon.models import MODELS
from tigon.models.causal_lm import CausalLM


class TigonModel(MixedIn, ModuleUtilsMixin, EmbeddingAccessMixin, nn.Module):
    """A decoder that takes ids, too, and then returns transformers' `MoeModelOutputWithPast`.

    Its native callers give all inputs of the blocks by position.
    """

    native: CausalLM
    config: Any

    def __init__(self, config: PreTrainedConfig):
        """Makes a decoder alone of a config of transformers, with random weights."""
        family = MODELS[config.model_type]
        name = family.config_class.architecture
        native = make_native(family, config, name)
        follow_reference(native, config, name)
        native.lm_head = None  # type: ignore[assignment]
        self.__dict__ |= vars(native.model)  # its modules, and what has been set on it
        native.model = self  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, T]
        position_ids: Tensor | None = None,  # [B or 1, T]
        *blocks: Any,
        inputs_embeds: Tensor | None = None,  # [B, T, C], whose name PEFT looks for
        **kwargs: Any,
    ) -> Any:
        """Returns `last_hidden_state` [B, T, C], and `hidden_states` or `router_logits` if they
        are asked for; called with the inputs of the blocks, what the native decoder returns."""
        if blocks:
            return super().forward(input_ids, attention_mask, position_ids, *blocks, **kwargs)
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        arguments |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **kwargs}
        arguments["cache"] = cache = open_cache(self.native, self.config, arguments)
        flags = read_flags(self.config, arguments)
        batch = make_batch(self.native, arguments)
        with capture(self.native, batch, *flags) as captured:
            last, _ = self.native._run_blocks(batch, False)
        output = MoeModelOutputWithPast(
            last_hidden_state=last,
            cache=cache,
            hidden_states=captured.hidden_states(last),
            router_logits=captured.logits_of_routers(),
        )
        return finish(output, self.config, kwargs.get("return_dict"))

    @property
    def blocks(self) -> list[Any]:
        """The layers, of which those that others have wrapped are called as in transformers."""
        return [WrappedBlock(b) if is_wrapped(b) else b for b in cast(Any, self.layers)]

    def recompute(self, block: Any, *inputs: Any) -> Any:
        """Calls a block that backward computes again, with the hooks and the random state that
        others' modules have in this pass."""
        if isinstance(block, WrappedBlock):
            return block(*inputs, recompute=True)
        return checkpoint(keep_hooks(block, block), *inputs, use_reentrant=False)

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's; the native model follows."""
        self.native.training = mode
        return super().train(mode)


def make_native(family: type[CausalLM], config: PreTrainedConfig, name: str) -> CausalLM:
    """Makes a native model with random weights, for transformers' class of this name."""
    values = config.to_dict() | {"architectures": [name]}  # by which a classifier has its head
    return family.from_config(values, dtype=torch.get_default_dtype())


def follow_reference(native: CausalLM, config: PreTrainedConfig, name: str) -> None:
    """Gives a native model the modules, names and order of transformers' class of this name, and a
    decoder that has the config and takes ids."""
    with torch.device("meta"):
        reference = getattr(transformers, name)(deepcopy(config))
    split_projections(native, reference)
    show_stream(native, reference)
    mix_in(native.model, TigonModel, type(reference.get_submodule("model")).__name__)
    native.model.__dict__.update(native=native, config=config)  # no submodule


def finish(output: ModelOutput, config: Any, return_dict: bool | None) -> Any:
    """Returns the output, or a tuple if the call or the config wants one."""
    as_dict = config.return_dict if return_dict is None else return_dict
    return output if as_dict else output.to_tuple()


def read_flags(config: PreTrainedConfig, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """Reads output_hidden_states and output_router_logits from a call, or else from the config;
    raises ValueError for output_attentions."""

    def flag(name: str) -> bool:
        value = arguments.get(name)
        return bool(getattr(config, name, False) if value is None else value)

    if flag("output_attentions"):
        raise ValueError(
            "output_attentions=True: Tigon's attention kernels never have all probabilities in "
            "memory; load the model with transformers to look at them"
        )
    return flag("output_hidden_states"), flag("output_router_logits")
