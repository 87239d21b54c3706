"""Mixtures that ranks share with whole experts on each, loaded from files, against one process:
logits, losses, log-probabilities, text, files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tigon
from tests.parallel.ranks import run_command, run_on_ranks, selected_cases
from tests.parallel.test_shared_generation import CALLS, NEW, UNSEEDED, prompts
from tests.support.small import EXPERTS, LLAMA, write_model
from tests.train.ranks import TORCHRUN, Ranks
from tests.train.test_layouts import FAMILIES
from tigon.cli import main
from tigon.distributed.expert_dispatch import ExpertShard
from tigon.kernels import LogProbs
from tigon.train.distributed import local

WHOLE = {"expert_parallel": True}
# Of each, the mesh, how models are loaded and which
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "two": ({"tensor": 2}, WHOLE, tuple(FAMILIES)),
    "four": ({"tensor": 4}, WHOLE, ("qwen2_moe",)),
    "fsdp": ({"fsdp": 2, "tensor": 2}, WHOLE, ("qwen2_moe",)),
    "replicas": ({"replicate": 2, "fsdp": 2}, {}, ("qwen3_moe",)),
    "copies": ({"replicate": 2, "tensor": 2}, WHOLE, ("qwen3_moe",)),
}
CASES = [(layout, name) for layout, (*_, names) in LAYOUTS.items() for name in names]
TEXTS = ("dynamic", "no cache", "seeded", "static")


def scores(model: tigon.CausalLM) -> dict[str, Tensor]:
    """Of padded rows, and of one of three tokens, of which the last of four ranks has none."""
    found = {}
    for name, rows, tokens in (("padded", 3, 7), ("short", 1, 3)):
        given = {key: value[:rows, -tokens:] for key, value in prompts().items()}
        real = given["attention_mask"]
        labels = given["input_ids"].masked_fill(real == 0, -100)
        with torch.no_grad():
            found[f"{name} logits"] = model(**given).logits * real[..., None]
            scored = model(**given, labels=labels, metrics=("nll", "expert_load", "aux_loss"))
            found |= {f"{name} {key}": value for key, value in scored.metrics.items()}
            found[f"{name} loss"] = scored.loss
            out = model(**given, labels=labels, criteria=(LogProbs(),), metrics=())
        found[f"{name} logprobs"] = out.logprobs
    return found


def texts(model: tigon.CausalLM, sharded: bool) -> dict[str, Tensor]:
    """Greedy ones and seeded ones; two rows end early, after the fifth and the ninth token.

    `sharded`: FSDP has no static cache.
    """
    free = model.generate(**prompts(), max_new_tokens=NEW, eos_token_id=None)
    ends = [int(free[0, 7 + 4]), int(free[1, 7 + 8])]
    how = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 0}
    return {"free": free} | {
        name: model.generate(**prompts(), **how, **CALLS[name])
        for name in TEXTS[: 3 if sharded else 4]
    }


def passes_that_send(model: tigon.CausalLM) -> list[int]:
    """Of a static cache, the tokens that this rank sends from in each layer, pass by pass."""
    found, route = [], ExpertShard.route

    def counted(self: ExpertShard, experts: Tensor) -> Any:
        found.append(len(experts))
        return route(self, experts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertShard, "route", counted)
        how = {"max_new_tokens": 9, "eos_token_id": None, "cache_implementation": "static"}
        model.generate(**prompts(), **how)
    return found


def differently(model: tigon.CausalLM, rank: int) -> list[str]:
    """What generate says where ranks are given different arguments."""
    ids, said = torch.tensor([[5, 6, 7]]), []
    calls: list[dict[str, Any]] = [
        {"input_ids": ids + rank},
        {"input_ids": ids[:, rank % 2 :]},
        {"input_ids": ids, "attention_mask": torch.tensor([[1 - rank % 2, 1, 1]])},
        {"input_ids": ids, "max_new_tokens": rank},
        {"input_ids": ids, "do_sample": True, "seed": rank},
    ]
    for call in calls:
        with pytest.raises(ValueError, match="ranks that share the model were given") as error:
            model.generate(**call)
        said.append(str(error.value))
    return said


def on_ranks(directory: str, cases: dict[str, list[str]]) -> dict[tuple[str, str], Any]:
    rank, found = dist.get_rank(), {}
    for layout, families in cases.items():
        sizes, how, _ = LAYOUTS[layout]
        mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
        for name in families:
            model = tigon.from_pretrained(f"{directory}/{name}", mesh=mesh, **how)
            if "replicate" not in sizes and "tensor" in sizes:
                with pytest.raises(ValueError, match=r"first call of the model: .* input_ids, lab"):
                    model(torch.full((1, 3), rank), labels=torch.full((1, 3), rank))
            torch.manual_seed(rank)
            found[layout, name] = of = examined(model, rank, sizes)
            of["own"] = {key: local(p.detach()) for key, p in model.named_parameters()}
            of["resharded"] = ("fsdp" in sizes) == isinstance(model.lm_head.weight, DTensor)
            model.save_pretrained(f"{directory}/{layout}-{name}")
    return found


def examined(model: tigon.CausalLM, rank: int, sizes: dict[str, int]) -> dict[str, Any]:
    sharded = "fsdp" in sizes
    how = UNSEEDED | ({"cache_implementation": "dynamic"} if sharded else {})
    drawn = model.generate(**prompts(), max_new_tokens=NEW, eos_token_id=None, **how)
    found = {"scores": scores(model), "texts": texts(model, sharded), "unseeded": drawn}
    if not sharded:
        found["sent"] = passes_that_send(model)
    if "replicate" in sizes:  # each half may have prompts of its own
        half = rank // 2
        given = {key: value[half:] for key, value in prompts().items()}
        found["half"] = model.generate(**given, eos_token_id=int(found["texts"]["free"][1, 11]))
    else:
        found["said"] = differently(model, rank)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    for name, changes in FAMILIES.items():
        write_model(directory / name, **changes)
    selected = selected_cases(request, "layout", "name")
    for count in (2, 4):
        cases: dict[str, list[str]] = {}
        for layout, name in selected:
            if math.prod(LAYOUTS[layout][0].values()) == count:
                cases.setdefault(layout, []).append(name)
        if cases:
            for rank, found in enumerate(run_on_ranks(count, on_ranks, str(directory), cases)):
                torch.save(found, directory / f"{count}-{rank}.pt")
    return directory


def of_ranks(saved: Path, layout: str, name: str) -> list[dict[str, Any]]:
    count = math.prod(LAYOUTS[layout][0].values())
    return [torch.load(saved / f"{count}-{rank}.pt")[layout, name] for rank in range(count)]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("layout", "name"), CASES)
def test_ranks_score_and_write_what_one_process_does(saved, layout, name):
    sizes = LAYOUTS[layout][0]
    alone = tigon.from_pretrained(saved / name)
    expected, written = scores(alone), texts(alone, "fsdp" in sizes)
    assert not torch.equal(written["free"], written["dynamic"])  # rows did end
    ranks = of_ranks(saved, layout, name)
    for found in ranks:
        assert found["scores"].keys() == expected.keys()
        for key, values in expected.items():
            torch.testing.assert_close(
                found["scores"][key], values, rtol=1e-5, atol=1e-5, msg=f"{key} of {name}"
            )
        assert found["texts"].keys() == written.keys()
        for key, tokens in written.items():
            assert torch.equal(found["texts"][key], tokens), key
    files = (saved / folder / "model.safetensors" for folder in (name, f"{layout}-{name}"))
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("layout", "name"), CASES)
def test_each_rank_holds_its_part(saved, layout, name):
    sizes, how, _ = LAYOUTS[layout]
    whole = dict(tigon.from_pretrained(saved / name).named_parameters())
    ranks = of_ranks(saved, layout, name)
    shards, parts = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    for found in ranks:
        assert found["resharded"]
        elements = {key: p.numel() for key, p in found["own"].items()}
        own, all_of = (
            sum(n.values()) for n in (elements, {k: p.numel() for k, p in whole.items()})
        )
        assert own < 1.4 * all_of / (shards * parts)  # the router and the shared expert are on all
    for key in whole:
        if ".experts." in key and how:
            rows = torch.cat([found["own"][key] for found in by_experts(ranks, shards, parts)])
            assert torch.equal(rows, whole[key])


def by_experts(ranks: list[Any], shards: int, parts: int) -> list[Any]:
    """Of one replica: those that differ in tensor have others, whose rows FSDP divides."""
    return [ranks[shard * parts + part] for part in range(parts) for shard in range(shards)]


@pytest.mark.slow
def test_sampling_without_a_seed_is_the_same_on_all_that_share(saved):
    for layout, name in CASES:
        drawn = [found["unseeded"] for found in of_ranks(saved, layout, name)]
        half = len(drawn) // LAYOUTS[layout][0].get("replicate", 1)
        for first in range(0, len(drawn), half):
            assert all(torch.equal(tokens, drawn[first]) for tokens in drawn[first : first + half])


@pytest.mark.slow
def test_replicas_write_texts_of_their_own(saved):
    alone = tigon.from_pretrained(saved / "qwen3_moe")
    end = int(texts(alone, True)["free"][1, 11])
    for layout in ("replicas", "copies"):
        for rank, found in enumerate(of_ranks(saved, layout, "qwen3_moe")):
            given = {key: value[rank // 2 :] for key, value in prompts().items()}
            assert torch.equal(found["half"], alone.generate(**given, eos_token_id=end))


@pytest.mark.slow
def test_no_step_sends_tokens_to_experts(saved):
    """The prompts' 15 tokens do, each from one rank; some layers have no experts."""
    for layout, name in CASES:
        if "fsdp" not in LAYOUTS[layout][0]:
            sent = [found["sent"] for found in of_ranks(saved, layout, name)]
            layers, replicas = 2 if name == "mixtral" else 1, LAYOUTS[layout][0].get("replicate", 1)
            assert [sum(each) for each in zip(*sent, strict=True)] == [15 * replicas] * layers


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["two", "four", "fsdp"])
def test_ranks_that_were_given_different_calls_all_say_so(saved, layout):
    ranks = of_ranks(saved, layout, "qwen2_moe")
    whats = ["input_ids", "input_ids", "attention_mask", "settings", "settings"]
    start = f"generate: the {len(ranks)} ranks that share the model were given different"
    for found in ranks:
        for what, line in zip(whats, found["said"], strict=True):
            assert line.startswith(f"{start} {what}."), line


def test_the_command(saved, capfd):
    settings = ["generate", str(saved / "qwen2_moe"), "the model", "--raw"]
    settings += ["--max-new-tokens", "8"]
    assert main([*settings, "--device", "cpu"]) == 0
    alone = capfd.readouterr().out
    both = [*settings, "--tp", "2", "--expert-parallel"]
    assert Ranks(2, run_command, both).finish() == alone and alone.strip()


@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        (EXPERTS, ["--tp", "2"], "2 ranks cannot share the 5 experts of a layer of Qwen3Moe"),
        (LLAMA, ["--tp", "2"], "LlamaForCausalLM has no experts for 2 ranks to share"),
        (LLAMA, [], "--expert-parallel needs --tp N, with 2 processes or more"),
    ],
)
def test_what_the_command_refuses_is_said_once(tmp_path, capfd, changes, more, said):
    model = str(write_model(tmp_path / "model", **changes))
    settings = ["generate", model, "the", "--raw", "--device", "cpu", *more]
    assert main([*settings, "--expert-parallel"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0], lines


def test_torchrun_without_tp_is_an_error(saved, monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in {**TORCHRUN, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for more, given, tp in (([], "no --tp", 1), (["--tp", "4"], "--tp 4", 4)):
        assert main(["generate", str(saved / "qwen3_moe"), "the", "--device", "cpu", *more]) == 1
        said = capfd.readouterr().err
        assert said == (
            f"tigon generate: {given}, but torchrun has started 2 processes: give --tp 2, or "
            f"--nproc-per-node {tp} to torchrun\n"
        )


def outside(directory: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    if dist.get_rank():
        with pytest.raises(ValueError, match=r"rank 1 is not in the mesh, which has \[0\]"):
            tigon.from_pretrained(directory, mesh=mesh)


def test_a_rank_outside_of_the_mesh_says_so(saved):
    run_on_ranks(2, outside, str(saved / "qwen3_moe"))
