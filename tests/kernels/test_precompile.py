"""What is noted of a pass on fake tensors, and not run, but for Triton's kernels, which need a
process without the interpreter: tests/test_compiled.py.

# B rows, T tokens, H query heads, K kv heads, D head dim
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support.flash import Interface, implementation, on_hopper
from tigon.kernels import AttentionMask, attention
from tigon.kernels.attention import backends, fa4
from tigon.kernels.attention.backends import BackendChoice
from tigon.kernels.runtime import launch_on_fakes

__all__ = ["on_hopper"]
B, T, H, K, D = 2, 64, 4, 2, 16


def attend(backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launchers that a pass with this backend has called with fake tensors."""
    monkeypatch.setattr(implementation, "select_backend", lambda *_: BackendChoice(backend, ""))
    noted: list[Any] = []

    def note(launcher: Callable[..., Any], outputs: Callable[..., Any], given: Any) -> Any:
        noted.append(launcher)
        return outputs(*given)

    with FakeTensorMode(), launch_on_fakes(note, FakeTensor):
        q, k, v = (torch.empty(B, T, n, D, requires_grad=True) for n in (H, K, K))
        attention(q, k, v, mask=AttentionMask(T)).sum().backward()
        assert q.grad is not None and q.grad.shape == q.shape
    return noted


@pytest.mark.usefixtures("on_hopper")
def test_flash_attn_4_is_left_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attend("fa4", monkeypatch) == [*fa4.LAUNCHERS]
    assert not Interface.told


def test_flash_attn_4_compiles_a_backward_pass_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, each kernel once; that of another version as a whole."""
    compiled: list[str] = []

    def make(name: str, *called: str) -> Any:
        def function(*_: Any, **__: Any) -> None:
            for other in called[:1]:
                getattr(interface, other)()
            if "key" not in function.compile_cache:  # type: ignore[attr-defined]
                compiled.append(name)
            for other in called[1:]:
                getattr(interface, other)()

        function.compile_cache = {}  # type: ignore[attr-defined]
        return function

    parts = "_bwd_preprocess", "_bwd_postprocess_convert"
    interface = SimpleNamespace(
        **{name: make(name) for name in parts}, _flash_attn_bwd=make("_flash_attn_bwd", *parts)
    )
    monkeypatch.setattr(backends, "flash_attn_4", lambda: SimpleNamespace(interface=interface))
    forward, backward = fa4.LAUNCHERS
    arguments = [*torch.empty(6, 1, 2, 1, 8), *[None] * 10]
    jobs = fa4.compile_jobs(backward, arguments)
    done = []
    for job in jobs:
        compiled.clear()
        job()
        done.append([*compiled])
    assert done == [["_flash_attn_bwd"], [*parts]]
    assert all(function.compile_cache == {} for function in vars(interface).values())
    assert len(fa4.compile_jobs(forward, arguments)) == 1
    del interface._bwd_preprocess.compile_cache
    assert len(fa4.compile_jobs(backward, arguments)) == 1


def test_nothing_that_torch_compiles_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_compiled_flex", None)
    assert attend("flex", monkeypatch) == []


def test_flash_attn_4_learns_the_gpu_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler finds it out once, and a forked process cannot."""
    asked: list[str] = []
    dsl = SimpleNamespace(get_arch_enum=lambda: asked.append("arch"))
    base = SimpleNamespace(BaseDSL=SimpleNamespace(_get_dsl=lambda: dsl))
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(base_dsl=base))
    assert fa4.environment() == {} and not asked
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)
    assert set(fa4.environment().values()) == {"sm_90", "132"} and asked == ["arch"]
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace())
    assert len(fa4.environment()) == 2  # of another version


def no_home() -> Any:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("theirs", [None, "0"])
def test_flash_attn_4_keeps_what_it_compiles(
    theirs: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says otherwise, or there is no place for it."""
    names = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    for name in names:
        monkeypatch.setenv(name, theirs or "")
        monkeypatch.delenv(name)
    if theirs is not None:
        monkeypatch.setenv(names[0], theirs)
    with monkeypatch.context() as nowhere:
        nowhere.setenv("XDG_CACHE_HOME", "")
        nowhere.setattr(backends.Path, "home", staticmethod(no_home))
        backends._keep_compiled()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    backends._keep_compiled()
    assert names[1] not in backends.os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backends._keep_compiled()
    assert backends.os.environ[names[0]] == (theirs or "1")
    assert backends.os.environ[names[1]].startswith(str(tmp_path))
