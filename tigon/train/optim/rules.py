"""The updates of AdamW and SGD, by torch's fused kernels."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd


class Rule(Protocol):
    """An update of tensors in place, all float32."""

    states: Sequence[str]

    def __call__(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        """`steps`: those that were done before."""
        ...


class AdamW:
    states: Sequence[str] = ("exp_avg", "exp_avg_sq")

    def __call__(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        beta1, beta2 = group["betas"]
        torch_adamw(
            weights,
            gradients,
            states["exp_avg"],
            states["exp_avg_sq"],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class SGD:
    def __init__(self, momentum: float) -> None:
        self.states: Sequence[str] = ("momentum_buffer",) if momentum else ()

    def __call__(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        # torch begins with the gradient, and so does a momentum of zeros
        momenta: list[Tensor | None] = [None] * len(weights)
        if self.states:
            momenta = [*states["momentum_buffer"]]
        torch_sgd(
            weights,
            gradients,
            momenta,
            fused=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )
