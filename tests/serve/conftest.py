from collections.abc import Iterator
from pathlib import Path

import pytest

import tigon
from tests.serve.server import Server, serving
from tests.support.small import write_model
from tigon.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with windows and a tokenizer."""
    return write_model(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="session")
def model(directory: Path) -> tigon.CausalLM:
    return tigon.from_pretrained(directory).eval()


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def server(model: tigon.CausalLM, tokenizer: Tokenizer) -> Iterator[Server]:
    """A server with the tiny model, in this process."""
    with serving(model, tokenizer, rows=6, queue=300) as server:
        yield server
