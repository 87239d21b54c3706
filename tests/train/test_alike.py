"""Ranks that were started with other settings, or on hosts with other files, say so at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from tests.support.small import write_model
from tests.train.ranks import Ranks
from tigon.train import main
from tigon.train.export import load_checkpoint


def one_of(each: list[list[str]], folders: list[str]) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folders[rank])
    main(each[rank])


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """Working directories of two ranks, where a relative path has other files, as on two hosts."""
    made = [tmp_path / "0", tmp_path / "1"]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def errors_of(each: list[list[str]], folders: list[str]) -> str:
    """What ranks say that end with an error, soon."""
    return "\n".join(Ranks(len(each), one_of, each, folders).fail(*[1] * len(each)))


def change_weights(model: Path) -> None:
    file = model / "model.safetensors"
    weights = {name: weight + 0.1 for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def write_files(folder: Path, rank: int, what: str) -> None:
    """Files of equal names in the folders of two ranks, of which `what` differs."""
    sizes = {"config": {"rms_norm_eps": 1e-2}, "layers": {"num_hidden_layers": 3}}
    model = write_model(folder / "model", **sizes.get(what, {}) if rank else {})
    if what == "weights" and rank:
        change_weights(model)
    if what == "generation_config" and rank:
        (model / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    word = "eight" if rank and what == "rows" else "seven"  # of the same size
    rows = [json.dumps({"prompt": f"say {word} {i}", "completion": "yes"}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    pair = {"prompt": "say", "chosen": "yes", "rejected": "no"}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)


MODEL = "rank 1 reads another model than rank 0 from model: give all hosts the same"
ROWS = "rank 1 has other {} than rank 0: give all hosts the same files"
# Settings of both ranks, or of each; which files differ between them; what they say
CASES: dict[str, tuple[Any, str, str]] = {
    "settings": (({"lr": 0.1}, {"lr": 0.2}), "", "has other settings (lr) than rank 0"),
    "resume": (({"resume": "auto"}, {}), "", "has other settings (resume) than rank 0"),
    # Whose process groups would be made in another order
    "layouts": (
        ({"parallel.tensor": 2}, {"parallel.context": 4}),
        "",
        "rank 1 has other settings (parallel) than rank 0: start all",
    ),
    "weights": ({"model": "model"}, "weights", MODEL),
    "config": ({"model": "model"}, "config", MODEL),
    "layers": ({"model": "model"}, "layers", MODEL),
    "generation": ({"model": "model"}, "generation_config", MODEL),
    "teacher": ({"task": "distill", "teacher": "model"}, "weights", MODEL),
    "reference": (
        {"task": "dpo", "reference": "model", "data": "pairs.jsonl", "eval_data": "pairs.jsonl"},
        "weights",
        MODEL,
    ),
    "data": ({"data": "rows.jsonl"}, "rows", ROWS.format("data")),
    "stream": ({"data": "rows.jsonl", "streaming": "true"}, "rows", ROWS.format("data")),
    "eval_data": ({"eval_data": "rows.jsonl"}, "rows", ROWS.format("eval_data")),
    "sample_prompts": ({"sample_prompts": "[rows.jsonl]"}, "rows", ROWS.format("sample_prompts")),
}
FAST = ("settings", "weights", "data")


@pytest.mark.slow(first=len(FAST))
@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case not in FAST))
def test_ranks_that_differ_are_named(workspace, folders, case):
    changes, differs, said = CASES[case]
    for rank, folder in enumerate(folders):
        write_files(Path(folder), rank, differs)
    same = {"steps": 2, "eval_data": workspace.held_out}
    each = changes if isinstance(changes, tuple) else (changes, changes)
    given = [workspace.settings(case, **same | changed) for changed in each]
    if case == "layouts":
        given, folders = given * 2, folders * 2
    assert said in errors_of(given, folders)
    assert not (workspace.root / case / "checkpoints").exists()


@pytest.mark.slow
def test_another_run_dir_of_the_same_name(workspace, folders):
    """On a disk of each host: the second rank would find out when it writes a checkpoint."""
    each = [[*workspace.settings("own", steps=2), "run_dir=runs/own"]] * 2
    local, other = (Path(folder, "runs") for folder in folders)
    found = errors_of(each, folders)
    assert "rank 1: runs/own, which all ranks write to: No such file or dir" in found
    assert not local.exists()
    (other / "own").mkdir(parents=True)
    found = errors_of(each, folders)
    assert "rank 1: runs/own is another directory on rank 1 than on rank 0: all hosts" in found
    assert not local.exists() and not [*(other / "own").iterdir()]


def load_checkpoints(folders: list[str]) -> None:
    dist.init_process_group("gloo")
    os.chdir(folders[dist.get_rank()])
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="rank 1 has another checkpoint than rank 0: give all"):
        load_checkpoint(Path("checkpoint"), mesh=mesh)
    dist.destroy_process_group()


@pytest.mark.slow
def test_another_checkpoint_of_the_same_name(workspace, folders):
    """Each is whole: its checksums are its own."""
    for seed, folder in enumerate(folders):
        run = workspace.root / f"seed-{seed}"
        main(workspace.settings(run.name, steps=1, seed=seed))
        shutil.copytree(run / "checkpoints/step-00000001", Path(folder, "checkpoint"))
    Ranks(2, load_checkpoints, folders).finish()
