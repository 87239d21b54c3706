"""The settings that say how ranks share a run."""

import math
from dataclasses import dataclass

from tigon.parallel import MeshSizes
from tigon.utils.config import setting


@dataclass(frozen=True)
class Parallel:
    """How many ranks each dimension has; their product, without `expert`, is the number of all."""

    replicate: int = setting(1, "groups of ranks that have all weights, each", least=1)
    fsdp: int | None = setting(
        None, "ranks that divide weights, gradients and states; null: all that are left", least=1
    )
    context: int = setting(1, "ranks that divide the tokens of a row", least=1)
    tensor: int = setting(1, "ranks that divide each matrix and the tokens between them", least=1)
    expert: int = setting(
        1, "of fsdp x context x tensor ranks, those that divide the experts of each layer", least=1
    )

    def sizes(self, ranks: int) -> MeshSizes:
        """ValueError for a number of ranks that is not the product, or that `expert` does not
        divide."""
        others = self.replicate * self.context * self.tensor
        fsdp = max(1, ranks // others) if self.fsdp is None else self.fsdp
        sizes = MeshSizes(self.replicate, fsdp, self.context, self.tensor, self.expert)
        if sizes.ranks == ranks:
            if sizes.shards * self.tensor % self.expert:
                raise ValueError(
                    f"parallel.expert={self.expert} must divide the ranks that share the weights, "
                    f"{sizes.shards * self.tensor} (fsdp {fsdp} x context {self.context} x tensor "
                    f"{self.tensor}): start more processes (--nproc), or change parallel.expert"
                )
            return sizes
        numbers = {"replicate": self.replicate, "fsdp": self.fsdp, "context": self.context}
        numbers["tensor"] = self.tensor
        named = [f"{name} {size}" for name, size in numbers.items() if size not in (None, 1)]
        product = math.prod(size for size in numbers.values() if size is not None)
        exact = self.fsdp is not None
        equals = f" = {product}" if len(named) > 1 else ""
        raise ValueError(
            f"parallel: {' x '.join(named) or 'fsdp 1'}{equals} "
            f"{'is not' if exact else 'does not divide'} the number of ranks, {ranks}: start "
            f"{'' if exact else 'a multiple of '}{product} processes (--nproc), or change parallel"
        )
