"""sharding=gradients on two ranks: the bits of FSDP2, and one process's numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tigon
from tests.support.small import EXPERTS, write_model
from tests.train.layouts import assert_same_metrics, train_once
from tigon.parallel import shard_gradients
from tigon.train.distributed import local, sync_gradients

FROZEN = "[{match: '*.layers.0.*', freeze: true}, {match: '*norm*', lr: 1e-3}]"
# Two micro-batches a rank; two ranks share the vocabulary of 321 unevenly, and the five experts
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"ema_decay": 0.9, "sample_prompts": "[the model reads]", "sample_tokens": 4},
    "frozen": {  # and float32 weights of a bfloat16 computation
        "model": "untied", "parameter_groups": FROZEN, "optimizer": "adamw_8bit",
        "dtype": "bfloat16",
    },
    "experts": {
        "model": "experts", "router_aux_loss_coef": 0.5, "optimizer": "muon",
        "activation_checkpointing": "true",
    },
}  # fmt: skip
STEPS, SAVED = 2, "checkpoints/step-00000001"


@pytest.fixture(scope="module")
def make(workspace):
    """Trains on two ranks that share the run by `sharding`; returns the run's directory."""
    models = {
        "untied": write_model(workspace.root / "untied", tie_word_embeddings=False),
        "experts": write_model(workspace.root / "experts", **EXPERTS),
    }

    def run(kind: str, sharding: str, name: str = "", **changes: Any) -> Path:
        values = KINDS[kind] | {"steps": STEPS, "save_every": 1, "sharding": sharding} | changes
        if kind == "tied":
            values |= {"eval_data": workspace.held_out, "export": "true"}
        values["model"] = models.get(str(values.get("model")), workspace.model)
        settings = workspace.settings(f"{kind}-{name or sharding}", **values)
        return workspace.root / train_once(2, settings)

    return run


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("kind", [*KINDS, "resumed"])
def test_bits_of_fsdp2(workspace, make, kind):
    """Losses, norms, samples, weights; checkpoints with states, averages, exports."""
    if kind == "resumed":
        full = make("tied", "full")
        ours = make("tied", "gradients", kind, resume=full / SAVED)
    else:
        full, ours = make(kind, "full"), make(kind, "gradients")
    keys = ("loss", "grad_norm", *["eval_loss"] * ("tied" in full.name))
    assert_same_metrics(workspace, full.name, ours.name, *keys, rel=0)
    files = [path.relative_to(full) for path in full.rglob("*.safetensors")]
    assert len(files) >= 9
    for path in files:
        if kind != "resumed" or SAVED not in str(path):
            assert (ours / path).read_bytes() == (full / path).read_bytes(), path
    if kind == "tied":
        samples = (ours / "samples.jsonl").read_text()
        assert samples == (full / "samples.jsonl").read_text() != ""


def of_one_rank(workspace, sums: torch.dtype) -> tigon.CausalLM:
    model = tigon.from_pretrained(workspace.model, dtype=torch.bfloat16).train()
    shard_gradients(model, init_device_mesh("cpu", (1,)), torch.bfloat16, sums)
    return model


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32])
def test_micro_batches_on_one_rank(workspace, world, sums):
    """Gradients add up in `sums`, bit by bit, and weights are whole until they are reduced."""
    plain = tigon.from_pretrained(workspace.model, dtype=torch.bfloat16).train()
    model = of_one_rank(workspace, sums)
    expected: dict[str, torch.Tensor] = {}
    for i in range(3):
        ids = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(i))
        plain(ids, labels=ids).loss.backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            own = p.grad.to(sums)
            expected[name] = expected[name] + own if name in expected else own
            p.grad = None
        sync_gradients(model, i == 2)
        model(ids, labels=ids).loss.backward()
        assert all(isinstance(p, DTensor) == (i == 2) for p in model.parameters())
    assert gradients_of(model).keys() == expected.keys()
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, expected[name].bfloat16()), name


def test_a_parameter_without_a_gradient_has_zeros(workspace, world):
    """On other ranks it may have one, and all send the same messages."""
    model = of_one_rank(workspace, torch.float32)
    model.model.embed_tokens(torch.tensor([[1, 2, 2]])).sum().backward()
    gradients = gradients_of(model)
    embedding = gradients.pop("model.embed_tokens.weight")
    assert embedding[:4, 0].tolist() == [0.0, 1.0, 2.0, 0.0]
    assert len(gradients) > 8 and not any(gradient.any() for gradient in gradients.values())


def test_an_update_after_an_evaluation_is_seen(workspace, world):
    """Which has gathered the weights and not given them up."""
    model = tigon.from_pretrained(workspace.model, dtype=torch.float32).train()
    zero = shard_gradients(model, init_device_mesh("cpu", (1,)), torch.bfloat16, torch.float32)
    zero.allocate()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    ids = torch.randint(0, 300, (1, 16))
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        optimizer.step()
        found = model(ids, labels=ids).loss
        zero.release()
        assert torch.equal(found, model(ids, labels=ids).loss) and found != before


def test_a_backward_that_does_not_end(workspace, world):
    """Its gradients are reduced in part: nothing may be made of them, nor of what is left."""
    model = of_one_rank(workspace, torch.float32)
    ids = torch.randint(0, 300, (1, 16))
    loss = model(ids, labels=ids).loss

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    handle = model.model.layers[0].mlp.down_proj.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="an earlier backward pass has failed"):
        model(ids, labels=ids)


def test_state_dict_after_evaluation_has_the_rows(workspace, world):
    """Not the gathered weights, which may be of fewer bits and are overwritten by the next pass."""
    model = tigon.from_pretrained(workspace.model, dtype=torch.float32).train()
    shard_gradients(model, init_device_mesh("cpu", (1,)), torch.bfloat16, torch.float32)
    expected = {name: local(p).clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        ids = torch.randint(0, 300, (1, 16))
        loss = model(ids, labels=ids).loss
        found = model.state_dict()
        assert all(torch.equal(local(found[name]), p) for name, p in expected.items())
        model(ids)
        changed = {name: p.clone().mul_(2) for name, p in found.items()}
        model.load_state_dict(changed)
        assert model(ids, labels=ids).loss != loss
