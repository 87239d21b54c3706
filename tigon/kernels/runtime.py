"""Chooses where an operator runs, registers launchers with torch, and checks values on devices.

Every operator file imports `triton` and `tl` from here, so that it also loads where Triton is not
installed; there, and on any device that Triton cannot serve, the plain-torch definition runs.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast, get_args
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

try:
    import triton
    import triton.language as tl
except ImportError:  # not on Linux

    class _Absent:
        """Lets `@triton.jit` and `tl.constexpr` stand in files whose kernels never run."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, function: Any = None, **_: Any) -> Any:
            return function or self

    triton = tl = cast(Any, _Absent())

Find = TypeVar("Find", bound=Callable[..., Any])
Mode = Literal["auto", "reference", "triton"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PDL_ELEMENTS = 1 << 20  # `pdl_options` applies to inputs of at most as many
SHARED_OFF_GPUS = 227 << 10  # bytes: what `shared_memory` returns where there is no GPU
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _check_mode(mode: str, source: str) -> Mode:
    """Returns the mode, or raises ValueError naming where it came from."""
    if mode not in get_args(Mode):
        raise ValueError(f"{source}={mode!r} is not one of {', '.join(get_args(Mode))}")
    return cast(Mode, mode)


_mode: Mode = _check_mode(os.environ.get("TIGON_KERNELS", "auto"), "TIGON_KERNELS")


@contextlib.contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Sets the path of every operator called inside: a switch for debugging and tests.

    "auto" runs Triton on GPUs from sm_80 on, "reference" plain torch everywhere, "triton" Triton or
    an error. The environment variable TIGON_KERNELS sets the default.
    """
    global _mode
    before, _mode = _mode, _check_mode(mode, "mode")
    try:
        yield
    finally:
        _mode = before


def runs_triton(x: Tensor) -> bool:
    """Whether an operator on `x` launches its Triton kernels, by mode, dtype and device.

    Raises ValueError for "triton" on a CPU without the interpreter.
    """
    if _mode == "reference" or x.dtype not in DTYPES:
        return False
    if x.device.type == "cuda":
        return _gpu_supported(x.device.index)
    if _mode == "triton" and x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("Triton kernels run on the CPU only with TRITON_INTERPRET=1")
    # A meta tensor inside `use("triton")` stands for one on a GPU: the ops' outputs are allocated
    return _mode == "triton" and x.device.type in ("cpu", "meta")


def device_fact(find: Find) -> Find:
    """Remembers what a function finds out about a GPU; for torch.compile it is a constant.

    Dynamo cannot trace a question to a driver, and ignores `functools.cache` with any mark on it.
    A fact is a number, a bool or a text.
    """
    remembered = functools.cache(find)

    @functools.wraps(find)
    def fact(*of: Any) -> Any:
        return remembered(*of)

    # What torch.compiler.assume_constant_result does, after a second spent importing Dynamo
    fact._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Find, fact)


@device_fact
def _gpu_supported(device: int) -> bool:
    """Whether Triton kernels run on this GPU; warns once if not."""
    problem = _gpu_problem(device)
    if problem is not None:
        warnings.warn(f"{problem}: plain torch runs instead of Triton kernels", stacklevel=3)
    return problem is None


def _gpu_problem(device: int) -> str | None:
    """Returns why Triton cannot serve this GPU, or None if a kernel compiles and runs."""
    if not torch.cuda.is_available():  # a fake tensor's
        return f"No GPU {device}"
    name = torch.cuda.get_device_name(device)
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"{name} (sm_{major}{minor}) is older than sm_80"
    try:
        with _disable_current_modes(), torch.cuda.device(device):  # no fake tensors here
            _increment[(1,)](torch.zeros(1, device="cuda"))
    except Exception as error:  # no compiler, driver or Triton: plain torch always works
        return f"Triton fails on {name} ({type(error).__name__}: {error})"
    return None


@triton.jit
def _increment(x):
    """Adds 1 to a number: a kernel to find out whether any runs."""
    tl.store(x, tl.load(x) + 1)


@triton.jit
def pdl_wait(PDL: tl.constexpr, LATE: tl.constexpr = False):
    """Lets the next kernel start, and waits until the previous kernel's results are visible.

    A kernel launched with `pdl_options` calls it before it reads what any earlier kernel wrote.
    With LATE the next kernel starts after the wait, so that weights which it prefetches do not
    delay the loads of this one.
    """
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()


_gathered_models: WeakSet[object] = WeakSet()


def disable_pdl(model: object) -> None:
    """Disables `pdl_options` as long as `model` exists, whose weights are gathered before use.

    A kernel that reads weights before it waits might miss what the copies just before have written.
    """
    _gathered_models.add(model)


@device_fact
def is_hopper(device: int) -> bool:
    """Whether a GPU is Hopper or newer, sm_90 or above."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(x: Tensor) -> dict[str, bool]:
    """Returns launch options with programmatic dependent launch, for small `x` on sm_90 and newer.

    The kernel, which must call `pdl_wait`, may then start before the previous one has ended. This
    hides the microseconds between two kernels, which are much of the time of a decoding step and
    nothing beside large kernels. See `disable_pdl` for when it is off.
    """
    if _gathered_models:
        return {"PDL": False}
    if x.numel() > PDL_ELEMENTS or x.device.type != "cuda" or not is_hopper(x.device.index):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@device_fact
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_sms(x: Tensor) -> int:
    """Returns the number of multiprocessors of the GPU of `x`; 3 on other devices."""
    return _num_sms(x.device.index) if x.device.type == "cuda" else 3


@device_fact
def _shared_memory(device: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def shared_memory(x: Tensor) -> int:
    """Returns how many bytes of shared memory a program on the GPU of `x` may have.

    A launch that asks for more is an error. It is 163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99
    KiB on sm_86, sm_89 and sm_120; on other devices as on sm_90.
    """
    return _shared_memory(x.device.index) if x.device.type == "cuda" else SHARED_OFF_GPUS


def num_stages(step: int, most: int = 3, room: int = 96 << 10) -> int:
    """Returns how many steps of `step` bytes to have in flight, up to `most`.

    All but the one that is computed wait in `room` bytes of shared memory: by default what every
    GPU from sm_80 on has.
    """
    return 1 + min(most - 1, room // step)


_run_fake: Callable[..., Any] | None = None
_plain: tuple[type, ...] = Tensor, torch.nn.Parameter


@contextlib.contextmanager
def launch_on_fakes(run: Callable[..., Any], fake: type) -> Iterator[None]:
    """Takes tensors of the type `fake` for real ones: operators on them call `run` with their
    launcher, its `outputs` and its arguments."""
    global _run_fake, _plain
    before = _run_fake, _plain
    _run_fake, _plain = run, (*_plain, fake)
    try:
        yield
    finally:
        _run_fake, _plain = before


def launches_on_fakes() -> bool:
    """Whether fake tensors stand for real ones, by `launch_on_fakes`."""
    return _run_fake is not None


def operator(
    name: str, outputs: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Registers a launcher, whose first argument is a tensor, as the op `tigon::name`.

    `outputs` allocates what the launcher returns; it gets the same arguments and names only those
    that it needs. The launcher calls it and fills the result. For meta and fake tensors and under
    torch.compile, only `outputs` runs, but see `launch_on_fakes`. `mutates` names the arguments
    that the launcher writes to.

    torch.compile and dispatch modes see one opaque op; eager code calls the launcher directly,
    which saves the dispatcher's 10 microseconds. `.op` is the argument for `torch.library.opcheck`.
    """

    def register(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def run(x: Tensor, *rest: Any) -> Any:
            device = x.get_device()  # -1 on a CPU
            if device < 0 or device == torch._C._cuda_getDevice():
                return launch(x, *rest)
            with torch.cuda.device(device):  # Triton launches on the current one
                return launch(x, *rest)

        op = torch.library.custom_op(f"tigon::{name}", run, mutates_args=mutates)

        def allocate(*arguments: Any) -> Any:
            if _run_fake is not None:
                return _run_fake(launch, outputs, arguments)
            return outputs(*arguments)

        op.register_fake(allocate)

        @functools.wraps(launch)
        def call(x: Tensor, *rest: Any) -> Any:
            if not has_values(x) or torch._C._len_torch_dispatch_stack():
                return op(x, *rest)
            return run(x, *rest)

        call.op = op  # type: ignore[attr-defined]
        return call

    return register


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype of matrix products under autocast, or None where it is off or on meta."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a context without autocast on the device; on meta there is none."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_devices(**tensors: Tensor | None) -> None:
    """Raises ValueError with the device of each tensor unless all are on one."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        raise ValueError("; ".join(f"{name} is on {d}" for name, d in devices.items()))


def refuse_second_derivative(
    name: str, instead: str = 'compute it inside `with tigon.kernels.use("reference")`'
) -> None:
    """Raises if a backward pass that is not differentiable itself is differentiated; call it first.

    `once_differentiable` is no substitute: it does not raise for a constant upstream gradient.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"create_graph=True: {name} has no second derivative; {instead}")


def retains_graph() -> bool:
    """Whether the running backward pass keeps its graph for another one (retain_graph=True).

    False under torch.compile.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._autograd._get_current_graph_task_keep_graph()


def next_power_of_2(n: int) -> int:
    """Returns the least power of two that is at least n, for n from 1 on."""
    return 1 << (n - 1).bit_length()  # triton's own takes microseconds


def owns_storage(x: Tensor) -> bool:
    """Whether x is no leaf of the graph, nor a view of one, and fills its whole storage."""
    base = x if x._base is None else x._base
    # What has no gradient is a leaf, such as the base of what an autograd function returns
    belongs_to_leaf = x.is_leaf or (base.is_leaf and base.requires_grad)
    return not belongs_to_leaf and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def as_rows(x: Tensor) -> Tensor:
    """Returns [..., C] as [N, C] with adjacent columns: a view wherever one exists."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def as_strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """Returns `as_rows` and the step from row to row, as kernels take them together."""
    rows = as_rows(x)
    return rows, rows.stride(0)


# Checks of values on a device, which do not wait for it unless asked to

# What a device's assertion may say: torch takes a longer one for an error of its own
MAX_MESSAGE_BYTES = 254
CHECKS_HINT = "; TIGON_CHECKS=1 raises where it happens, and says which"
ELLIPSIS = " ..."
_SETTINGS = {"": False, "0": False, "1": True}


def _from_environment() -> bool:
    """Whether TIGON_CHECKS asks for checks that wait for the device."""
    setting = os.environ.get("TIGON_CHECKS", "")
    if setting not in _SETTINGS:
        raise ValueError(f"TIGON_CHECKS={setting!r} is not 0 or 1")
    return _SETTINGS[setting]


_wait = _from_environment()


@contextlib.contextmanager
def checks(*, wait: bool) -> Iterator[None]:
    """With `wait`, a check of values on a GPU waits for the device and raises ValueError.

    Without, the device asserts: nothing waits, but a failed assertion ends the process's use of the
    GPU. The environment variable TIGON_CHECKS=1 turns waiting on everywhere; graphs, traced or
    captured, never wait.
    """
    global _wait
    before, _wait = _wait, wait
    try:
        yield
    finally:
        _wait = before


def has_values(x: Tensor) -> bool:
    """Whether `x` holds numbers now: it is neither traced nor fake nor on meta, nor a subclass."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return type(x) in (Tensor, torch.nn.Parameter)


def is_plain(x: Tensor) -> bool:
    """Whether `x` is no subclass, which has products of its own; see `launch_on_fakes`."""
    return type(x) in _plain


def is_plain_parameter(x: Tensor) -> bool:
    """Whether `x` is a parameter and no subclass."""
    return is_plain(x) and isinstance(x, torch.nn.Parameter)


def is_watched(x: Tensor) -> bool:
    """Whether a dispatch mode but that of `launch_on_fakes` may keep the numbers of `x`."""
    return _run_fake is None and not x.is_meta and bool(torch._C._len_torch_dispatch_stack())


def is_eager(x: Tensor) -> bool:
    """Whether operations on `x` run now, and no dispatch mode sees them."""
    return _run_fake is not None or (has_values(x) and not is_watched(x))


def on_host(x: Tensor) -> bool:
    """Whether reading a value of `x` is free: no device sync, no graph break."""
    return x.device.type == "cpu" and has_values(x)


def host_can_read(x: Tensor) -> bool:
    """Whether the host can read a value of `x` by waiting for the device."""
    return has_values(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def may_sync(x: Tensor) -> bool:
    """Whether the host may read a value of `x`: it is there, or checks wait for the device."""
    return (_wait or not x.is_cuda) and host_can_read(x)


def check_values(ok: Tensor, message: str) -> None:
    """Raises ValueError unless the bool `ok`; on a GPU the device asserts, unless checks wait.

    On meta it does nothing.
    """
    if may_sync(ok):
        if not ok:
            raise ValueError(message)
    elif not ok.is_meta:
        end = "" if torch.compiler.is_compiling() else CHECKS_HINT
        torch._assert_async(ok, truncate(message, MAX_MESSAGE_BYTES - len(end)) + end)


def truncate(message: str, limit: int) -> str:
    """Cuts the message to at most `limit` bytes."""
    encoded = message.encode()
    if len(encoded) <= limit:
        return message
    return encoded[: limit - len(ELLIPSIS)].decode(errors="ignore") + ELLIPSIS


def integer_labels(labels: Tensor, name: str) -> Tensor:
    """Returns labels of any integer dtype as int64; raises TypeError for anything else."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} is a {type(labels).__name__}, not a tensor of integers")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} is {labels.dtype}: labels are integers, -100 is ignored")
    return labels.long()
