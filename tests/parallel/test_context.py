"""Ranks that share the tokens of rows compute what one rank computes (gloo, fp32)."""

import warnings
from typing import Any

import pytest
import torch

from tests.models.dense_cases import SIZES
from tests.models.tiny import CASES, FIRST
from tests.parallel.context_ranks import CALLS, compare_cases
from tests.parallel.ranks import run_on_ranks, selected_cases
from tests.support.contract import TINY, tiny_llama
from tigon.distributed import collectives
from tigon.distributed.context_attention import ContextParallelAttention, exchange_sizes
from tigon.eval import log_likelihoods
from tigon.eval.perplexity import Windows, score
from tigon.kernels.loss.terms import KL, CrossEntropy
from tigon.layers import GatedDeltaNet
from tigon.models import MODELS, Batch, Targets
from tigon.parallel import gather_output, share_context

# Beside the first of each family: windows, both sides, and RoPEs that turn with the longest row
MORE = [
    ("mistral", "window"),
    ("gemma3_text", "both sides"),
    ("llama", "rope dynamic"),
    ("llama", "rope longrope long"),
    ("llama", "one kv head"),
    ("llama", "tied"),
    ("qwen2_moe", "some dense"),
    ("ministral3", "queries grow"),
]
LLAMA = {**TINY, "model_type": "llama"}
IDS = torch.arange(14).view(2, 7)


def cases() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}

    def add(
        name: str, config: dict[str, Any], call: str, batch: str, ranks: Any, **more: Any
    ) -> None:
        case = {"config": config, "call": call, "batch": batch, "ranks": ranks}
        made[name] = case | more

    def pair() -> tuple[int, int]:  # in turns, so that two pairs work at a time
        return ((0, 1), (2, 3))[len(made) % 2]

    balanced = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    for model_type, case in dict.fromkeys(FIRST + MORE):
        config = SIZES | CASES[model_type][case] | balanced | {"model_type": model_type}
        with warnings.catch_warnings(action="ignore"):  # of keys that this family lacks
            blocks = MODELS[model_type].from_config(config, device="meta").model.layers
        if any(isinstance(block.mixer, GatedDeltaNet) for block in blocks):  # which is refused
            continue
        batch = "long" if case.startswith("rope") else "packed and padded"
        recomputed = {"recomputed": len(made) % 3 == 0}
        add(f"{model_type}, {case}", config, "trained", batch, pair(), **recomputed)
    for call in CALLS:
        for batch in ("packed and padded", "padded", "restarting", "two tokens each"):
            if call != "generated" or batch == "padded":
                add(f"{call}, {batch}", LLAMA, call, batch, pair())
    experts = LLAMA | balanced | {"model_type": "mixtral", "num_local_experts": 4}
    add("experts, an odd row", experts, "trained", "restarting", pair())
    add("experts by sequence", experts, "by sequence", "padded", pair())
    conv = SIZES | CASES["lfm2"]["plain"] | {"model_type": "lfm2"}
    add("lfm2, cut", conv, "trained", "a sequence from the last token of a rank", pair())
    for batch in ("restarting", "padded"):
        add(f"four ranks, two kv heads, {batch}", LLAMA, "trained", batch, (0, 1, 2, 3))
        six = LLAMA | {"num_attention_heads": 6}
        add(f"three ranks, two kv heads, {batch}", six, "log probabilities", batch, (0, 1, 2))
    return made


def cases_of_few_heads() -> dict[str, dict[str, Any]]:
    """More ranks than divide the query heads, so that ranks divide the queries of each, too."""
    heads = {
        "a head on two": ((0, 1), LLAMA | heads_of(1, 1)),
        "two heads on four": ((0, 1, 2, 3), LLAMA | heads_of(2, 1)),
        "a head on four": ((0, 1, 2, 3), LLAMA | heads_of(1, 1)),
        "two kv heads on four": ((0, 1, 2, 3), LLAMA | heads_of(2, 2)),
        "four heads on three": ((0, 1, 2), LLAMA),
    }
    for model_type, case in (
        ("mistral", "window"),
        ("gemma2", "small caps"),
        ("gemma3_text", "both sides"),
        ("qwen3_moe", "window"),
        ("gpt_oss", "plain"),
    ):
        config = SIZES | CASES[model_type][case] | {"model_type": model_type}
        heads[f"{model_type}, {case}, six heads on four"] = ((0, 1, 2, 3), config)
    made: dict[str, dict[str, Any]] = {}
    batches = "packed and padded", "padded", "restarting", "long", "two tokens each"
    for i, (name, (ranks, config)) in enumerate(heads.items()):
        for batch in (batches[0], batches[1 + i % 2], batches[3 + i // 2 % 2]):
            case = {"config": config, "call": "trained", "batch": batch, "ranks": ranks}
            made[f"{name}, {batch}"] = case | {"recomputed": len(made) % 3 == 0}
    idle = made["a head on four, packed and padded"]  # two ranks compute no query of three
    return made | {"a head on four, three tokens": idle | {"batch": "three tokens"}}


def heads_of(heads: int, kv_heads: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


EVERY = cases() | cases_of_few_heads()
EIGHT = {
    "two heads on eight": {
        "config": LLAMA | heads_of(2, 1),
        "call": "by sequence",
        "batch": "packed and padded",
        "ranks": tuple(range(8)),
    }
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[dict[str, dict[str, float]]]:
    cases = {name: EVERY[name] for name in selected_cases(request, "name")}
    return run_on_ranks(4, compare_cases, cases)


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("name", EVERY)
def test_ranks_compute_what_one_does(results: Any, name: str) -> None:
    for rank in EVERY[name]["ranks"]:
        errors = results[rank][name]
        assert errors and {n: e for n, e in errors.items() if not e <= 1e-5} == {}


@pytest.mark.slow
def test_eight_ranks() -> None:
    for results in run_on_ranks(8, compare_cases, EIGHT):
        for errors in results.values():
            assert errors and max(errors.values()) <= 1e-5


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
def test_every_query_is_computed_once_and_all_ranks_have_the_same_work(n: int, heads: int) -> None:
    for tokens in (1, 2, 5, 13, 24 * n, 24 * n + 7):
        ranks = [
            ContextParallelAttention(collectives.Ranks("", rank, n), tokens, heads)
            for rank in range(n)
        ]
        size, work = ranks[0].size, []
        assert heads % size == n % size == 0
        computed = []
        for one in ranks[::size]:
            queries = [t for chunk in one.chunks(one.group) for t in chunk]
            asked = [
                rank * one.share + t
                for rank in range(n)
                for run in one.local_query_ranges(rank, one.group)
                for t in run
            ]
            assert asked == queries  # in order, from whichever ranks have them
            computed += queries
            work.append(sum(t + 1 for t in queries))
        assert sorted(computed) == list(range(tokens))
        if tokens == 24 * n:
            assert min(work) == max(work)
        elif tokens > 24 * n:
            assert max(work) < 1.1 * min(work)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"labels": IDS, "logits_to_keep": torch.tensor([3, 1, 3])}, "a position twice"),
        ({"labels": IDS, "criteria": (CrossEntropy(targets=IDS),)}, "labels of one rank's tokens"),
        ({"criteria": (KL(teacher_tokens=IDS[..., None]),)}, "KL without labels under context"),
        ({"labels": torch.full_like(IDS, 97)}, "label 97 .* is neither"),
    ],
)
def test_arguments_that_ranks_cannot_share(arguments: dict[str, Any], said: str) -> None:
    model = tiny_llama()
    share_context(model, collectives.Ranks("", 1, 2))
    with pytest.raises(ValueError, match=said):
        model(IDS, **arguments)


def test_passes_without_shards_are_not_gathered() -> None:
    model = tiny_llama()
    batch = Batch.of(model, IDS, use_cache=True)
    targets = Targets.of(batch, labels=IDS)
    out = model(batch=batch, targets=targets)
    share_context(model, collectives.Ranks("", 1, 2))
    assert gather_output(model, out, targets) is out
    last = Targets.of(Batch.of(model, IDS), logits_to_keep=2)
    with pytest.raises(ValueError, match="keeps the last k of each rank"):
        gather_output(model, out, last)
    for evaluate in (
        lambda: log_likelihoods(model, [([1], [2])]),
        lambda: score(model, Windows([], [])),
    ):
        with pytest.raises(ValueError, match="share_context"):
            evaluate()


def test_what_ranks_exchange_is_counted_once_for_all_layers() -> None:
    first, second = (
        ContextParallelAttention(collectives.Ranks("", 5, 8), 1 << 17, 2) for _ in range(2)
    )
    assert exchange_sizes(first) is exchange_sizes(second)
    sent = exchange_sizes(first).sent
    assert sum(sent) == first.share * first.size and len(sent) == 8
