"""GPUs and what was measured on them, as data.

gpus.json has what data sheets say. constants.json has what bench/plan.py fits to measured steps;
nobody else writes it. Of a GPU on which nothing was measured, its data sheet's rates are taken by
the shares that the measured GPU reaches of its own.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from tigon.utils.config import suggest
from tigon.utils.json import read_json

FOLDER = Path(__file__).parent
GPUS, CONSTANTS = FOLDER / "gpus.json", FOLDER / "constants.json"


@dataclass(frozen=True)
class GPU:
    """By its data sheet: bytes, operations of 16-bit floats and bytes a second."""

    name: str
    memory: float  # bytes that torch reports
    flops: float
    bandwidth: float  # of its memory
    nvlink: float  # in one direction
    network: float  # of its share of a host's network, in one direction
    host: int  # GPUs that NVLink connects
    source: str
    torch_name: str = ""  # what torch.cuda.get_device_name says of it


@dataclass(frozen=True)
class Constants:
    """Of one GPU, in seconds, bytes and operations; what is fitted to what, bench/plan.py says."""

    products: float  # operations a second of GEMMs
    product_bytes: float  # and bytes a second, for what a GEMM reads and writes
    grouped: float  # operations a second of the experts' grouped GEMMs
    attention: dict[str, float]  # operations a second, forward and backward, by dimension of a head
    attention_forward: float  # the share of the forward in that time
    passes: float  # bytes a second of the memory-bound kernels
    optimizer: float  # bytes a second
    rest: float  # of a step, what no kind above has
    nvlink: float  # bytes a second that a GPU receives from one other
    nvlink_many: float  # and from several
    latency: float  # of a collective inside a host
    exposed: float  # of the time of FSDP's collectives over NVLink, what a step takes longer
    exposed_once: float  # the same with sharding=gradients, which gathers and reduces once a step
    shared_experts: float  # seconds more of a layer and micro-batch, where ranks share experts
    # Assumed, not measured
    network_share: float  # reached of the network's rate
    hop: float  # more latency for each further host of a collective

    @classmethod
    def read(cls, path: Path = CONSTANTS) -> Self:
        values = read_json(path)["constants"]
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def head_rate(self, dim: int) -> float:
        """Of attention, for heads of `dim`: that of the nearest dimension that was measured."""
        known = {int(d): rate for d, rate in self.attention.items()}
        return known[min(known, key=lambda d: abs(d - dim))]

    def on(self, gpu: GPU, measured: GPU) -> Self:
        """For another GPU: with the same shares of its data sheet."""
        if gpu.name == measured.name:
            return self
        compute = gpu.flops / measured.flops
        memory = gpu.bandwidth / measured.bandwidth
        link = gpu.nvlink / measured.nvlink
        changes: dict[str, Any] = {n: getattr(self, n) * compute for n in ("products", "grouped")}
        changes |= {n: getattr(self, n) * memory for n in ("product_bytes", "passes", "optimizer")}
        changes |= {n: getattr(self, n) * link for n in ("nvlink", "nvlink_many")}
        changes["attention"] = {d: rate * compute for d, rate in self.attention.items()}
        return replace(self, **changes)


def gpus() -> dict[str, GPU]:
    """By name."""
    known = read_json(GPUS)
    return {name: GPU(name=name, **values) for name, values in known.items()}


def find_gpu(name: str) -> tuple[GPU, Constants]:
    """The GPU of this name, and its constants; ValueError for one that is not known."""
    known = gpus()
    gpu = known.get(name.lower())
    if gpu is None:
        hint = suggest(name, known, cutoff=0.8)  # a100 is another GPU than h100, no slip
        more = f"; {hint}" if hint else ""
        raise ValueError(f"--gpu {name} must be one of {', '.join(known)}{more}")
    measured = known[read_json(CONSTANTS)["gpu"]]
    return gpu, Constants.read().on(gpu, measured)


def gpu_called(torch_name: str) -> tuple[GPU, Constants]:
    """As `find_gpu`, by what torch calls it."""
    known = gpus().values()
    for gpu in known:
        if gpu.torch_name == torch_name:
            return find_gpu(gpu.name)
    names = ", ".join(gpu.torch_name for gpu in known)
    raise ValueError(f"nothing is known of {torch_name}, but of {names}")
