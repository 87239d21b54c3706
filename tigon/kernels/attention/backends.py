"""Chooses the attention backend: a pure function of the call and of the machine."""

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tigon.kernels.runtime import device_fact

Backend = Literal["auto", "fa4", "cudnn", "flash", "triton", "flex", "sdpa", "reference"]
HALF = (torch.bfloat16, torch.float16)
MIN_KERNEL_TOKENS = 256  # fewer tokens are not worth compiling a kernel for
UNTRACED_SINKS = "torch.compile does not trace its sinks"
CUDNN_MAX_TOKENS = 512  # tokens up to which cuDNN is the fastest on Hopper
log = logging.getLogger("tigon.attention")
_logged: set[tuple[str, ...]] = set()  # what was logged


class AttentionRequest(NamedTuple):
    """The properties of an attention call that decide which backend serves it."""

    device: str = "cuda"
    sm: int = 90  # compute capability of a GPU, times ten
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    longest: int | None = None  # tokens of the longest sequence, where the host knows it
    # "rows": each row is a sequence; "sequences": packed, with known bounds; anything else is the
    # reason why only a dense mask describes the batch
    layout: str = "rows"
    cached: bool = False  # the tokens continue a cache
    part: bool = False  # the queries are a part of their rows
    single: bool = False  # each row has one
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    grad: bool = False
    deterministic: bool = False
    compiling: bool = False


class BackendChoice(NamedTuple):
    """The backend that serves a call, and why it was taken."""

    name: str
    why: str


def _first_problem(*rules: tuple[bool, str]) -> str | None:
    """Returns the first message whose condition holds, of (condition, message) pairs, or None."""
    return next((reason for holds, reason in rules if holds), None)


def _fused_problem(r: AttentionRequest, widest: int = 256) -> str | None:
    """Returns the requirement of every fused kernel that the request does not meet, or None."""
    return _first_problem(
        (r.device != "cuda", f"it runs on CUDA GPUs, not on {r.device}"),
        (r.sm < 80, f"it needs sm_80 or newer, and this GPU is sm_{r.sm}"),
        (r.dtype not in HALF, f"it takes bfloat16 and float16, not {str(r.dtype)[6:]}"),
        (r.head_dim % 8 > 0, f"head_dim {r.head_dim} is not a multiple of 8"),
        (r.head_dim > widest, f"head_dim {r.head_dim} is above {widest}"),
        (r.layout not in ("rows", "sequences"), f"it takes no dense mask, and {r.layout}"),
    )


def _fa4_problem(r: AttentionRequest) -> str | None:
    """Returns why flash-attn-4 cannot serve the request, or None."""
    hopper, blackwell = r.sm // 10 == 9, r.sm // 10 == 10
    # On Hopper 4.0.0b36 writes dQ for head_dim in multiples of 16, and reads it in multiples of 32.
    # Head dims that both round to the same number have not been tested
    torn = hopper and r.grad and r.head_dim % 32 > 0
    wrong = f"its backward pass is wrong for head_dim {r.head_dim}, which is no multiple of 32"
    uncapped = blackwell and r.grad and r.head_dim == 256 and r.softcap
    return _fused_problem(r) or _first_problem(
        (not (hopper or blackwell), f"it is for Hopper and Blackwell, not for sm_{r.sm}"),
        (blackwell and 128 < r.head_dim < 256, f"head_dim {r.head_dim} on Blackwell"),
        (torn, wrong),
        (uncapped, "its backward pass on Blackwell has no softcap for head_dim 256"),
        (r.sinks and r.compiling, UNTRACED_SINKS),
    )


def _cudnn_problem(r: AttentionRequest) -> str | None:
    """Returns why cuDNN cannot serve the request, or None."""
    return _fused_problem(r) or _first_problem(
        (r.sm != 90 and r.head_dim > 128, f"head_dim {r.head_dim} needs sm_90, not sm_{r.sm}"),
        (r.longest == 1, "it takes no sequence of one token"),
        (r.deterministic and r.grad, "its backward pass is not deterministic"),
        (r.window, "it has no sliding window"),
        (r.softcap, "it has no softcap"),
        (r.sinks, "it has no sinks"),
        (r.layout == "sequences", "it has no packed sequences"),
        (r.cached, "it does not continue a cache"),
        (r.part, "it has no queries of parts of rows"),
        (r.compiling, "torch.compile calls it by way of sdpa"),
    )


def _flash_problem(r: AttentionRequest) -> str | None:
    """Returns why FlashAttention-2 cannot serve the request, or None."""
    small = (86 <= r.sm <= 89 or r.sm in (120, 121)) and r.grad and 192 < r.head_dim <= 224
    return _fused_problem(r) or _first_problem(
        (r.softcap, "it has no softcap"),
        (small, f"head_dim {r.head_dim} has no backward pass on sm_{r.sm}"),
        (r.sinks and r.compiling, UNTRACED_SINKS),
    )


def _triton_problem(r: AttentionRequest) -> str | None:
    """Returns why Tigon's kernels cannot serve the request, or None."""
    return _fused_problem(r, 512) or _first_problem(
        (r.sm // 10 != 9, f"it is for Hopper, not for sm_{r.sm}"),
        (r.softcap, "it has no softcap"),
        (r.sinks, "it has no sinks"),
    )


def _flex_problem(r: AttentionRequest) -> str | None:
    """Returns why FlexAttention cannot serve the request, or None."""
    return _first_problem(
        (r.device != "cuda", f"it runs on CUDA GPUs, not on {r.device}"),
        (r.cached, "it does not continue a cache"),
        (r.head_dim < 16, f"head_dim {r.head_dim} is below 16"),
        (r.head_dim > 256, f"its blocks of head_dim {r.head_dim} do not fit into shared memory"),
    )


# Each says why it cannot serve a request, or None
OBSTACLES: dict[str, Callable[[AttentionRequest], str | None]] = {
    "fa4": _fa4_problem,
    "cudnn": _cudnn_problem,
    "flash": _flash_problem,
    "triton": _triton_problem,
    "flex": _flex_problem,
    "sdpa": lambda r: _first_problem(
        (r.softcap, "it has no softcap"), (r.sinks, "it has no sinks")
    ),
    "reference": lambda r: None,
}
PLAIN = ("sdpa", "reference")  # on any device
# For single tokens that continue a cache: both split the keys among thread blocks, others do not
DECODING = {False: PLAIN, True: ("flash", "reference")}  # by whether there are sinks


def _order(r: AttentionRequest) -> tuple[str, ...]:
    """Returns all backends, the fastest first, whether or not they can serve the request.

    cuDNN is the first on sm_90 for short sequences and in training with head_dim 256.
    """
    few = r.longest is not None and r.longest <= CUDNN_MAX_TOKENS
    # As measured on an H200; packed sequences are refused by cuDNN's own rules
    if r.sm == 90 and (few or (r.head_dim == 256 and r.grad)):
        return tuple(sorted(OBSTACLES, key=lambda name: name != "cudnn"))
    return tuple(OBSTACLES)


def _reason_against(name: str, r: AttentionRequest) -> str | None:
    """Returns why a backend that could serve a request is only taken if it is named, or None."""
    longest = 0 if r.longest is None else r.longest
    if name in ("fa4", "flex") and 0 < longest < MIN_KERNEL_TOKENS:
        return f"{longest} tokens are too few to compile for"
    step = 64 if longest <= CUDNN_MAX_TOKENS else 256
    if name == "cudnn" and longest % step:
        return f"it prepares for every new length, and {longest} is no multiple of {step}"
    if name == "triton" and r.head_dim <= 256:
        return "it is meant for head dims above 256"
    if name == "flex" and r.dtype not in HALF:
        return "float32 is no faster with it"
    return None


def check_backend(name: str) -> None:
    """Raises ValueError for no name of `Backend`, ImportError for "fa4" that cannot be used."""
    _check_name(name)
    if name == "fa4" and isinstance(flash_attn_4(), str):
        raise ImportError(f"attention='fa4': {flash_attn_4()}")


def check_training(
    name: str, device: torch.device, dtype: torch.dtype, *, deterministic: bool = False
) -> None:
    """Raises if the named backend cannot train in this dtype on this device with any model."""
    check_backend(name)
    if name == "auto":  # serves every request; importing flash-attn-4 can wait
        return
    gpu, index = device.type == "cuda", device.index or 0
    sm = capability(index) if gpu else 0
    request = AttentionRequest(device.type, sm, dtype, grad=True, deterministic=deterministic)
    choose_backend(request, name, missing(index) if gpu else {})


def _check_name(name: str) -> None:
    if name not in get_args(Backend):
        raise ValueError(f"attention={name!r} is not one of {', '.join(get_args(Backend))}")


def choose_backend(
    r: AttentionRequest,
    backend: str = "auto",
    missing: Mapping[str, str | None] = MappingProxyType({}),
    *,
    plain: bool = False,
) -> BackendChoice:
    """Returns the named backend, or the first in `_order` that can serve the request.

    `missing` maps the backends that this machine lacks to the reason; `plain` leaves only `sdpa`
    and `reference`. Raises if the named backend cannot serve the request, unless the tokens
    continue a cache: the name applies to whole sequences.
    """
    if backend != "auto":
        _check_name(backend)
        reason = missing.get(backend) or OBSTACLES[backend](r)
        if reason is None:
            return BackendChoice(backend, f"attention={backend!r}")
        if not r.cached:
            raise ValueError(f"attention={backend!r} cannot do this: {reason}")
    names = _order(r)
    if plain or r.device != "cuda":
        names = PLAIN
    elif r.cached and r.single:
        names = DECODING[r.sinks]
    passed: list[str] = []
    for name in names:
        reason = missing.get(name) or OBSTACLES[name](r) or _reason_against(name, r)
        if reason is None:
            return BackendChoice(name, "; ".join(passed) or f"the first choice on {r.device}")
        passed.append(f"not {name}: {reason}")
    raise AssertionError("the reference serves every request")


@functools.cache
def flash_attn_4() -> Any:
    """Imports and returns the package, or the reason why it cannot be used."""
    hint = "pip install tigon[fa4]"
    if find_spec("flash_attn") is not None:
        _keep_compiled()
    try:
        import flash_attn.cute as package
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "flash_attn":
            return f"flash-attn-4 is not installed: {hint}"
        return f"flash-attn-4 misses {error.name}: {hint}"
    except Exception as error:  # of the driver, the compiler, another version ...
        return f"flash-attn-4 does not load ({type(error).__name__}: {error}): {hint}"
    return package


def _keep_compiled() -> None:
    """Lets flash-attn-4 keep on disk what it compiles, unless the environment says otherwise."""
    with suppress(OSError, RuntimeError):  # a home that cannot be written, or is not known
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flash_attn_cute")
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


@device_fact
def capability(device: int) -> int:
    """Returns the compute capability of a GPU times ten, or 0 if it is not NVIDIA's."""
    major, minor = torch.cuda.get_device_capability(device)
    return 0 if torch.version.hip else 10 * major + minor


@functools.cache
def missing(device: int) -> dict[str, str]:
    """Maps the backends that a machine with this GPU lacks to the reason."""
    lacks = {}
    if capability(device) // 10 in (9, 10) and isinstance(flash_attn_4(), str):
        lacks["fa4"] = flash_attn_4()
    if not torch.backends.cudnn.is_available():
        lacks["cudnn"] = "this torch has no cuDNN"
    if find_spec("triton") is None:
        lacks["triton"] = lacks["flex"] = "Triton is not installed"
    return lacks


def missed_speed(device: torch.device, head_dim: int, *, packed: bool) -> str | None:
    """Returns a text on how much faster flash-attn-4 would compute packed or whole rows in training
    on this GPU, by bench/attention.py's record on one of its kind; None if nothing is missed, or
    for head dims that the record is not of."""
    if device.type != "cuda" or capability(device.index or 0) // 10 != 9 or head_dim > 128:
        return None
    if "fa4" not in missing(device.index or 0):
        return None
    gains = json.loads(Path(__file__).with_name("fa4_gains.json").read_text())
    least, most = gains["packed" if packed else "rows"]
    what = "packed rows" if packed else "rows"
    return (
        f"{missing(device.index or 0)['fa4']}; with it attention over {what} was {least:.2f} to "
        f"{most:.2f} times as fast on an {gains['gpu']}"
    )


@device_fact
def _missing_reason(name: str, device: int) -> str | None:
    """Returns why the machine with this GPU lacks the backend, or None; a dict is no fact."""
    return missing(device).get(name)


def survey(device: torch.device) -> dict[str, BackendChoice]:
    """Returns what "auto" takes on this machine for training on 4,096 tokens, and for decoding."""
    gpu, index = device.type == "cuda", device.index or 0
    r = AttentionRequest(device.type, capability(index) if gpu else 0, longest=4096)
    kinds = {
        "one sequence a row": r._replace(grad=True),
        "packed": r._replace(layout="sequences", grad=True),
        "window": r._replace(window=True, grad=True),
        "softcap": r._replace(softcap=True, grad=True),
        "decoding": r._replace(cached=True, single=True),
    }
    lacks = missing(index) if gpu else {}
    return {kind: choose_backend(r, missing=lacks) for kind, r in kinds.items()}


def select_backend(r: AttentionRequest, backend: str, device: int, plain: bool) -> BackendChoice:
    """`choose_backend` on this machine; outside of torch.compile it logs each choice once."""
    if torch.compiler.is_compiling():
        names = OBSTACLES if r.device == "cuda" else ()
        lacks = {name: _missing_reason(name, device) for name in names}
        return choose_backend(r, backend, lacks, plain=plain)
    return _select_backend(r, backend, device, plain)


@functools.lru_cache(maxsize=4096)
def _select_backend(r: AttentionRequest, backend: str, device: int, plain: bool) -> BackendChoice:
    """`select_backend` outside of torch.compile."""
    choice = choose_backend(r, backend, missing(device) if r.device == "cuda" else {}, plain=plain)
    facts = [str(r.dtype)[6:], f"head_dim {r.head_dim}", r.layout]
    flags = "cached", "part", "window", "softcap", "sinks", "grad"
    facts += [flag for flag in flags if getattr(r, flag)]
    line = (choice.name, ", ".join(facts), choice.why)
    if line not in _logged:
        _logged.add(line)
        log.debug("%s for %s (%s)", *line)
    return choice


# Fused attention on meta tensors: allocates what FlashAttention-2 does on a GPU.


class _FusedShapes(torch.autograd.Function):
    """Has the output and saves the tensors of fused attention, on meta."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        b, t, heads, _ = q.shape
        out, ctx.sinks = q.new_empty(q.shape), sinks
        ctx.save_for_backward(q, k, v, out, q.new_empty(b, heads, t, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        # The sum of dq, and the row sums of dout * out, in fp32
        temporary = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(lse)]
        if k.shape[2] != q.shape[2]:  # gradients of each query head's keys and values
            b, s, _, d = k.shape
            temporary += [q.new_empty(b, s, q.shape[2], d) for _ in "kv"]
        return *gradients, None if ctx.sinks is None else torch.empty_like(ctx.sinks)


def fused_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Allocates the output [B, T, H, D] of q [B, T, H, D], k and v [B, S, K, D], all on meta."""
    return _FusedShapes.apply(q, k, v, sinks)
