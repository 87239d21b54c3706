"""RMSNorm as modules."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tigon.kernels.norm.rms_norm import Cast, rms_norm, rms_norm_with_input, sandwich_norm
from tigon.kernels.norm.rms_norm_add import rms_norm_add
from tigon.layers.linear import is_observed


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, times `offset` + weight; `cast` as in `rms_norm`. Unless the
    weight is `learned`, it is ones."""

    weight: Tensor  # [dim]

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        cast: Cast = "before_weight",
        learned: bool = True,
    ):
        super().__init__()
        self.eps, self.offset, self.cast, self.learned = eps, offset, cast, learned
        if learned:
            self.weight = nn.Parameter(torch.empty(dim))
        else:  # on the CPU also where the model is built on the meta device, which keeps no values
            self.register_buffer("weight", torch.ones(dim, device="cpu"), persistent=False)

    def init_weights(self) -> None:
        """Sets the weight so that `offset` + weight is 1."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns the normed x [..., dim], times silu of a gate [..., dim] if there is one."""
        weight = self.weight if self.learned else None
        return rms_norm(x, weight, self.eps, offset=self.offset, cast=self.cast, gate=gate)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def add_normed(x: Tensor, residual: Tensor, norm: nn.Module) -> Tensor:
    """Returns residual + norm(x), in one pass if `can_fuse_norm`."""
    if not can_fuse_norm(norm):
        total: Tensor = residual + norm(x)
        return total
    return rms_norm_add(x, residual, norm.weight, norm.eps, offset=norm.offset, cast=norm.cast)


def can_fuse_norm(norm: object) -> TypeGuard[RMSNorm]:
    """Whether an operator may norm in place of a module: an RMSNorm without hooks."""
    if not isinstance(norm, RMSNorm) or is_observed(norm):
        return False
    return type(norm).forward is RMSNorm.forward  # a subclass may have another


class AddRMSNorm(RMSNorm):
    """Residual addition and the norm after it in one pass: `(norm(x + residual), x + residual)`.

    Without a residual, as in the first block, it is `(norm(x), x)`. `post` is the norm of a
    sublayer's output in Gemma 2 and 3: `post(x)` is added instead of x. It is a separate module, so
    that both norms keep their names in the checkpoint.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None, post: RMSNorm | None = None
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"offset": self.offset, "cast": self.cast}
        variant = self.offset, self.cast  # the sandwich's kernel takes one for both norms
        if post is not None and (
            residual is None or not can_fuse_norm(post) or (post.offset, post.cast) != variant
        ):
            x, post = post(x), None
        if residual is None:
            return rms_norm_with_input(x, self.weight, self.eps, **options)
        if post is None:
            return rms_norm(x, self.weight, self.eps, residual=residual, **options)
        weights = post.weight, self.weight
        return sandwich_norm(x, residual, *weights, self.eps, post_eps=post.eps, **options)
