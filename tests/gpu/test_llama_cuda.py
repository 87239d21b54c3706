"""The forward contract on a CUDA device: the numbers of the CPU, and a host that never waits."""

import subprocess
import sys

import pytest
import torch

import tigon
from tests.gpu.support import no_waiting

pytestmark = pytest.mark.gpu

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 5003,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model() -> tigon.Llama:
    torch.manual_seed(0)
    return tigon.Llama.from_config(CONFIG, dtype=torch.float32, device="cuda")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 96), device="cuda")
    labels = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.4, -100)
    positions = torch.cat((torch.arange(40), torch.arange(56))).cuda()[None].expand(2, -1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    out = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out


def test_loss_and_gradients_equal_the_cpu(model, batch) -> None:
    loss = model(**batch, loss_reduction="sequence").loss
    loss.backward()
    cuda = gradients(model)
    model.cpu()
    reference = model(**{k: v.cpu() for k, v in batch.items()}, loss_reduction="sequence").loss
    reference.backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for name, grad in gradients(model).items():
        error = (cuda[name].cpu() - grad).abs().max()
        assert error <= 1e-4 * grad.abs().max(), name


def test_forward_and_backward_never_wait_for_the_device(model, batch) -> None:
    extra = {"loss_weights": torch.rand(2, 96, device="cuda"), "metrics": ("accuracy", "entropy")}
    items = torch.tensor(57, device="cuda")
    model(**batch).loss.backward()  # warm up: handles and lazy loading may wait
    with no_waiting():
        model(**batch, **extra, num_items_in_batch=items, logits_to_keep=50).loss.backward()
        model(**batch, loss_reduction="sequence").loss.backward()
        model(**batch, loss_reduction="none").loss.sum().backward()
        model(batch["input_ids"], logits_to_keep=1)


def test_checkpoint_loads_through_pinned_memory_bit_for_bit(model, tmp_path) -> None:
    model.save_pretrained(tmp_path / "out")
    again = tigon.from_pretrained(tmp_path / "out", device="cuda")
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert q.is_cuda and torch.equal(p, q), name
    half = tigon.from_pretrained(tmp_path / "out", device="cuda", dtype=torch.bfloat16)
    for (name, p), q in zip(model.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(p.bfloat16(), q), name


def test_greedy_generation_equals_the_cpu(model) -> None:
    ids = torch.randint(0, CONFIG["vocab_size"], (3, 17), device="cuda")
    tokens = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    model.cpu()
    expected = model.generate(ids.cpu(), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens.cpu(), expected)


def test_a_label_outside_the_vocabulary_stops_the_device() -> None:
    code = (
        "import torch, tigon;"
        f"m = tigon.Llama.from_config({CONFIG!r}, device='cuda');"
        "ids = torch.zeros(1, 8, dtype=torch.long, device='cuda');"
        "m(ids, labels=ids + 5003); torch.cuda.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "a label is neither -100 nor in [0, 5003)" in run.stderr


def test_many_answers_share_prompts(model: tigon.Llama) -> None:
    """Of so many sequences that no message names all their prefixes."""
    pairs, prompt, answer = 12, 16, 8
    torch.manual_seed(2)
    ids = torch.randint(0, CONFIG["vocab_size"], (pairs, prompt + 2 * answer), device="cuda")
    lengths = torch.tensor([prompt, answer, answer] * pairs)
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    positions = [torch.arange(prompt), *[torch.arange(prompt, prompt + answer)] * 2]
    shared = [[[a, a], [a, a + prompt], [a, a + prompt]] for a in bounds[:-1:3].tolist()]
    found = model(
        input_ids=ids.reshape(1, -1),
        position_ids=torch.cat(positions * pairs).cuda()[None],
        cu_seq_lens=bounds.int().cuda(),
        prefixes=torch.tensor(shared).reshape(-1, 2),
    ).logits
    for i, row in enumerate(ids):
        for k in range(2):
            own = row[prompt + k * answer :][:answer]
            alone = model(input_ids=torch.cat((row[:prompt], own))[None]).logits[0, prompt:]
            start = i * len(row) + prompt + k * answer
            torch.testing.assert_close(found[0, start:][:answer], alone, rtol=2e-3, atol=2e-3)
