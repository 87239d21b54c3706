"""A folder with all files that pages name, tiny, for blocks of code to run in."""

import shutil
from pathlib import Path

import pytest

import tigon
import tigon.train
from tests.docs.pages import ROOT, blocks
from tests.support.hub_server import HubServer, hub
from tests.support.small import write_chats, write_model

# Models that pages name are directories with these names
MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "MODEL",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B",
    "runs/mine/hf",
)
# What makes a run short
TINY = [
    *("seq_len=64", "batch_size=2", "micro_batch_size=1", "epochs=null", "steps=2"),
    *("workers=0", "device=cpu"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that a page names."""
    root = tmp_path_factory.mktemp("desk")
    model = write_model(root / "tiny")
    for name in MODELS:
        shutil.copytree(model, root / name)
    for name in ("chats", "held_out", "data/train", "data/eval"):
        (root / name).parent.mkdir(exist_ok=True)
        write_chats(root / f"{name}.jsonl", 12)
    (root / "configs").symlink_to(ROOT / "configs")
    (watch,) = (block.text for block in blocks() if "def answers(seen)" in block.text)
    (root / "watch.py").write_text(watch)
    adapted = tigon.from_pretrained(model)
    adapted.add_adapter(tigon.LoraConfig(rank=4))
    adapted.save_adapter(root / "owner/adapter")
    return root


@pytest.fixture
def desk(files: Path, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder as the current one, beside a hub that takes uploads."""
    root = tmp_path / "desk"
    shutil.copytree(files, root, symlinks=True)
    monkeypatch.chdir(root)
    hub.writers.add("hf_writes")
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    load = tigon.train.load
    monkeypatch.setattr(tigon.train, "load", lambda p, s=(): load(p, [*s, *TINY]))
    return root


__all__ = ["desk", "files", "hub"]
