from typing import Any

import pytest

import tigon
from tests.models.tiny import load_reference, reference


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[tigon.CausalLM, Any]:
    """A tiny Llama, ours and transformers'."""
    directory = tmp_path_factory.mktemp("tiny")
    reference("llama", {"max_position_embeddings": 64}, directory)
    return tigon.from_pretrained(directory), load_reference(directory, "sdpa")
