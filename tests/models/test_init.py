"""Weights that are drawn module by module, as ranks that share a model do."""

from typing import Any

import pytest
import torch

from tests.parallel.test_tensor import SIZES, TWO
from tigon.models import MODELS, materialize
from tigon.models.init import init_sharded_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TWO)
def test_parts_of_one_rank_are_the_whole(name: str, dtype: torch.dtype) -> None:
    kind, changes = TWO[name]
    values: dict[str, Any] = SIZES | {"model_type": kind} | changes

    def made(device: str) -> Any:
        return MODELS[kind].from_config(values, dtype=dtype, device=device)

    torch.manual_seed(5)
    expected = made("cpu")
    after = torch.rand(1)
    model = made("meta")
    materialize(model, torch.device("cpu"))
    torch.manual_seed(5)
    init_sharded_weights(model, made("meta"))
    assert torch.equal(torch.rand(1), after)
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(found[key], value), key
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == expected.ties_head
