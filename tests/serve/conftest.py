from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tigon
from tests.serve.server import Server, serving
from tests.support.small import write_model
from tigon.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="session")
def model(directory: Path) -> tigon.CausalLM:
    return tigon.from_pretrained(directory).eval()


@pytest.fixture(scope="session")
def adapters(directory: Path) -> dict[str, Path]:
    """Two adapters that change what the tiny model says."""
    places, model = {}, tigon.from_pretrained(directory)
    for name in ("one", "two"):
        model.add_adapter(tigon.LoraConfig(rank=4, targets="all-linear"), name)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.3)
        places[name] = directory.parent / name
        model.save_adapter(places[name], name)
    return places


@pytest.fixture
def adapted(directory: Path, adapters: dict[str, Path]) -> tigon.CausalLM:
    """The tiny model with both adapters, none of them active."""
    model = tigon.from_pretrained(directory)
    for name, place in adapters.items():
        model.load_adapter(place, name)
    model.set_adapter(None)
    return model


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def server(model: tigon.CausalLM, tokenizer: Tokenizer) -> Iterator[Server]:
    """A server with the tiny model, in this process."""
    with serving(model, tokenizer, rows=6, queue=300) as server:
        yield server
