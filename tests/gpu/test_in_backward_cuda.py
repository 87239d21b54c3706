"""optimizer_in_backward on the GPU: the bits of updates after backward, and the memory it saves."""

import math
from typing import Any

import pytest
import torch

from tests.support.small import EXPERTS, LLAMA, write_model
from tests.train.conftest import workspace
from tests.train.test_in_backward import held, learner, states
from tests.train.test_precision_runs import step, tensors
from tigon.train import main
from tigon.train.optim import InBackward, clip, parameter_buckets

__all__ = ["workspace"]
pytestmark = pytest.mark.gpu

HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
HALF = {"param_dtype": "bfloat16", "optimizer": "adamw_bf16"}
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": HALF,
    "FSDP2, float32 weights": {},  # whose gradients come on another stream
    "FSDP2, 8 bits, checkpointing": {
        "optimizer": "adamw_8bit", "activation_checkpointing": "true"
    },
    "experts": HALF | {"model": EXPERTS, "router_aux_loss_coef": 0.5},
    "offload": HALF | {"activation_offload": "true", "optimizer_offload": "true"},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
    "fp8": HALF | {"fp8": "true"},
    "adapter": {"lora.rank": 4},
}  # fmt: skip
LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 2048,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_run_has_the_bits_of_later_updates(workspace, tmp_path, case):
    changes = CASES[case]
    shape = {"model_type": "llama", **changes.get("model", LLAMA), **HEADS}
    same = {"steps": 5, "batch_size": 2, "micro_batch_size": 2, "max_grad_norm": 0}
    same |= {"device": "cuda", "deterministic": "true", "weight_decay": 0.1} | changes
    same |= {"model": write_model(tmp_path / "model", **shape)}
    runs = {"after": "false", "in": "true"}
    for run, setting in runs.items():
        its = workspace.settings("x", **same, optimizer_in_backward=setting)
        main([*its, f"run_dir={tmp_path / run}"])
    found, expected = (tensors(step(tmp_path / run, 5)) for run in ("in", "after"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def losses(model: Any, number: int, tokens: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(2000, (1, tokens), generator=draw).cuda()
    return model(ids, labels=ids).loss


def large(**its: Any) -> tuple[Any, Any]:
    return learner(LARGE, device="cuda", **its)


@pytest.mark.parametrize("recomputed", [False, True])
def test_recomputed_inputs_see_the_weights_of_forward(recomputed):
    """Rows of 8192 tokens, which are large enough not to be kept: gradients after an update are
    those of a model that is updated afterwards, and so are all bits, given the same gradients."""
    (model, optimizer), (its, after) = (large(**HALF) for _ in range(2))
    model.activation_checkpointing = its.activation_checkpointing = recomputed
    gradients: dict[Any, torch.Tensor] = {}

    def keep(p: Any) -> None:
        gradients[p] = p.grad.clone()

    for p in model.parameters():  # before the hooks that free them
        p.register_post_accumulate_grad_hook(keep)
    updates = InBackward(model, optimizer)
    for number in range(3):
        norm = updates.backward(losses(model, number, 8192))
        losses(its, number, 8192).backward()
        for (name, p), q in zip(its.named_parameters(), model.parameters(), strict=True):
            off = (p.grad.float() - gradients[q].float()).norm() / p.grad.float().norm()
            assert off < 3e-2, f"{name}: {off:.3g}"
            p.grad = gradients[q]
        torch.testing.assert_close(norm, clip(its, after, 0)[0], rtol=1e-6, atol=0)
        after.step()
        after.zero_grad()
        assert held(model) == 0
        for (name, p), q in zip(its.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q), name
    found, expected = states(model, optimizer), states(its, after)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


def peak(*, in_backward: bool) -> tuple[int, int, int]:
    """Bytes of a step at its peak, of all gradients, and of the largest part's."""
    model, optimizer = large(**HALF)
    model.activation_checkpointing = True
    updates = InBackward(model, optimizer) if in_backward else None
    for number in range(3):
        torch.cuda.reset_peak_memory_stats()
        loss = losses(model, number, 1024)
        if updates is not None:
            updates.backward(loss)
        else:
            loss.backward()
            clip(model, optimizer, 0)
            optimizer.step()
            optimizer.zero_grad()
        del loss
    sizes = [sum(p.nbytes for p in part) for part in parameter_buckets(model)]
    return torch.cuda.max_memory_allocated(), sum(sizes), max(sizes)


def test_a_step_needs_no_memory_for_all_gradients():
    after, every, largest = peak(in_backward=False)
    found, _, _ = peak(in_backward=True)
    print(
        f"{after / 2**20:.0f} MiB, {found / 2**20:.0f} in backward; gradients {every / 2**20:.0f}"
    )
    assert after - found > 0.9 * (every - largest)


def test_backward_waits_for_nothing_and_skips_nan():
    model, optimizer = learner(LLAMA | HEADS, device="cuda", **HALF)
    updates = InBackward(model, optimizer)
    for number in range(2):
        ids = torch.full((1, 64), number + 1, device="cuda")
        updates.backward(model(ids, labels=ids).loss)
    before = [t.clone() for t in (*model.parameters(), *states(model, optimizer).values())]
    poison = torch.tensor(math.nan, device="cuda")
    loss = model(ids, labels=ids).loss * poison  # which waits, to count the rows that have labels
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(1 << 31)
    norm = updates.backward(loss)
    event.record()
    assert not event.query()
    assert held(model) == 0 and norm.isnan()
    updates.undo_step()
    after = *model.parameters(), *states(model, optimizer).values()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
