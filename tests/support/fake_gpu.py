"""A GPU without numbers: Dynamo traces what it would meet on a real one.

The tensors there are torch's fake ones. Questions about the GPU have answers, but none while Dynamo
traces: which of them it can trace differs among versions of torch, and none of Triton's.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput
from triton.runtime import driver

from tigon.kernels import runtime

GPU = "cuda:7"  # whose number nobody else asks about, as answers are remembered
ANSWERS: dict[str, Any] = {  # of functions of torch.cuda
    "get_device_capability": (9, 0),
    "get_device_name": "a fake GPU",
    "get_device_properties": SimpleNamespace(multi_processor_count=132),
    "is_current_stream_capturing": False,
    "current_device": 7,
    "current_stream": None,
    "mem_get_info": (1 << 36, 1 << 37),
    "memory_allocated": 0,
}
SHARED = {"max_shared_mem": 227 << 10}
CUDA, META = 1, 14  # as c10 counts kinds of devices


def answer(value: Any) -> Callable[..., Any]:
    """A function that Dynamo refuses to trace."""
    return torch.compiler.disable(lambda *_, **__: value)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Any, **_: Any) -> Any:
    """Of FlexAttention the shapes alone: while torch traces it, it asks the device for streams."""
    out = q[..., :1].expand(*q.shape[:-1], v.shape[-1]).contiguous()
    return out if return_aux is None else (out, AuxOutput(lse=out[..., 0].float()))


@contextmanager
def index_without_gpu() -> Iterator[None]:
    """Indexing makes a tensor's device the current one, which a torch without CUDA cannot: it does
    what it does on meta, which is nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * 20).in_dll(library, name)
    before, guards[CUDA] = guards[CUDA], guards[META]
    yield
    guards[CUDA] = before


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hopper; tensors made on `GPU` in the test are fake."""
    trace_rules.get_torch_obj_rule_map()  # of the true functions, which it keeps
    for name, value in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, answer(value))
    monkeypatch.setattr(runtime, "_gpu_problem", answer(None))
    utils = SimpleNamespace(get_device_properties=answer(SHARED))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    attention = import_module("tigon.kernels.attention.api")
    monkeypatch.setattr(attention, "flex_attention", flex_attention)
    torch._dynamo.reset()
    with index_without_gpu(), FakeTensorMode():
        yield
    torch._dynamo.reset()
