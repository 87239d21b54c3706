"""The sizes of a device mesh."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshSizes:
    """The number of ranks in each dimension; tensor ranks, which talk the most, are neighbors."""

    replicate: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1  # neighboring ranks of a replica; not a factor of the number of ranks

    @property
    def data(self) -> int:
        """The number of ranks with different rows of the data."""
        return self.replicate * self.fsdp

    @property
    def shards(self) -> int:
        """The number of ranks over which FSDP shards a tensor rank's weights."""
        return self.fsdp * self.context

    @property
    def expert_replicas(self) -> int:
        """The number of ranks of a replica that have the same experts."""
        return self.shards * self.tensor // self.expert

    @property
    def fsdp_ranks(self) -> int:
        """The number of ranks that FSDP shards or replicates over; 1 if all are tensor ranks."""
        return self.replicate * max(self.shards, self.expert_replicas if self.expert > 1 else 1)

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.replicate * self.shards * self.tensor

    @property
    def description(self) -> str:
        """A text with the dimensions that have more than one rank."""
        sizes = {"replicate": self.replicate, "fsdp": self.fsdp, "context": self.context}
        sizes["tensor"] = self.tensor
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return product + (f", expert {self.expert}" if self.expert > 1 else "")
