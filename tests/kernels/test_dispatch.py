"""Which path an operator takes, and what is said when Triton cannot run."""

import runpy
import warnings

import pytest
import torch

import tigon.kernels
from tigon.kernels import runtime


class OnDevice:
    """What `runs_triton` looks at."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = torch.device(device), dtype


@pytest.fixture(autouse=True)
def path() -> None:
    """No operator runs here: one path."""


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_mode", "auto")
    forgetful = runtime.device_fact(runtime._gpu_supported.__wrapped__)
    monkeypatch.setattr(runtime, "_gpu_supported", forgetful)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")


def test_old_gpu_gets_a_warning_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.warns(
        UserWarning, match=r"Old GPU \(sm_75\) is older than sm_80: plain torch runs"
    ):
        assert not runtime.runs_triton(OnDevice("cuda:0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runtime.runs_triton(OnDevice("cuda:0"))


def test_failing_triton_gets_a_warning_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: tuple[int, ...]) -> None:
            raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: warnings.catch_warnings())
    monkeypatch.setattr(runtime, "_increment", Broken())
    with pytest.warns(UserWarning, match=r"Triton fails on Old GPU \(RuntimeError: no C compiler"):
        assert not runtime.runs_triton(OnDevice("cuda:0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runtime.runs_triton(OnDevice("cuda:0"))


def test_what_the_modes_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_gpu_supported", lambda device: True)
    chosen = {}
    for mode in ("auto", "reference", "triton"):
        with tigon.kernels.use(mode):
            chosen[mode] = runtime.runs_triton(OnDevice("cuda:0"))
            assert not runtime.runs_triton(OnDevice("cuda:0", torch.float64))
            assert runtime.runs_triton(OnDevice("meta")) == (mode == "triton")  # as on a GPU
    assert chosen == {"auto": True, "reference": False, "triton": True}
    assert not runtime.runs_triton(OnDevice("cpu"))


def test_the_switch_ends_with_its_block() -> None:
    with pytest.raises(ZeroDivisionError), tigon.kernels.use("reference"):
        assert runtime._mode == "reference"
        raise ZeroDivisionError
    assert runtime._mode == "auto"
    with pytest.raises(ValueError, match="mode='fast' is not one of auto, reference, triton"):
        tigon.kernels.use("fast").__enter__()


def test_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    with tigon.kernels.use("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        tigon.kernels.rms_norm(torch.ones(2, 3, device="cpu"), torch.ones(3, device="cpu"), 1e-6)


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, mode in ("reference", "reference"), (None, "auto"):
        if value is None:
            monkeypatch.delenv("TIGON_KERNELS")
        else:
            monkeypatch.setenv("TIGON_KERNELS", value)
        assert runpy.run_path(runtime.__file__)["_mode"] == mode
    monkeypatch.setenv("TIGON_KERNELS", "none")
    with pytest.raises(ValueError, match="TIGON_KERNELS='none' is not one of"):
        runpy.run_path(runtime.__file__)
