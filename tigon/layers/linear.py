"""Linear layers, and those that Hugging Face stores separately and one product computes."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tigon.kernels.linear.dropout import Dropout
from tigon.kernels.linear.linear import gemv, uses_gemv
from tigon.kernels.linear.lora import PLAIN_BASE, lora_linear, make_fp8_base
from tigon.kernels.mlp.gated_act import Activation, gated_act
from tigon.kernels.runtime import is_plain
from tigon.layers.lora import Adapters
from tigon.layers.quantized import QuantizedWeight


class Linear(nn.Linear):
    """nn.Linear, faster for a single row without gradients: the next token of one sequence.

    With `fp8`, products in training are of 8-bit floats, but not in evaluation. `lora`: low-rank
    adapters, one of which may be added to the product. `quantized`: a frozen weight in few bits
    that replaces the parameter `weight`.

    `dropout_keys` int64 [...] of x [..., C] seed the adapter's dropout; without them there is none.
    """

    fp8 = False
    zero_init: Collection[str] = ("bias",)  # parameters that begin as zeros

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        super().__init__(in_features, out_features, bias=bias)
        self.lora: Adapters | None = None
        self.quantized: QuantizedWeight | None = None

    @property
    def weight_meta(self) -> Tensor:
        """Shape, dtype and requires_grad of the weight; the values may be missing."""
        return self.weight if self.quantized is None else self.quantized.weight_meta

    def values(self) -> Tensor:
        """Returns the weight; if it is quantized, dequantized in new memory."""
        return self.weight if self.quantized is None else self.quantized.dequantize()

    def quantize(self, weight: QuantizedWeight) -> None:
        self.register_parameter("weight", None)
        self.quantized = weight

    def dequantize(self) -> None:
        """Replaces a quantized weight by a frozen parameter."""
        if self.quantized is not None:
            self.weight = nn.Parameter(self.quantized.dequantize(), requires_grad=False)
            self.quantized = None

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is added to the product."""
        return self.lora is not None and self.lora.active() is not None

    # Overridden in layers that tensor-parallel ranks share

    @property
    def local_bias(self) -> Tensor | None:
        """The bias that `product` adds."""
        return self.bias

    def gather_input(self, x: Tensor) -> Tensor:
        """Returns x; if ranks share the layer, the tokens of all of them."""
        return x

    def reduce_output(self, y: Tensor) -> Tensor:
        """Returns y; if ranks share the layer, its sum over them."""
        return y

    def product(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns x W^T with the bias and the active adapter, without communication."""
        base = make_fp8_base() if self.fp8 and self.training else PLAIN_BASE
        weight, own_bias = self.weight, self.local_bias
        if self.quantized is not None:
            weight, base = self.quantized.weight_meta, self.quantized.base(base)
        if self.lora is not None and (low := self.lora.active()) is not None:
            bias = None if low.dora else own_bias
            drops = None
            if dropout_keys is not None and low.dropout and self.training:
                drops = Dropout(dropout_keys, low.seed, low.dropout)
            y = lora_linear(x, weight, bias, low.lora_A, low.additions(), base=base, dropout=drops)
            if low.dora:
                # y + y (scale - 1): in 16 bits, a scale close to 1 would be rounded to 1
                y = torch.addcmul(y, y, (low.dora_scale(self.values()) - 1).to(y.dtype))
                y = y if own_bias is None else y + own_bias
            return y
        return base.linear(x, weight, own_bias)

    def _product(self, x: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """Returns `product`; methods that replace it need not take keys that are None."""
        return self.product(x) if dropout_keys is None else self.product(x, dropout_keys)

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns `product` of the gathered input, reduced; on one rank that is the product."""
        return self.reduce_output(self._product(self.gather_input(x), dropout_keys))


class RowOrder(NamedTuple):
    """How checkpoints order the rows of a projection whose sections are apart here.

    There each of `groups`, such as heads, has a run of rows of every section, of these `sizes`.
    Here all groups of one section stand together, and the sections in the order `sections`.
    """

    groups: int
    sizes: tuple[int, ...]
    sections: tuple[int, ...]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yields runs of rows: the first in the checkpoint, the first here, and their number."""
        target = 0
        for section in self.sections:
            first, size = sum(self.sizes[:section]), self.sizes[section]
            for group in range(self.groups):
                yield group * sum(self.sizes) + first, target, size
                target += size


class FusedLinear(Linear):
    """Linear layers over the same input, stacked by rows.

    `parts` are their output sizes in row order; loading and export split by them. `orders`: of each
    part, how checkpoints order its rows, or None if they are the same; (): they all are.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        *,
        bias: bool = False,
        orders: Sequence[RowOrder | None] = (),
    ):
        super().__init__(in_features, sum(parts), bias=bias)
        self.parts = parts
        self.orders = (*orders,) or (None,) * len(parts)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"


class GatedLinear(FusedLinear):
    """`act(gate(x)) * up(x)` with gate and up as one product: [..., in_features] -> [..., size].

    The product never leaves this layer, so its gradient may take its memory.
    """

    def __init__(self, in_features: int, size: int, act: Activation, *, bias: bool = False):
        super().__init__(in_features, (size, size), bias=bias)
        self.act: Activation = act

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns act(gate) * up [..., size]; of one row without gradients from one kernel."""
        x = self.gather_input(x)
        if not self.has_adapter and self.quantized is None and uses_gemv(x, self.weight):
            return gemv(x, self.weight, self.bias, self.act)
        return gated_act(self._product(x, dropout_keys), self.act, overwrite=True)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act}"


# The methods before another library patches a class
_FORWARD = {kind: kind.forward for kind in (nn.Linear, Linear, FusedLinear, GatedLinear)}
_PRODUCT = {kind: getattr(kind, "product", None) for kind in _FORWARD}


def is_unpatched(module: nn.Module, kind: type[nn.Linear]) -> bool:
    """Whether a call of the module runs `kind.forward` and nothing else.

    It does not if there are hooks, a method of the module or its class was replaced, or a weight is
    a tensor subclass. A class that delegates its product answers by a method `computed_unseen`.
    """
    namespace = type(module)
    if (computed_unseen := getattr(namespace, "computed_unseen", None)) is not None:
        return bool(computed_unseen(module))
    if namespace.forward is not _FORWARD[kind]:
        return False
    if getattr(namespace, "product", None) is not _PRODUCT[kind]:
        return False
    weights = module._parameters
    if "weight" not in weights or any(w is not None and not is_plain(w) for w in weights.values()):
        return False
    return module.__dict__.keys().isdisjoint(("forward", "product")) and not is_observed(module)


def is_observed(module: nn.Module) -> bool:
    """Whether hooks or a replaced `__call__` see the inputs and outputs of the module."""
    return bool(
        type(module).__call__ is not nn.Module._wrapped_call_impl
        or module._compiled_call_impl is not None
        or module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or _has_any_global_hook()
    )
