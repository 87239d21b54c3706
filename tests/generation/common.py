"""What the tests of generation share."""

import copy
from typing import Any

import torch
from torch import Tensor

import tigon


def padded(lengths: tuple[int, ...], vocab: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 3), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(5, vocab, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def blurred(model: tigon.CausalLM, noise: float) -> tigon.CausalLM:
    """A copy that mostly says the same."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(noise * p.std() * torch.randn(p.shape, generator=generator).to(p.device))
    return other


class Counted:
    """Shapes of all token ids that a model is called with."""

    def __init__(self, model: tigon.CausalLM):
        self.shapes: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: tuple[Tensor, ...], kwargs: Any) -> None:
        self.shapes.append(tuple(args[0].shape))


class Letters:
    """A tokenizer for which every token is a letter."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def some_ends(free: Tensor, prompt: int, at: tuple[int, ...]) -> list[int]:
    """Tokens at which row i ends after `at[i]` new ones, if not before."""
    return sorted({int(free[row, prompt + n]) for row, n in enumerate(at)})
