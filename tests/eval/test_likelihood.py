"""Log-likelihoods against one full forward pass of transformers' model per request."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.models.tiny import CASES, FIRST, reference
from tests.support.contract import tiny_llama
from tigon.eval import Likelihood, log_likelihoods

Ids = list[int]
Requests = list[tuple[Ids, Ids]]
WINDOWS = [
    ("mistral", "window"),
    ("ministral", "some slide"),
    ("gemma2", "small caps"),
    ("smollm3", "listed, sliding"),
    ("ministral3", "window"),
    ("qwen3_moe", "window"),
]
ROPES = [("llama", f"rope {name}") for name in ("dynamic", "longrope short")]


@torch.no_grad()
def by_one(model: Any, context: Ids, continuation: Ids) -> Likelihood:
    read = torch.tensor([context + continuation[:-1]])
    logits = model(read).logits[0, len(context) - 1 :]
    ids = torch.tensor(continuation)
    logprobs = logits.double().log_softmax(-1)[torch.arange(len(ids)), ids]
    return Likelihood(logprobs.sum().item(), bool((logits.argmax(-1) == ids).all()), len(ids))


@torch.no_grad()
def greedy_tokens(model: Any, context: Ids, n: int) -> Ids:
    ids = list(context)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def questions(model: Any, vocab: int) -> Requests:
    """Contexts with several answers and with one, in no order; some answers are greedy."""

    def some(n: int) -> Ids:
        return torch.randint(vocab, (n,)).tolist()

    found: Requests = []
    for length, answers in ((19, (1, 5, 1, 3)), (2, (4, 4)), (13, (1, 1, 1)), (9, (11, 2))):
        context = some(length)
        found += [(context, some(n)) for n in answers]
    long, short, letter = found[0][0], found[4][0], found[6][0]
    found += [(letter, greedy_tokens(model, letter, 1)), (some(1), some(2)), (some(30), some(7))]
    greedy = greedy_tokens(model, long, 4)
    for at in range(5):  # one of its tokens is another, or none
        found.append((long, [(t + (i == at)) % vocab for i, t in enumerate(greedy)]))
    found += [(short, greedy_tokens(model, short, 3)), found[1]]
    alone = some(6)
    found.append((alone, greedy_tokens(model, alone, 5)))
    return [found[i] for i in torch.randperm(len(found)).tolist()]


def check(found: list[Likelihood], expected: list[Likelihood]) -> None:
    assert [(f.greedy, f.tokens) for f in found] == [(e.greedy, e.tokens) for e in expected]
    a, b = (torch.tensor([x.logprob for x in y], dtype=torch.float64) for y in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@contextmanager
def reading(model: tigon.CausalLM) -> Iterator[list[int]]:
    """Tokens of every forward pass."""
    sizes: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _, inputs, __: sizes.append(inputs[0].numel())
    )
    yield sizes
    hook.remove()


@pytest.mark.slow(first=4)
@pytest.mark.parametrize(("model_type", "case"), WINDOWS[:2] + ROPES + FIRST + WINDOWS[2:])
def test_families_match_one_pass_per_request(model_type: str, case: str, tmp_path: Path) -> None:
    overrides = CASES[model_type][case] | {"max_position_embeddings": 64}
    theirs = reference(model_type, overrides, tmp_path)
    ours = tigon.from_pretrained(str(tmp_path), dtype=torch.float32)
    requests = questions(theirs, ours.config.vocab_size)
    expected = [by_one(theirs, *r) for r in requests]
    assert 4 <= sum(e.greedy for e in expected) < len(expected) / 2
    check(log_likelihoods(ours, requests), expected)


@pytest.mark.parametrize("contexts", [(13, 5), (14, 6), (16, 17)])
@pytest.mark.parametrize("family", [("phi3", "longrope"), ("llama", "rope longrope long")])
def test_longrope_turns_by_request(family, contexts, tmp_path):
    """Beyond 16 tokens all keys rotate otherwise: of this request, and of no other."""
    model_type, case = family
    overrides = CASES[model_type][case] | {"max_position_embeddings": 64}
    theirs = reference(model_type, overrides, tmp_path)
    ours = tigon.from_pretrained(str(tmp_path), dtype=torch.float32)
    requests: Requests = []
    for length, answers in zip((*contexts, 30), ((1, 2, 4), (11, 12), (2,)), strict=True):
        context = torch.randint(211, (length,)).tolist()
        requests += [(context, torch.randint(211, (n,)).tolist()) for n in answers]
    requests += [(torch.randint(211, (5,)).tolist(), [7] * n) for n in (12, 13)]
    check(log_likelihoods(ours, requests), [by_one(theirs, *r) for r in requests])


@pytest.mark.parametrize("tokens", [1, 20, 45, 10**6])
def test_batch_sizes_agree(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    requests = questions(model, 97)
    expected = [by_one(model, *r) for r in requests]
    with reading(model) as sizes:
        check(log_likelihoods(model, requests, tokens_per_batch=tokens), expected)
    longest = max(len(a) + len(b) for a, b in requests)
    assert max(sizes) <= max(tokens, longest)
    assert (len(sizes) > 6) == (tokens < 10**6)


def test_shared_contexts_are_read_once() -> None:
    model = tiny_llama()
    a, b = (torch.randint(97, (n,)).tolist() for n in (40, 25))
    letters = [(context, [i]) for i in range(4) for context in (a, b)]
    with reading(model) as sizes:
        found = log_likelihoods(model, letters)
    assert sizes == [40 + 25]
    check(found, [by_one(model, *r) for r in letters])
    answers = [(a, [1, 2, 3]), (b, [1, 2, 3, 4]), (a, [7]), (b, [7, 8]), (a, [9, 10])]
    answers.append(([5], [6, 7]))
    with reading(model) as sizes:
        found = log_likelihoods(model, answers)
    # what has no company; the contexts; then the answers without their last tokens, padded
    assert sizes == [2, 40 + 25, 4 * 3]
    naive = sum(len(x) + len(y) - 1 for x, y in answers)
    assert sum(sizes) < 0.5 * naive
    check(found, [by_one(model, *r) for r in answers])


def test_number_of_tokens_read() -> None:
    """Answers come in parts, each with a copy of the context and within tokens_per_batch; sharing
    that would read more, as padding texts of all lengths after one token would, is left."""
    model = tiny_llama()
    context = torch.randint(97, (10,)).tolist()
    for start, lengths, limit, expected in (
        (context, [5] * 14, 60, [10, *[60 // (10 + 4) * 4] * 3, 2 * 4]),
        ([3], [2, 30, 5, 9], 8192, [2 + 30 + 5 + 9]),
    ):
        requests = [(start, torch.randint(97, (n,)).tolist()) for n in lengths]
        with reading(model) as sizes:
            found = log_likelihoods(model, requests, tokens_per_batch=limit)
        assert sizes == expected
        check(found, [by_one(model, *r) for r in requests])


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_close(autocast: bool) -> None:
    """Under autocast contexts are in a cache as well, which then keeps bf16."""
    model = tiny_llama()
    requests = questions(model, 97)
    exact = log_likelihoods(model, requests)
    model = model if autocast else model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rounded = log_likelihoods(model, requests)
    worst = max(abs(a.logprob - b.logprob) / a.tokens for a, b in zip(exact, rounded, strict=True))
    assert 0 < worst < 0.2


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (([], [1]), ValueError, "an empty context; begin with the token that begins a text"),
        (([1], []), ValueError, "an empty continuation"),
        (([1, 97], [1]), ValueError, r"token 97, outside of \[0, 97\)"),
        (([1], [-1]), ValueError, "token -1"),
        (([1] * 11, [1, 2, 3]), ValueError, "13 tokens, but .*=12: cut 1 tokens from"),
        (("Two plus", " two"), TypeError, r"\('Two plus', ' two'\) \('str' object .* encode"),
        ({"context": [1], "continuation": [2]}, TypeError, "a pair of context and"),
        (([1], [2], [3]), TypeError, r"\(too many .* a pair of context and"),
        (([1.0, 2.5], [3]), TypeError, r"'float' object .* token ids"),
        ((torch.tensor([1.0]), [3]), TypeError, r"\(tensor\(\[1.\]\), \[3\]\) .* token ids"),
    ],
    ids=str,
)
def test_bad_requests_are_named(request_: Any, error: type[Exception], message: str) -> None:
    model = tiny_llama(max_position_embeddings=12)
    good = ([1] * 11, [1, 2])
    with pytest.raises(error, match=f"request 1 (is|has|reads) .*{message}"):
        log_likelihoods(model, [good, request_])
    assert log_likelihoods(model, []) == []
    assert log_likelihoods(model, [good])[0].tokens == 2


def test_other_models_are_refused(tmp_path: Path) -> None:
    theirs = reference("llama", CASES["llama"]["grouped"], tmp_path)
    with pytest.raises(ValueError, match="tokens_per_batch=0"):
        log_likelihoods(tiny_llama(), [], tokens_per_batch=0)
    with pytest.raises(TypeError, match=r"of a LlamaForCausalLM: .* tigon.from_pretrained"):
        log_likelihoods(theirs, [([1], [2])])
    reference("gemma3_text", CASES["gemma3_text"]["both sides"], tmp_path)
    with pytest.raises(ValueError, match="Gemma3 attends to both sides"):
        log_likelihoods(tigon.from_pretrained(str(tmp_path)), [([1], [2])])
