"""What Gemma 3n alone does in training, beside transformers."""

from pathlib import Path

import torch

from tests.models.tiny import CASES, load_reference, reference
from tigon.models import from_pretrained


def test_coefficients_are_bounded_in_training(tmp_path: Path) -> None:
    """Those of predictions in place, those of corrections in the product alone."""
    reference("gemma3n_text", CASES["gemma3n_text"]["shared"] | {"altup_coef_clip": 0.05}, tmp_path)
    ours = from_pretrained(tmp_path).train()
    theirs = load_reference(tmp_path).train()
    ids = torch.arange(4, 44).view(2, 20)
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    for name, p in theirs.named_parameters():
        if "coefs" in name:
            mine = ours.get_parameter(name)
            assert torch.equal(mine, p), name
            assert mine.grad is not None and p.grad is not None
            assert (mine.grad - p.grad).abs().max() <= 1e-4 * p.grad.abs().max(), name
            bounded = mine.abs().max() <= 0.05
            assert bounded == ("prediction" in name), name
