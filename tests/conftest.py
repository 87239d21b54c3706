"""What every test starts from: no network but loopback, one thread, one seed, a tiny Llama.

TIGON_TEST_THREADS=4 runs the suite with four threads: no result may depend on their number.
"""

import gc
import os
import tempfile

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
from tests import interpreter
from tests.assets_fixtures import gsm8k, smollm2
from tests.models.contract import tiny_llama

__all__ = ["gsm8k", "smollm2"]

if not torch.cuda.is_available():
    interpreter.install()

# One: models this small lose by sharing, and badly on a busy machine
torch.set_num_threads(int(os.environ.get("TIGON_TEST_THREADS", "1")))


def pytest_collection_finish() -> None:
    """What all imports have made stays: every run of a trainer, which collects garbage at its end,
    would go through it, as torch's compiler does."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("exhaustive") and "exhaustive" not in item.config.option.markexpr:
        pytest.skip("takes minutes: -m exhaustive")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def model() -> tigon.Llama:
    """A tiny Llama in training mode."""
    return tiny_llama()
