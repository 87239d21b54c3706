"""Micro-batches that a thread copies to the GPU: the loader's own, while the GPU is busy."""

import pytest
import torch

from tests.data.test_loader import loader, tensors
from tigon.train.prefetch import Prefetcher

pytestmark = pytest.mark.gpu


def test_copies_ahead_are_whole_and_not_overwritten():
    device, data = torch.device("cuda", torch.cuda.current_device()), loader()
    busy = torch.randn(2048, 2048, device=device)
    kept = []
    with Prefetcher(loader(), device) as feed:
        for step in range(40):
            batches = feed(step)
            for _ in range(4):  # the step's kernels are still waiting when the next copies begin
                busy = busy @ busy / 50
            kept.append([{k: v.clone() for k, v in tensors(batch).items()} for batch in batches])
            del batches
    for step, found in enumerate(kept):
        for ours, expected in zip(found, data.micro_batches(step), strict=True):
            for name, value in tensors(expected).items():
                assert ours[name].device == device
                assert torch.equal(ours[name].cpu(), value), (step, name)
