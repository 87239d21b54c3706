"""Weights that are drawn in place of being read."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tigon.layers import NF4Weight
from tigon.models.base import LanguageModel
from tigon.models.pretrained.quantization import quantised_layers, store
from tigon.weights import Cut, own_rows


@torch.no_grad()
def init_weights(model: LanguageModel) -> None:
    """Normal(0, initializer_range) matrices, zero biases, unit norms, a zero padding row."""
    for module in model.modules():
        _init(module, model)


@torch.no_grad()
def init_parts(model: LanguageModel, whole: LanguageModel) -> None:
    """The same weights of a model that ranks share, of which each has its part.

    `whole` is the model on the meta device as it was before, and is used up. Every rank draws each
    module's weights whole, one after the other, on the CPU: memory for one of them is enough. Those
    that `model` has in 4 bits are quantised then.
    """
    parameters, cuts = dict(model.named_parameters()), model.cuts
    few_bits = {name: weight for name, _, weight in quantised_layers(model)}
    for path, module in whole.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        module.to_empty(device="cpu", recurse=False)
        _init(module, whole)
        for own, drawn in module.named_parameters(recurse=False):
            name = f"{path}.{own}"
            if (few := few_bits.get(name)) is not None:
                assert isinstance(few, NF4Weight)  # of drawn weights there are no others
                store(few, name, drawn.detach())
            elif name in parameters:  # not a head that is tied
                _keep(name, parameters[name], cuts.get(name), drawn.detach())
        del drawn  # before the next one is there
        module.to_empty(device="meta", recurse=False)


def _keep(name: str, parameter: Tensor, cut: Cut | None, drawn: Tensor) -> None:
    """This rank's part of a weight."""
    part = drawn if cut is None else cut.take(drawn)
    own, first = own_rows(name, parameter)
    own.copy_(part.view(-1, *own.shape[1:])[first : first + len(own)])


def _init(module: nn.Module, model: LanguageModel) -> None:
    """Of a module's own parameters."""
    own_init: Callable[[], None] | None = getattr(module, "init_weights", None)
    if own_init is not None:
        own_init()
        return
    for name, p in module.named_parameters(recurse=False):
        if name == "bias":
            nn.init.zeros_(p)
        elif not (module is model.lm_head and model.ties_head):
            nn.init.normal_(p, std=model.config.initializer_range)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()
