"""The outputs of a call: transformers' fields in its order, and after them Tigon's.

# B batch, T tokens, n kept tokens, C model dim, V vocab, L layers with experts, E experts
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from tigon.layers.lm_head import run_head
from tigon.models.causal_lm import CausalLM
from tigon.models.outputs import CausalLMOutput
from tigon.models.targets import Targets

# What is called `past_key_values` in CausalLMOutput has transformers' name, and metrics are fields
NAMES = frozenset(("loss", "logits", "aux_loss", "logprobs", "criteria", "hidden", "logits_at"))


@dataclass
class TigonFields:
    """What transformers' outputs do not have; None unless a call asks for it."""

    predicted_tokens: Tensor | None = None  # int64 [B, n], the most likely next token
    entropy: Tensor | None = None  # fp32 [B, n]
    max_logit: Tensor | None = None  # fp32 [B, n]
    z: Tensor | None = None  # fp32 [B, n], log of the sum of exponentials
    nll: Tensor | None = None  # fp32 [B, n]
    accuracy: Tensor | None = None  # scalar
    expert_load: Tensor | None = None  # [L, E]
    logprobs: Tensor | None = None  # fp32 [B, n]
    criteria: tuple[Tensor, ...] | None = None
    hidden: Tensor | None = None  # [B, T, C], normed
    logits_at: Tensor | None = None  # [n, V]


class LogitsOnDemand:
    """Computes `logits` when somebody first reads them, where a function is in their place.

    `items` and `values` have the function, so that whoever copies an output, as accelerate and DDP
    do, computes nothing.
    """

    @property
    def logits(self) -> Any:
        """The logits [B, n, V], or None."""
        value = vars(self)["logits"]
        if callable(value):
            self.logits = value = value()
        return value

    @logits.setter
    def logits(self, value: Any) -> None:
        vars(self)["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):  # to_tuple would compute logits that are not asked for
            key = tuple(self.keys())[key]  # type: ignore[attr-defined]
        elif isinstance(key, slice):
            return tuple(self[name] for name in tuple(self.keys())[key])  # type: ignore[attr-defined]
        if key == "logits" and key in self:  # type: ignore[operator]
            return self.logits
        return super().__getitem__(key)  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, or the default."""
        try:
            return self[key]
        except KeyError:
            return default


@dataclass
class DenseOutput(LogitsOnDemand, TigonFields, CausalLMOutputWithPast):
    """The output of a language model without experts."""


@dataclass
class MoeOutput(LogitsOnDemand, TigonFields, MoeCausalLMOutputWithPast):
    """The output of a mixture of experts."""


def defer_logits(native: CausalLM, hidden: Tensor, targets: Targets) -> Callable[[], Tensor]:
    """Returns a function that computes the logits of a loss that had none, with this autocast and
    grad mode; under autocast in fp32, as accelerate returns what a model does.

    It raises ValueError once lm_head has been changed, and always under torch.compile.
    """
    if torch.compiler.is_compiling():
        return refuse_logits
    kind, grad = hidden.device.type, torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    versions = read_versions(native.lm_head)

    def compute() -> Tensor:
        if read_versions(native.lm_head) != versions:
            raise ValueError(
                "logits were not computed with the loss, and lm_head has been changed since: "
                "read them before optimizer.step(), or give the call return_logits=True"
            )
        rest: dict[str, Any] = {"active": None, "at": None, "logits_bytes": None}
        with torch.autocast(kind, dtype, enabled), torch.set_grad_enabled(grad):
            kept = targets.take(hidden)
            head, options = native.lm_head, native.logit_options
            out = run_head(head, options, kept, (), return_logits=True, **rest)
        assert out.logits is not None
        return out.logits.float() if enabled else out.logits

    return compute


def read_versions(module: nn.Module) -> dict[Tensor, int | None]:
    """Maps the module's parameters to their versions, which count changes in place."""
    return {p: None if p.is_inference() else p._version for p in module.parameters()}


def refuse_logits() -> Tensor:
    """Raises ValueError where logits cannot be computed later."""
    raise ValueError(
        "a compiled model in training mode has computed its loss without logits: give the call "
        'return_logits=True, or from_pretrained tigon_options={"return_logits": True}'
    )


def to_transformers(out: CausalLMOutput, moe: bool, **values: Any) -> DenseOutput | MoeOutput:
    """Makes transformers' output from a native one; `values` are its other fields."""
    kind = MoeOutput if moe else DenseOutput
    values = {name: getattr(out, name) for name in NAMES} | values
    values["criteria"] = out.criteria or None
    metrics = {name: value for name, value in out.metrics.items() if values.get(name) is None}
    names = {f.name for f in fields(kind)}
    return kind(**{k: v for k, v in {**values, **metrics}.items() if k in names})
