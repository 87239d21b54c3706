"""The same numbers under torch.compile(fullgraph=True) and under autocast.

Compiling takes seconds for each block, so what concerns the head alone has one block.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.support.contract import TINY, V, assert_same_gradients, gradients, tiny_llama, tokens
from tigon.kernels import KL, CrossEntropy, Head, LogProbs
from tigon.kernels.loss.logits import METRICS
from tigon.models import CausalLM, Gemma3

IDS = torch.arange(26).view(2, 13) * 3
LABELS = torch.where(torch.arange(26).view(2, 13) % 3 == 1, -100, IDS)  # Liger's bug needs some
TEACHER = KL(teacher_hidden=torch.randn(2, 13, 56), teacher=Head(torch.randn(V, 56)))
CASES: dict[str, dict[str, Any]] = {
    "sequence, padded": {
        "loss_reduction": "sequence",
        "loss_weights": torch.rand(2, 13) + 0.1,
        "attention_mask": torch.tensor([[0] * 4 + [1] * 9, [1] * 13]),
    },
    "options": {"label_smoothing": 0.1, "class_weights": torch.rand(V)},
    "distillation": {"criteria": (CrossEntropy(), TEACHER)},
    "logprobs": {"criteria": (LogProbs(),)},
    "metrics alone": {"labels": None, "metrics": ("entropy", "predicted_tokens")},
    "none, kept": {
        "loss_reduction": "none",
        "logits_to_keep": torch.tensor([[1, 2, 12], [4, 5, 6]]),
    },
    "num_items, packed": {
        "num_items_in_batch": torch.tensor(5),
        "metrics": METRICS,
        "cu_seq_lens": torch.tensor([0, 4, 13, 26]),
    },
    "restarting, with logits": {
        "position_ids": torch.tensor([[*range(6), *range(7)]] * 2),
        "return_logits": True,
    },
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def block() -> CausalLM:
    """A model of one block."""
    return tiny_llama(num_hidden_layers=1)


def assert_equal_when_compiled(model: CausalLM, backend: str, arguments: dict[str, Any]) -> None:
    arguments = {"labels": LABELS, **arguments}
    plain = model(IDS, **arguments)
    out = torch.compile(model, backend=backend, fullgraph=True)(IDS, **arguments)
    assert out.keys() == plain.keys()
    torch.testing.assert_close(out.metrics, plain.metrics)
    if plain.logits is not None:
        torch.testing.assert_close(out.logits, plain.logits)
    for name in {"loss", "logprobs"} & {*plain}:
        torch.testing.assert_close(out[name], plain[name], rtol=1e-6, atol=1e-6)
        upstream = torch.rand_like(plain[name])
        pair = [gradients((x[name] * upstream).sum(), model) for x in (out, plain)]
        assert_same_gradients(*pair)


@pytest.mark.slow(first=2)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_in_one_graph(block: CausalLM, case: str) -> None:
    block.lm_head.logits_bytes = 16 * V * 10
    assert_equal_when_compiled(block, "aot_eager", CASES[case])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
@torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1, "cpp.vec_isa_ok": True})
def test_inductor(block: CausalLM) -> None:
    """Of scalars: torch would compile programs first to find out which vectors there are."""
    assert_equal_when_compiled(block, "inductor", {"metrics": ("accuracy", "nll")})


@pytest.mark.slow
def test_logits_and_evaluation_in_one_graph(block: CausalLM) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS, logits_to_keep=2).logits, block(IDS).logits[:, -2:])
    with torch.no_grad():
        loss = compiled(IDS, labels=LABELS).loss
    torch.testing.assert_close(loss, block(IDS, labels=LABELS).loss)


@pytest.mark.slow
def test_labels_ignored_or_wrong_in_one_graph(block: CausalLM) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    loss = compiled(IDS, labels=torch.full_like(IDS, -100)).loss
    assert loss == 0
    assert all((g == 0).all() for g in gradients(loss, block).values())
    with pytest.raises(RuntimeError, match=r"a label is neither -100 nor in \[0, 97\)"):
        compiled(IDS, labels=LABELS + 60)


def autocast_gradients(
    model: CausalLM, batch: dict[str, Any], **arguments: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch, **arguments).loss
    return loss, gradients(loss, model)


@pytest.mark.parametrize("reduction", ["token", "sequence", "sum"])
def test_autocast_is_as_exact_as_plain_autograd(model: CausalLM, reduction: str) -> None:
    """Many chunks, as their sum has to stay in fp32 though matrix products are in bf16."""
    model.lm_head.logits_bytes = 16 * V * 8
    ids, labels = tokens(batch=16)
    batch = {"input_ids": ids, "labels": labels, "loss_reduction": reduction}
    exact_loss = model(**batch).loss
    exact = gradients(exact_loss, model)["lm_head.weight"]
    eager_loss, eager = autocast_gradients(model, batch, return_logits=True)
    loss, found = autocast_gradients(model, batch)
    assert loss.dtype == torch.float32
    assert (loss - exact_loss).abs() <= 2 * (eager_loss - exact_loss).abs() + 1e-6 * exact_loss
    for name, grad in found.items():
        assert grad.dtype == torch.float32
        assert (grad - eager[name]).norm() <= 0.02 * eager[name].norm(), name
    error = (found["lm_head.weight"] - exact).norm()
    assert error <= 1.1 * (eager["lm_head.weight"] - exact).norm()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "blocks"])
def test_one_graph_serves_other_lengths(part: str) -> None:
    model = tiny_llama(num_hidden_layers=1 if part == "model" else 2)
    plain = [model(IDS[:, :n], labels=LABELS[:, :n]).loss for n in (13, 9, 7)]
    if part == "model":
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        for block in model.model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    for n, expected in zip((13, 9, 7), plain, strict=True):
        loss = model(IDS[:, :n], labels=LABELS[:, :n]).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


SLIDING: dict[str, Any] = {
    **TINY,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
# By the tokens in a row
WAYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "padded": lambda n: {"attention_mask": (torch.arange(n) >= torch.tensor([[4], [0]])).long()},
    "packed": lambda n: {"cu_seq_lens": torch.tensor([0, 4, n, 2 * n]), "max_length_q": n},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_blocks_in_one_graph(way: str) -> None:
    """Training with activation checkpointing: full and sliding layers, of packed sequences in two
    lengths."""
    model = Gemma3.from_config(SLIDING, dtype=torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (13, 9) if way == "packed" else (13,):
        batch = {"input_ids": IDS[:, :n], "labels": LABELS[:, :n], **WAYS[way](n)}
        model.activation_checkpointing = False
        plain = model(**batch).loss
        expected = gradients(plain, model)
        model.activation_checkpointing = True
        loss = compiled(**batch).loss
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
        assert_same_gradients(gradients(loss, model), expected)


def test_blocks_of_one_kind_share_a_graph() -> None:
    """The first block has no residual yet; all others of a kind are compiled once."""
    config = {**TINY, "num_hidden_layers": 6, "sliding_window": 3, "sliding_window_pattern": 2}
    for model, most in ((tiny_llama(num_hidden_layers=6), 2), (Gemma3.from_config(config), 3)):
        torch.compiler.reset()
        graphs = CompileCounter()
        for block in model.model.layers:
            block.compile(backend=graphs, fullgraph=True)
        model(IDS, labels=LABELS).loss.backward()
        assert graphs.frame_count == most
