"""The ways in which GPUs can share a run, and why some cannot be.

# B rows of a micro-batch, T tokens of a row
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tigon.layers import Attention
from tigon.models import CausalLM
from tigon.plan.gpu import GPU, Constants
from tigon.plan.work import Shapes
from tigon.train.config import Config

MOST_TOKENS = 2**16  # of a micro-batch on a GPU, if it has several rows: more gains nothing
# As the setting activation_checkpointing: no block is computed again, every second one, all
AGAIN: dict[bool | int, float] = {False: 0.0, 2: 0.5, True: 1.0}


@dataclass(frozen=True)
class Job:
    """What is to be trained on what."""

    shapes: Shapes
    config: Config  # settings of the run; those of layouts in it do not matter
    gpus: int
    gpu: GPU
    constants: Constants
    seq_len: int  # T
    batch_rows: int  # of a step, on all GPUs together


@dataclass(frozen=True)
class Layout:
    """Ranks of each dimension of the mesh, and what each computes at once. Ranks that differ in the
    last dimension alone are neighbours."""

    replicate: int
    fsdp: int
    context: int
    tensor: int
    rows: int = 1  # B
    micro_batches: int = 1  # of a step, on each rank
    checkpointing: bool | int = False
    sharding: Any = "full"

    @property
    def data(self) -> int:
        """Ranks with different rows."""
        return self.replicate * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks that divide what tensor parallelism leaves of the weights."""
        return self.fsdp * self.context

    @property
    def again(self) -> float:
        """The share of blocks that are computed again."""
        return AGAIN[self.checkpointing]

    @property
    def settings(self) -> str:
        """For `tigon train`."""
        sizes = {n: getattr(self, n) for n in ("replicate", "fsdp", "context", "tensor")}
        found = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
        found.append(f"micro_batch_size={self.rows}")
        if self.checkpointing:
            found.append(f"activation_checkpointing={str(self.checkpointing).lower()}")
        if self.sharding != "full":
            found.append(f"sharding={self.sharding}")
        return " ".join(found)

    @property
    def mesh(self) -> tuple[int, int, int, int, str]:
        """What of it a plan has one line for."""
        return self.replicate, self.fsdp, self.context, self.tensor, self.sharding


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def meshes(gpus: int) -> Iterator[Layout]:
    """Every product of four dimensions that has so many GPUs. Groups that all have all weights are
    of ranks that share them."""
    for tensor in divisors(gpus):
        for context in divisors(gpus // tensor):
            left = gpus // tensor // context
            for fsdp in divisors(left):
                if fsdp > 1 or fsdp == left:
                    yield Layout(left // fsdp, fsdp, context, tensor)


def misfit(job: Job, layout: Layout) -> str | None:
    """Why the job cannot have this mesh, whatever its micro-batch; None if it can."""
    t, context = layout.tensor, layout.context
    if t > job.gpu.host:
        return f"tensor above {job.gpu.host}: NVLink connects so many GPUs"
    if (reason := indivisible(job.shapes.part(1), t, context)) is not None:
        return reason
    if job.seq_len % (t * context):
        return f"tensor x context={t * context} does not divide a row of {job.seq_len:,} tokens"
    if job.batch_rows % layout.data:
        few = job.batch_rows < layout.data
        why = "more than" if few else "no divisor of"
        tokens = job.batch_rows * job.seq_len
        return (
            f"replicate x fsdp={layout.data}: {why} the {job.batch_rows:,} rows of a step "
            f"({tokens:,} tokens)"
        )
    return None


def indivisible(model: CausalLM, tensor: int, context: int) -> str | None:
    """What of the model so many ranks cannot divide."""
    c = model.config
    heads, kv = c.num_attention_heads, c.num_key_value_heads
    mixers = [block.mixer for block in model.model.layers]
    other = next((type(m).__name__ for m in mixers if not isinstance(m, Attention)), None)
    if other is not None and tensor * context > 1:
        return f"tensor or context above 1: {other} is not divided"
    if heads % tensor or (kv % tensor and tensor % kv):
        return f"tensor={tensor} does not divide {heads} heads with {kv} of keys and values"
    sizes = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    for name in sizes:
        if getattr(c, name, 0) % tensor:
            return f"tensor={tensor} does not divide {name}={getattr(c, name)}"
    # Beyond the heads a run is possible, but its memory is not that of shorter rows
    if heads % (tensor * context):
        return f"tensor x context={tensor * context} does not divide {heads} heads"
    return None


def variants(job: Job, mesh: Layout) -> Iterator[Layout]:
    """A mesh with every micro-batch and checkpointing that it may have."""
    each, ways = job.batch_rows // mesh.data, ["full"]
    if mesh.fsdp == job.gpus > 1:
        ways.append("gradients")  # which leaves each rank all weights
    for rows in divisors(each):
        if rows > 1 and rows * job.seq_len // mesh.context > MOST_TOKENS:
            break
        for checkpointing in AGAIN:
            for sharding in ways:
                yield Layout(*mesh.mesh[:4], rows, each // rows, checkpointing, sharding)
