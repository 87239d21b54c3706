"""The norm of all gradients, and clipping by it."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tigon.kernels.norm.grad_norm import SquaredNorm
from tigon.parallel import TensorParallel
from tigon.train.distributed import local
from tigon.train.optim.adamw import LowPrecisionOptimizer
from tigon.weights import row_group

PIECE = 2**16  # numbers whose norm a CPU computes in float32


@torch.no_grad()
def clip(model: nn.Module, optimizer: Optimizer, max_norm: float) -> tuple[Tensor, Tensor | None]:
    """Clips as `clip_gradients`; returns the norm before, and None. Where the optimizer's fused
    kernel uses all gradients, leaves them unscaled and returns the scale for `optimizer.step`."""
    if not (
        isinstance(optimizer, LowPrecisionOptimizer)
        and optimizer.uses_kernel(p for p in model.parameters() if p.grad is not None)
    ):
        return clip_gradients(model, max_norm), None
    gradients = [g.contiguous() for _, g in _counted_gradients(model, model.named_parameters())]
    parameter = next(model.parameters())
    squares = torch.zeros((), dtype=torch.float64, device=parameter.device)
    if gradients:
        squares = optimizer.squares(gradients)
    norm = _sum_over_ranks(squares, model).sqrt().float()
    return norm, _factor(norm, max_norm) if max_norm else None


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients down to max_norm (0: not at all), and returns their global norm before.

    The norm is float32 for all dtypes: torch.nn.utils computes that of bfloat16 gradients in
    bfloat16. Every rank calls this.
    """
    parameters = list(model.parameters())
    gradients = [g for _, g in _rank_gradients(parameters)]
    counted = [g for _, g in _counted_gradients(model, model.named_parameters())]
    norm = _combine_norms(_norms(counted), model)
    if max_norm and gradients:
        torch._foreach_mul_(gradients, _factor(norm, max_norm))
    return norm


class BucketedNorm:
    """Computes the norm of all gradients from buckets that exist one at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kernels: dict[Hashable, SquaredNorm] = {}  # each keeps the tables of a bucket
        self.squares: list[Tensor] = []  # float64 sums of buckets, which a kernel computes
        # Norms of the other parameters, or of the parts that this rank counts
        self._norms: dict[Tensor, list[Tensor]] = {}

    def begin(self) -> None:
        """Forgets the gradients that were added."""
        self.squares, self._norms = [], {}

    @torch.no_grad()
    def add(self, part: Hashable, named: Mapping[str, Tensor], *, by_kernel: bool) -> None:
        """Adds the gradients of the bucket with the key `part`, whose `named` parameters have them;
        `by_kernel`: their norm is computed by the fused kernel."""
        counted = _counted_gradients(self._model, named.items())
        if not counted:
            return
        gradients = [gradient for _, gradient in counted]
        if by_kernel:
            kernel = self._kernels.setdefault(part, SquaredNorm())
            self.squares.append(kernel([g.contiguous() for g in gradients]))
            return
        for (p, _), norm in zip(counted, _norms(gradients), strict=True):
            self._norms.setdefault(p, []).append(norm)

    @torch.no_grad()
    def total(self) -> Tensor:
        """Returns the float32 norm of all that was added on all ranks. Every rank calls this."""
        model = self._model
        norms = [norm for p in model.parameters() for norm in self._norms.get(p, ())]
        if not self.squares:
            return _combine_norms(norms, model)
        squares = torch.stack([*self.squares, *(norm.double().square() for norm in norms)])
        return _sum_over_ranks(squares.sum(), model).sqrt().float()


def _rank_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns parameters with their gradients, without those this rank has no rows of."""
    pairs = [(p, local(p.grad)) for p in parameters if p.grad is not None]
    return [(p, g) for p, g in pairs if g.numel()]


def _tensor_parallel(model: nn.Module) -> TensorParallel | None:
    """The tensor parallelism of the model, which need not be a language model."""
    return getattr(model, "tensor_parallel", None)


def _counted_gradients(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Returns parameters with the gradients that this rank adds to the global norm: one
    tensor-parallel rank counts those that all replicate."""
    if (tensor := _tensor_parallel(model)) is not None:
        return list(tensor.unique_gradients(named))
    return _rank_gradients(p for _, p in named)


def _norms(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns each gradient's norm, in float32, or in float64 on a CPU, which adds up in pieces: in
    float32, the norm of a large matrix would be 2e-3 off."""
    if not gradients:
        return ()
    if gradients[0].device.type != "cpu":
        return torch._foreach_norm([*gradients], 2, dtype=torch.float32)
    pieces = (
        torch._foreach_norm(g.reshape(-1).split(PIECE), 2, dtype=torch.float32) for g in gradients
    )
    return [torch.linalg.vector_norm(torch.stack([*norms]).double()) for norms in pieces]


def _combine_norms(norms: Sequence[Tensor], model: nn.Module) -> Tensor:
    """Returns the float32 norm over all ranks from the norms of this rank's gradients."""
    parameter = next(model.parameters())
    norm = torch.zeros((), device=parameter.device)
    if norms:
        norm = torch.linalg.vector_norm(torch.stack([*norms]))
    if isinstance(parameter, DTensor) or _tensor_parallel(model) is not None:
        norm = _sum_over_ranks(norm.double().square(), model).sqrt()
    return norm.float()


def _sum_over_ranks(squares: Tensor, model: nn.Module) -> Tensor:
    """Returns the sum of squares over the ranks that hold other parts of the gradients; may change
    `squares`. All of them call this."""
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor):
        dist.all_reduce(squares, group=row_group(parameter))
    if (tensor := _tensor_parallel(model)) is not None:
        squares = tensor.ranks.sum(squares)
    return squares


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
