"""Loading into, training and exporting a model that FSDP2 shards over two processes."""

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tigon
from tests.models.test_convert import files
from tests.train.ranks import Ranks
from tigon.models import MODELS, Batch, CausalLM, Targets, build, load_weights, materialize
from tigon.train import start
from tigon.weights import Repository

KINDS = {
    # Odd sizes: the ranks' shares differ, and one rank has nothing of the last norm's padding
    "tied": {"tie_word_embeddings": True, "attention_bias": True, "pad_token_id": 3},
    "untied": {"num_key_value_heads": 1, "vocab_size": 77},
    "experts": {
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 7,
        "mlp_only_layers": [1],
        "num_key_value_heads": 3,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}
CONFIG = {
    "hidden_size": 36,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "vocab_size": 101,
    "initializer_range": 0.1,
}
Results = tuple[Path, str, list[dict[str, Any]]]
IDS = torch.arange(48).view(2, 24) % 40


def shard(model: CausalLM, *, inside: Any = None, root: Any = None) -> None:
    """With these policies of mixed precision, if given."""
    plain = MixedPrecisionPolicy()
    for block in model.model.layers:
        fully_shard(block, mp_policy=inside or plain)
    rest = [model.model.embed_tokens, model.model.norm, model.lm_head]
    fully_shard(rest, mp_policy=inside or plain)  # type: ignore[arg-type]
    fully_shard(model, mp_policy=root or plain)


class Tokenizer:
    """One whose files cannot be copied."""

    def save_pretrained(self, directory: Path) -> None:
        raise OSError("disk full")


def outcome(model: CausalLM, directory: Path, **options: Any) -> str:
    try:
        model.save_pretrained(directory, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "written"


def mixed_losses(repository: Repository) -> list[float]:
    """In bf16, of inputs that FSDP casts too: by keywords, and for two denominators."""
    model, checkpoint = build(repository, MODELS)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    shard(model, inside=policy, root=policy)
    materialize(model, torch.device("cpu"))
    load_weights(model, checkpoint)
    batch = Batch.of(model, IDS)
    targets = Targets.of(batch, labels=IDS, loss_weights=torch.full(IDS.shape, 1.001))
    plain = model(batch=batch, targets=Targets.of(batch, labels=IDS)).loss
    losses = [model(batch=batch, targets=targets).loss, model(IDS, labels=IDS).loss]
    for items in (1000.0, 1001.0):  # the same number in bf16
        losses.append(model(batch=batch, targets=targets.with_num_items(torch.tensor(items))).loss)
    sum(losses, plain).backward()
    return [loss.item() for loss in (plain, *losses)]


def rank_main(root: Path, kind: str) -> None:
    with start("cpu") as world:
        (root / f"{world.rank}.json").write_text(json.dumps(results(root, kind)))


def results(root: Path, kind: str) -> dict[str, Any]:
    preadv, counted = os.preadv, []

    def counting(*arguments: Any) -> int:
        counted.append(preadv(*arguments))
        return counted[-1]

    model, checkpoint = build(Repository(root / kind), MODELS)
    shard(model)
    materialize(model, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before the weights are there
    os.preadv = counting
    load_weights(model, checkpoint)
    os.preadv = preadv
    result: dict[str, Any] = {
        "bytes": sum(counted),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }
    result["export"] = outcome(model, root / f"{kind}-export", max_shard_size="10KB")

    loss = model(IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    result["loss"] = loss.item()
    result["trained"] = outcome(model, root / f"{kind}-trained")

    batch = Batch.of(model, IDS)
    resolved = model(batch=batch, targets=Targets.of(batch, labels=IDS)).loss
    result["resolved"] = [resolved.item(), model(IDS, labels=IDS).loss.item()]
    result["mixed"] = mixed_losses(Repository(root / kind))

    (root / "full").mkdir(exist_ok=True)
    (root / "full" / "notes.txt").write_text("mine")
    result["full"] = outcome(model, root / "full")
    result["tokenizer"] = outcome(model, root / "never", tokenizer=Tokenizer())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    result["disk"] = outcome(model, root / "never")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    result["after"] = outcome(model, root / f"{kind}-again")
    return result


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root, kind = tmp_path_factory.mktemp("ranks"), request.param
    torch.manual_seed(0)
    changes = {"model_type": "llama", **KINDS[kind]}
    model = MODELS[changes["model_type"]].from_config({**CONFIG, **changes})
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)  # the padding row and the biases too
    model.save_pretrained(root / kind)
    # fully_shard would choose a GPU where there is one
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    Ranks(2, rank_main, root, kind, environment=hidden).finish()
    return root, kind, [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_reads_its_rows_once(ranks: Results) -> None:
    root, kind, (first, second) = ranks
    size = sum(p.nbytes for p in tigon.from_pretrained(root / kind).parameters())
    assert first["bytes"] + second["bytes"] == size
    assert first["bytes"] < 0.54 * size
    assert first["tied"] == second["tied"] == (kind == "tied")


def test_export_is_that_of_one_process(ranks: Results) -> None:
    root, kind, results = ranks
    assert [result["export"] for result in results] == ["written"] * 2
    tigon.from_pretrained(root / kind).save_pretrained(root / "alone", max_shard_size="10KB")
    assert files(root / f"{kind}-export") == files(root / "alone")
    assert len(files(root / "alone")) > 6


def test_a_step_is_that_of_one_process(ranks: Results) -> None:
    root, kind, results = ranks
    model = tigon.from_pretrained(root / kind)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    trained = dict(tigon.from_pretrained(root / f"{kind}-trained").named_parameters())
    for name, p in model.named_parameters():
        assert (trained[name] - p).abs().max() < 1e-6, name
    assert [result["loss"] for result in results] == pytest.approx([loss.item()] * 2, rel=1e-6)


def test_resolved_arguments_pass_unharmed(ranks: Results) -> None:
    """FSDP's mixed precision casts every float tensor that it finds in arguments."""
    for result in ranks[2]:
        resolved, keywords = result["resolved"]
        assert resolved == keywords
        plain, weighted, keywords, larger, smaller = result["mixed"]
        assert plain == keywords
        if ranks[1] != "experts":  # a part of its loss has no weights
            assert weighted == pytest.approx(1.001 * plain, rel=1e-6)
        assert larger == pytest.approx(1.001 * smaller, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("full", "FileExistsError: .*full exists and is a directory with files in it"),
        ("tokenizer", "OSError: disk full"),
        ("disk", r"OSError: \[Errno 27\] File too large"),
    ],
)
def test_what_stops_rank_0_stops_all(ranks: Results, case: str, message: str) -> None:
    root, kind, (first, second) = ranks
    assert re.match(message, first[case]), first[case]
    # On rank 0 the directory is named too
    assert re.match(f"RankError: rank 0 stopped with {message}", second[case]), second[case]
    assert first["after"] == second["after"] == "written"
    assert files(root / f"{kind}-again") == files(root / f"{kind}-trained")
    assert files(root / "full") == {"notes.txt": b"mine"}
    assert not [path for path in root.iterdir() if path.name.startswith((".", "never"))]
