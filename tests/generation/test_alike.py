"""What ranks that share a model compare of their calls."""

import torch

from tigon.distributed.collectives import check_same_on_all_ranks


class Alone:
    """A group of one rank."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_tensors_of_every_kind_can_be_compared():
    """An attention_mask may have the model's dtype, which numpy need not have."""
    ones = torch.ones(2, 3)
    given = {str(dtype): ones.to(dtype) for dtype in (torch.bfloat16, torch.bool, torch.int32)}
    given |= {"none": None, "empty": torch.zeros(0, 4), "number": torch.tensor(3)}
    given["turned"] = ones.to(torch.bfloat16).t()
    check_same_on_all_ranks([Alone()], "generate", given, torch.device("cpu"))  # type: ignore[list-item]
