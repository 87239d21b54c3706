"""Models that two ranks load and generate with, against one process."""

import faulthandler
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tigon
from tests.parallel.ranks import run_command
from tests.support.small import EXPERTS, write_model
from tests.train.ranks import Ranks
from tigon.cli import main

CALLS = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "quantized": {"cache_implementation": "quantized"},
    "seeded": {"do_sample": True, "seed": 5, "num_return_sequences": 2},
}
UNSEEDED = {"do_sample": True, "temperature": 2.0, "cache_implementation": "static"}
NEW = 24


def prompts() -> dict[str, Tensor]:
    """Of 3, 7 and 5 tokens, padded on the left."""
    ids, real = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.int64)
    draw = torch.Generator().manual_seed(1)
    for row, length in enumerate((3, 7, 5)):
        ids[row, -length:] = torch.randint(5, 300, (length,), generator=draw)
        real[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": real}


def answers(model: tigon.CausalLM) -> dict[str, list[list[int]]]:
    """Of each call; what ends a row is the fifth token of the first and the ninth of the second."""
    free = model.generate(**prompts(), max_new_tokens=NEW, eos_token_id=None)
    ends = [int(free[0, 7 + 4]), int(free[1, 7 + 8])]
    how = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 0}
    found = {"free": free}
    found |= {name: model.generate(**prompts(), **how, **call) for name, call in CALLS.items()}
    found |= {f"turns, {name}": turns(model, how | CALLS[name]) for name in ("dynamic", "static")}
    return {name: tokens.tolist() for name, tokens in found.items()}


def turns(model: tigon.CausalLM, how: dict[str, Any]) -> Tensor:
    """Two turns, of which the first rank ends the second after three tokens, and others never."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    out = model.generate(**prompts(), **how, return_dict_in_generate=True, output_scores=True)
    best = torch.stack(out.scores, 1).argmax(-1)
    ids = torch.cat((out.sequences, best[:, :3]), 1)
    real = torch.ones_like(ids)
    real[:, :7], real[:, 7:-3] = prompts()["attention_mask"], out.sequences[:, 7:] != 0
    return model.generate(
        ids,
        attention_mask=real,
        **how | {"cache_implementation": None},
        past_key_values=out.past_key_values,
        stopping_criteria=[lambda ids, scores: first and ids.shape[1] == real.shape[1] + 3],
    )


def on_ranks(
    directory: str, models: list[str], device: str = "cpu", whole_experts: bool = False
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        faulthandler.dump_traceback_later(150, exit=True)  # a rank that hangs says where
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(device, (2,))
    rank, found = dist.get_rank(), {}
    for name in models:
        path = f"{directory}/{name}"
        model = tigon.from_pretrained(path, mesh=mesh, expert_parallel=whole_experts)
        found[name] = answers(model)
        torch.manual_seed(rank)
        drawn = model.generate(**prompts(), max_new_tokens=NEW, eos_token_id=None, **UNSEEDED)
        found[name]["unseeded"] = drawn.tolist()
        found[name]["elements"] = sum(p.numel() for p in model.parameters())
        model.save_pretrained(f"{directory}/{name}-saved")
        print(f"rank {rank}: {name} is done", flush=True)
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("generation")
    write_model(directory / "llama")
    write_model(directory / "experts", **EXPERTS)
    Ranks(2, on_ranks, str(directory), ["llama", "experts"]).finish()
    return directory


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_two_ranks_generate_what_one_does(saved, name):
    alone = tigon.from_pretrained(saved / name)
    expected = answers(alone)
    both = [json.loads((saved / f"{rank}.json").read_text())[name] for rank in range(2)]
    for found in both:
        for call, tokens in expected.items():
            assert found[call] == tokens, call
    assert expected["dynamic"] != expected["free"]  # rows did end
    assert both[0]["unseeded"] == both[1]["unseeded"]  # though the ranks' own states differ
    whole = sum(p.numel() for p in alone.parameters())
    assert all(found["elements"] < 0.55 * whole for found in both)
    files = (saved / folder / "model.safetensors" for folder in (name, f"{name}-saved"))
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


@pytest.mark.slow
def test_generate_starts_its_ranks(saved, capfd):
    settings = ["generate", str(saved / "llama"), "the model", "--raw", "--max-new-tokens", "12"]
    settings += ["--device", "cpu"]
    assert main(settings) == 0
    alone = capfd.readouterr().out
    assert main([*settings, "--tp", "2"]) == 0
    assert capfd.readouterr().out == alone
    assert alone.strip()


@pytest.mark.parametrize(
    ("ranks", "settings", "said"),
    [
        (3, ["llama", "the model", "--tp", "3"], "3 ranks cannot share 4 heads with 2 kv heads"),
        (3, ["llama", "the", "--tp", "3", "--assistant", "llama"], "--assistant does not work"),
        (3, ["./nowhere", "the model", "--tp", "3"], "no directory ./nowhere"),
        # What all find later, and what the second alone lacks
        (2, ["llama", "", "--tp", "2"], "the prompt is empty"),
        (2, ["llama", "the", "--tp", "2", "--top-p", "7"], "top_p=7"),
        (2, ["./llama", "the model", "--tp", "2"], "rank 1: no directory ./llama"),
    ],
)
def test_what_ranks_refuse_is_said_once(saved, monkeypatch, tmp_path, ranks, settings, said):
    monkeypatch.chdir(saved)
    nowhere = str(tmp_path) * said.startswith("rank 1")
    started = Ranks(ranks, run_command, ["generate", *settings, "--raw"], nowhere)
    lines = started.fail(*[1] * ranks)
    assert len(lines) == 1 and lines[0].startswith(f"tigon generate: {said}"), lines
    assert started.printed == ""


def run_unread(command: list[str]) -> None:
    """As in `| head`, which has ended."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    run_command(command)


def test_a_closed_pipe_ends_all_ranks_quietly(saved):
    settings = [str(saved / "llama"), "the model", "--tp", "2", "--max-new-tokens", "200"]
    ranks = Ranks(2, run_unread, ["generate", *settings, "--raw"])
    with pytest.raises(AssertionError, match="exit codes"):
        ranks.finish()
    assert ranks.codes[0] == 141 and all(ranks.codes), ranks.errors
    assert "rank 0" not in ranks.errors  # the pipe that it wrote to is closed, which is no fault


def unconnected(*names: str) -> DeviceMesh:
    """Of two ranks in each dimension, of which there is this one."""
    ranks = torch.arange(2 ** len(names)).view([2] * len(names))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)


@pytest.fixture(scope="module")
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# The dimensions of a mesh, () for one rank, and other options; and what the error names
REFUSED: list[tuple[tuple[str, ...] | None, dict[str, Any], str]] = [
    (None, {"mesh": 2}, "mesh=2 is not a DeviceMesh"),
    (None, {"expert_parallel": True}, "expert_parallel=True needs mesh="),
    (None, {"tp_plan": "auto"}, "unexpected keyword argument 'tp_plan'; here: 'mesh'"),
    (None, {"device_mesh": "auto"}, "unexpected keyword argument 'device_mesh'; here: 'mesh'"),
    ((), {"torch_dtype": "bfloat16"}, r"^from_pretrained\(\) got .* 'torch_dtype'; here: 'dtype'"),
    ((), {"mmap": True}, "mmap=True does not work"),
    ((), {"labels": 3}, "labels=3 does not work"),
    ((), {"device": "meta"}, "device='meta', but the mesh is one of 'cpu'"),
    (("fsdp",), {"expert_parallel": True}, "expert_parallel=True needs a mesh with ranks"),
    (("fsdp", "replicate"), {}, r"'replicate'\): give \"replicate\" before \"fsdp\""),
    *(
        (names, {}, f"mesh has 2 ranks in the dimension '{name}', .*expert_parallel=True gives")
        for name, *names in (
            ("expert", "expert"),
            ("replicate", "replicate"),
            ("data", "data"),
            ("tp", "tp", "fsdp"),
            ("data", "tensor", "data"),
        )
    ),
]


@pytest.mark.parametrize(("names", "options", "said"), REFUSED, ids=str)
def test_what_a_mesh_cannot_have_is_named(saved, world_of_one, names, options, said):
    if names is not None:
        options = options | {"mesh": unconnected(*names) if names else world_of_one}
    with pytest.raises((TypeError, ValueError), match=said):
        tigon.from_pretrained(saved / "llama", **options)


def test_dimensions_without_names_are_refused(saved, world_of_one):
    two = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"mesh has 2 dimensions, \('a', 'b'\): give one"):
        tigon.from_pretrained(saved / "llama", mesh=two)


def test_one_rank_has_all_experts(saved, world_of_one):
    one = tigon.from_pretrained(saved / "experts", mesh=world_of_one, expert_parallel=True)
    alone, ids = tigon.from_pretrained(saved / "experts"), torch.tensor([[5, 6, 7]])
    assert torch.equal(one.generate(ids), alone.generate(ids))
