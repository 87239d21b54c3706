"""What every test starts from: no network but loopback, one thread, one seed, a tiny Llama.

TIGON_TEST_THREADS=4 runs the suite with four threads: no result may depend on their number.
"""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "TIGON_CACHE" not in os.environ:  # not the user's; processes that tests start share it
    _cache = tempfile.TemporaryDirectory(prefix="tigon-cache-")
    os.environ["TIGON_CACHE"] = _cache.name

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; read when triton is imported

import tigon
from tests.support import interpreter
from tests.support.assets_fixtures import gsm8k, smollm2
from tests.support.contract import tiny_llama
from tests.support.leftovers import put_back

__all__ = ["gsm8k", "smollm2"]

if not torch.cuda.is_available():
    interpreter.install()
    # At each torch.manual_seed they keep the whole stack, for when a device is found: 1 ms
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

# One: models this small lose by sharing, and badly on a busy machine
torch.set_num_threads(int(os.environ.get("TIGON_TEST_THREADS", "1")))


def pytest_collection_finish() -> None:
    """What all imports have made stays: every run of a trainer, which collects garbage at its end,
    would go through it, as torch's compiler does."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def left_out(config: pytest.Config) -> dict[str, str]:
    """Marks of tests that do not run here, and why."""
    marks = {}
    if not torch.cuda.is_available():
        marks["gpu"] = "needs a CUDA device"
    if "exhaustive" not in config.option.markexpr:
        marks["exhaustive"] = "takes minutes: -m exhaustive"
    return marks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_report_header(config: pytest.Config) -> list[str]:
    marks = left_out(config) | ({} if config.option.slow else {"slow": "make test-all or --slow"})
    return [f"without tests marked {mark}: {why}" for mark, why in marks.items()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests marked slow, but for the first cases that the mark's `first` keeps."""
    if config.option.slow:
        return
    counts: Counter[str] = Counter()
    fast, slow = [], []
    for item in items:
        mark = item.get_closest_marker("slow")
        name = item.nodeid.partition("[")[0]
        counts[name] += 1
        leave_out = mark is not None and counts[name] > mark.kwargs.get("first", 0)
        (slow if leave_out else fast).append(item)
    config.hook.pytest_deselected(items=slow)
    items[:] = fast


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: Any
) -> list[pytest.Item] | None:
    """Their modules are imported, but their thousands of parametrizations are not made."""
    marks = left_out(collector.config)
    if not name.startswith("test"):
        return None
    own = {mark.name for mark in getattr(obj, "pytestmark", [])}
    return [] if any(m in own or collector.get_closest_marker(m) for m in marks) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark, why in left_out(item.config).items():
        if item.get_closest_marker(mark):  # of one parametrization
            pytest.skip(why)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Each test begins with the same random numbers, and changes nothing for the next one."""
    with put_back():
        torch.manual_seed(0)
        yield


@pytest.fixture
def model() -> tigon.Llama:
    """A tiny Llama in training mode."""
    return tiny_llama()
