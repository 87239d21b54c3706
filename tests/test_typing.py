"""What type checkers see: mypy reads this file with the package, and here it runs."""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor

import tigon
from tigon.models.causal_lm import CausalLM
from tigon.models.llama import Llama


def test_from_pretrained_gives_its_class(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    made = tigon.Llama.from_config({**sizes, "num_attention_heads": 1})
    assert_type(made, Llama)
    made.save_pretrained(tmp_path / "a")
    loaded = tigon.Llama.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert_type(loaded, Llama)
    found = tigon.from_pretrained(tmp_path / "a")
    assert_type(found, CausalLM)
    assert type(found) is type(loaded) is tigon.Llama
    tokens = found.generate(torch.tensor([[1]]), max_new_tokens=1)
    assert_type(tokens, Tensor)
