"""`parallel=auto`: the layout that the plan ranks first, of those that the run can have."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small import EXPERTS, LLAMA
from tests.train.ranks import Ranks
from tigon.plan import find_gpu, search
from tigon.plan.cost import Job
from tigon.plan.layout import Layout
from tigon.plan.search import configured_layouts
from tigon.settings.config import Config, Parallel
from tigon.train import auto_layout, load, main
from tigon.train.memory import Estimate

CUDA = torch.device("cuda")
ROOM = int(140e9), 8  # bytes of a GPU, ranks of a host
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2**16}


@pytest.fixture
def configured(tmp_path: Path, monkeypatch) -> Callable[..., Config]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")

    def make(sizes: dict[str, Any] = LLAMA | WIDE, **changes: Any) -> Config:
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        values = {"init": tmp_path / "config.json", "tokenizer": "none", "data": "none"}
        values |= {"run_dir": tmp_path / "run", "task": "pretrain", "parallel": "auto"}
        values |= {"batch_size": 8, "seq_len": 4096}
        return load(None, [f"{name}={value}" for name, value in (values | changes).items()])

    return make


def limit(monkeypatch: pytest.MonkeyPatch, fits: Callable[[Layout], bool]) -> None:
    """Memory as a function of the layout."""

    def estimate(_: Job, layout: Layout) -> Estimate:
        return Estimate({"sum": 10**9 if fits(layout) else 10**15}, 0)

    monkeypatch.setattr(search, "estimate_memory", estimate)


def test_first_fitting_layout_of_the_plan(configured, monkeypatch) -> None:
    """Of those that the settings allow."""
    parallel, why = auto_layout.choose_layout(configured(), CUDA, 8, *ROOM)
    gpu, constants = find_gpu("h200")
    config = configured()
    job = Job(auto_layout.model_shapes(config, None), config, 8, gpu, constants, 4096, 8)
    plan = search.make_plan(job, variants=configured_layouts)
    assert parallel == plan.choices[0].layout.parallel == Parallel(fsdp=8)
    best, following = (choice.step.seconds for choice in plan.choices[:2])
    assert why.startswith(f"fsdp 8: {best:.3g} s a step and ")
    assert why.endswith(f"; next replicate 2 x fsdp 4, {following:.3g} s")
    for fits, sizes, changes in (
        (lambda x: x.tensor > 1, {"tensor": 2}, {}),
        (lambda x: x.tensor > 1, {"tensor": 4}, {"batch_size": 2, "micro_batch_size": 1}),
        (lambda x: x.context > 1, {"context": 2}, {"optimizer": "adamw_8bit"}),
        (lambda x: x.tensor > 1, {"tensor": 2}, {"optimizer": "adamw_8bit"}),
    ):
        with monkeypatch.context() as patch:
            limit(patch, fits)
            parallel, _ = auto_layout.choose_layout(configured(**changes), CUDA, 8, *ROOM)
        for name, size in sizes.items():
            assert getattr(parallel, name) >= size, (parallel, sizes)


def test_excluded_layouts_are_never_chosen(configured, monkeypatch) -> None:
    """Even where nothing else fits."""
    limit(monkeypatch, lambda x: x.tensor > 1)
    auto_layout.choose_layout(configured(), CUDA, 8, *ROOM)
    for changes, why in (
        ({"cuda_graphs": "true"}, "cuda_graphs=true does not work with parallel.tensor=2"),
        ({"batch_size": 1}, "replicate x fsdp=2 is more than the 1 row of a step"),
    ):
        if "batch_size" in changes:
            limit(monkeypatch, lambda x: x.data > 1)
        with pytest.raises(ValueError, match=why):
            auto_layout.choose_layout(configured(**changes), CUDA, 8, *ROOM)
    limit(monkeypatch, lambda x: x.tensor > 1)
    parallel, _ = auto_layout.choose_layout(configured(sharding="gradients"), CUDA, 8, *ROOM)
    assert parallel.tensor > 1 and parallel.replicate == 1
    limit(monkeypatch, lambda x: x.replicate > 1)
    with pytest.raises(ValueError, match=r"parallel.replicate=2 does not work with sharding=grad"):
        auto_layout.choose_layout(configured(sharding="gradients"), CUDA, 8, *ROOM)
    limit(monkeypatch, lambda x: x.tensor > 1)
    with pytest.raises(ValueError, match="tensor is above 1, the number of GPUs"):
        auto_layout.choose_layout(configured(), CUDA, 8, ROOM[0], 1)
    limit(monkeypatch, lambda x: x.tensor > 4)
    with pytest.raises(ValueError, match=r"adamw_8bit keeps states of .* in blocks of 256 columns"):
        auto_layout.choose_layout(configured(optimizer="adamw_8bit"), CUDA, 8, *ROOM)
    limit(monkeypatch, lambda x: x.expert > 1)
    sizes = EXPERTS | WIDE | {"num_experts": 4, "moe_intermediate_size": 64}
    parallel, _ = auto_layout.choose_layout(configured(sizes), CUDA, 8, *ROOM)
    assert parallel.expert in (2, 4) and parallel.tensor == 1
    limit(monkeypatch, lambda x: min(x.expert, x.tensor) > 1)
    parallel, _ = auto_layout.choose_layout(configured(sizes), CUDA, 8, *ROOM)
    assert parallel.expert in (2, 4) and parallel.tensor > 1
    one = {"optimizer_in_backward": "true", "max_grad_norm": 0}
    limit(monkeypatch, lambda x: x.context > 1)
    with pytest.raises(ValueError, match="no layout"):  # several micro-batches on each rank
        auto_layout.choose_layout(configured(**one), CUDA, 8, *ROOM)


def test_errors_where_nothing_can_be_planned(configured, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"chooses a layout for GPUs, .* set the dim") as no:
        auto_layout.choose_layout(configured(), torch.device("cpu"), 8, *ROOM)
    assert "--gpus 8 --gpu NAME --seq-len 4096` plans for GPUs elsewhere" in str(no.value)
    with pytest.raises(ValueError, match=r"parallel=auto: lora: its time is not modelled.* set"):
        auto_layout.choose_layout(configured(**{"lora.rank": 4}), CUDA, 8, *ROOM)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GH200 480GB")
    with pytest.raises(ValueError, match="nothing is known of NVIDIA GH200 480GB, but of NVIDIA H"):
        auto_layout.choose_layout(configured(), CUDA, 8, *ROOM)


def test_auto_on_one_rank(workspace, capsys) -> None:
    main(workspace.settings("one", steps=1, parallel="auto"))
    assert "fsdp: 1" in (workspace.root / "one/config.yaml").read_text()
    with pytest.raises(SystemExit, match="parallel=auto chooses a layout for GPUs"):
        main(
            ["--dry-run", "--nproc", "8", *workspace.settings("x", parallel="auto", device="auto")]
        )
    main(workspace.settings("one", steps=2, **{"parallel.fsdp": 1}, resume="auto"))
    assert workspace.metrics("one", "loss")


def run_chosen(settings: list[str], chosen: dict[str, int]) -> None:
    """As if there were GPUs, of which the plan thinks that."""
    torch.set_num_threads(1)

    def choose(config: Config, _: Any, gpus: int, memory: int, host: int) -> tuple[Parallel, str]:
        assert (gpus, host) == (2, 2)
        return Parallel(
            fsdp=1, **chosen
        ), f"as I say; before: {auto_layout.checkpoint_layout(config, gpus)[1]}"

    auto_layout.choose_layout = choose  # type: ignore[assignment]
    main(settings)


def test_ranks_agree_on_the_layout(workspace) -> None:
    """It is in the run's config and in its checkpoints, from which runs go on."""
    run = {"parallel": "auto", "save_every": 1, "steps": 1, "schedule": "constant"}
    further = run | {"steps": 2, "resume": "auto"}
    main(workspace.settings("plain", steps=2, schedule="constant"))
    said = ""
    for settings in (run, further):
        given = workspace.settings("auto", **settings)
        said += Ranks(2, run_chosen, given, {"tensor": 2}).finish()
    assert said.count("parallel=auto: as I say") == 2
    assert "before: []" in said and "before: [Layout(replicate=1, fsdp=1, context=1, t" in said
    assert ": steps 1 -> 2" in said and ": parallel " not in said
    config = load(workspace.root / "auto/config.yaml")
    assert config.parallel == Parallel(fsdp=1, tensor=2)
    expected = workspace.metrics("plain", "loss")
    assert workspace.metrics("auto", "loss") == pytest.approx(expected, rel=1e-5)
    beginning = load(None, workspace.settings("auto", **run))
    assert auto_layout.checkpoint_layout(beginning, 2) == (None, [])
    going = load(None, workspace.settings("auto", **further))
    assert auto_layout.checkpoint_layout(going, 2)[1] == [Layout(1, 1, 1, 2)]
    assert auto_layout.checkpoint_layout(going, 4)[1] == []
    main(workspace.settings("auto", **further | {"steps": 3}))  # on one rank


def test_experts_whose_gate_up_is_computed_again(configured) -> None:
    """The plan has the run's memory, and a dense model no experts."""
    changes = {"activation_checkpointing": "experts", "micro_batch_size": 1, "sharding": "full"}
    config = configured(EXPERTS | WIDE | {"moe_intermediate_size": 1024}, **changes)
    gpu, constants = find_gpu("h200")
    job = Job(auto_layout.model_shapes(config, None), config, 8, gpu, constants, 4096, 8)
    layout, _ = [*configured_layouts(job, Layout(1, 8)), None]
    assert layout.checkpointing == "experts" and layout.recomputed == 0
    sizes = [
        search.estimate_memory(job, replace(layout, checkpointing=value)).total
        for value in (False, "experts")
    ]
    assert sizes[0] > sizes[1]
    assert auto_layout.choose_layout(config, CUDA, 8, *ROOM)[0] == Parallel(fsdp=8)
    with pytest.raises(ValueError, match="=experts, but LlamaForCausalLM has no experts: give"):
        auto_layout.choose_layout(configured(**changes), CUDA, 8, *ROOM)


def test_resumed_run_keeps_its_layout(configured, monkeypatch, tmp_path):
    """Though another is faster; not where it does not fit any more."""
    was = tmp_path / "run/checkpoints/step-00000001"
    was.mkdir(parents=True)
    monkeypatch.setattr(auto_layout.checkpoint, "latest", lambda _: was)
    layout = {"replicate": 1, "fsdp": 4, "context": 2, "tensor": 1, "expert": 1}
    monkeypatch.setattr(
        auto_layout.checkpoint, "read_metadata", lambda _: {"config": {"parallel": layout}}
    )
    known = auto_layout.model_shapes
    monkeypatch.setattr(auto_layout, "model_shapes", lambda c, _: known(c, None))
    config = configured(resume="auto")
    limit(monkeypatch, lambda x: True)
    parallel, why = auto_layout.choose_layout(config, CUDA, 8, *ROOM)
    assert parallel == Parallel(fsdp=4, context=2) and why.endswith(f"as in {was}")
    limit(monkeypatch, lambda x: x.context == 1)
    parallel, why = auto_layout.choose_layout(config, CUDA, 8, *ROOM)
    assert parallel == Parallel(fsdp=8) and "as in" not in why
    assert auto_layout.choose_layout(config, CUDA, 4, *ROOM)[0] == Parallel(fsdp=4)
