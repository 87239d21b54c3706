"""GPUs and the rates measured on them, as data.

gpus.json has the data sheets. constants.json has what bench/plan.py, its only writer, fits to
measured steps. A GPU without measurements reaches the shares of its data sheet of the measured one.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tigon.utils.config import suggest
from tigon.utils.json import read_json

FOLDER = Path(__file__).parent
GPUS, CONSTANTS = FOLDER / "gpus.json", FOLDER / "constants.json"
# By the rate of a data sheet: the constants that grow with it
SCALED = {
    "flops": ("products", "grouped", "recurrence"),
    "bandwidth": ("product_bytes", "passes", "optimizer"),
    "nvlink": ("nvlink", "nvlink_many"),
}


@dataclass(frozen=True)
class GPU:
    """A data sheet, in bytes, 16-bit floating-point operations and bytes per second."""

    name: str
    memory: float  # bytes, as torch reports them
    flops: float
    bandwidth: float  # of memory
    nvlink: float  # one direction
    network: float  # this GPU's share of the host's network, one direction
    host: int  # GPUs connected by NVLink
    source: str
    torch_name: str = ""  # torch.cuda.get_device_name


@dataclass(frozen=True)
class Constants:
    """Rates of one GPU, in seconds, bytes and operations; bench/plan.py documents the fit."""

    products: float  # operations per second of GEMMs
    product_bytes: float  # bytes per second that GEMMs read and write
    grouped: float  # operations per second of the experts' grouped GEMMs
    # Operations per second of attention over long rows, forward and backward, by head_dim
    attention: dict[str, float]
    attention_keys: float  # a query takes as long as with so many more keys
    attention_forward: float  # share of the forward in that time
    recurrence: float  # operations per second of the gated delta rule, forward and backward
    passes: float  # bytes per second of memory-bound kernels
    optimizer: float  # bytes per second
    rest: float  # share of a step that no other kind explains
    nvlink: float  # bytes per second received from one GPU
    nvlink_many: float  # and from several
    latency: float  # of a collective within a host
    exposed: float  # share of FSDP's NVLink time that a step waits for
    exposed_once: float  # the same with sharding=gradients: one gather and one reduction per step
    shared_experts: float  # extra seconds per expert-parallel layer and micro-batch
    # Assumed, not measured
    network_share: float  # of the network's rate
    hop: float  # extra latency per further host of a collective

    @classmethod
    def read(cls) -> Self:
        """Reads the constants of the cost model from constants.json."""
        return cls(**read_json(CONSTANTS)["constants"])

    def attention_rate(self, head_dim: int, keys: float) -> float:
        """Returns the attention rate of the nearest head_dim that was measured, for queries that
        see `keys` keys in the mean.

        What a kernel does once per query, whatever the keys, takes relatively longer with few.
        """
        rates = {int(dim): rate for dim, rate in self.attention.items()}
        rate = rates[min(rates, key=lambda dim: abs(dim - head_dim))]
        return rate * keys / (keys + self.attention_keys)

    def scale(self, gpu: GPU, measured: GPU) -> Self:
        """Returns the constants of `gpu`: the same shares of its data sheet as on `measured`."""
        if gpu.name == measured.name:
            return self
        changes: dict[str, Any] = {
            name: getattr(self, name) * (getattr(gpu, rate) / getattr(measured, rate))
            for rate, names in SCALED.items()
            for name in names
        }
        compute = gpu.flops / measured.flops
        changes["attention"] = {d: rate * compute for d, rate in self.attention.items()}
        return replace(self, **changes)


def known_gpus() -> dict[str, GPU]:
    """Returns the data sheets of gpus.json by name."""
    return {name: GPU(name=name, **values) for name, values in read_json(GPUS).items()}


def find_gpu(name: str = "", *, torch_name: str = "") -> tuple[GPU, Constants]:
    """Returns the GPU with this name, or torch's name for it; ValueError for an unknown one."""
    known = known_gpus()
    if torch_name:
        gpu = next((gpu for gpu in known.values() if gpu.torch_name == torch_name), None)
        names = ", ".join(gpu.torch_name for gpu in known.values())
        error = f"nothing is known of {torch_name}, but of {names}"
    else:
        gpu = known.get(name.lower())
        hint = suggest(name, known, cutoff=0.8)  # a100 is not a misspelt h100
        error = f"--gpu {name} must be one of {', '.join(known)}{f'; {hint}' if hint else ''}"
    if gpu is None:
        raise ValueError(error)
    return gpu, Constants.read().scale(gpu, known[read_json(CONSTANTS)["gpu"]])
