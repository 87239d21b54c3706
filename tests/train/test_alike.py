"""Ranks that were started with other settings, or on hosts with other files, say so at once."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from tests.small import write_model
from tests.train.ranks import Ranks
from tigon.train import main
from tigon.train.export import load_checkpoint


def one_of(each: list[list[str]], folders: list[str] | None = None) -> None:
    rank = int(os.environ["RANK"])
    if folders is not None:
        os.chdir(folders[rank])
    main(each[rank])


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """Working directories of two ranks, where a relative path has other files, as on two hosts."""
    made = [tmp_path / "0", tmp_path / "1"]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def said(each: list[list[str]], folders: list[str] | None = None) -> str:
    """What ranks say that end with an error, soon."""
    ranks = Ranks(len(each), one_of, each, folders)
    with pytest.raises(AssertionError, match="exit codes"):
        ranks.finish(60)
    assert ranks.codes == [1] * len(each)
    return ranks.errors


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("name", "values"),
    [("resume", ("auto", "")), ("parallel", ("auto", "{tensor: 2}")), ("lr", ("0.1", "0.2"))],
)
def test_other_settings(workspace, name, values):
    each = []
    for value in values:
        settings = workspace.settings(f"other-{name}", steps=2)
        each.append([*settings, *[f"{name}={value}"] * bool(value)])
    assert f"rank 1 has other settings ({name}) than rank 0" in said(each)
    assert not (workspace.root / f"other-{name}" / "checkpoints").exists()


@pytest.mark.slow
def test_other_layouts(workspace):
    """Whose process groups would be made in another order."""
    sizes = {"parallel.tensor": 2}, {"parallel.context": 4}
    each = [workspace.settings("layouts", **size) for size in sizes]
    assert "rank 1 has other settings (parallel) than rank 0: start all" in said([*each, *each])


@pytest.mark.slow
def test_another_run_dir_of_the_same_name(workspace, folders):
    """On a disk of each host: the second rank would find out when it writes a checkpoint."""
    each = [[*workspace.settings("own", steps=2), "run_dir=runs/own"]] * 2
    local, other = (Path(folder, "runs") for folder in folders)
    found = said(each, folders)
    assert "rank 1: run_dir=runs/own, which all ranks write to: No such file or dir" in found
    assert not local.exists()
    (other / "own").mkdir(parents=True)
    found = said(each, folders)
    assert "rank 1: run_dir=runs/own is another directory than that of rank 0: all hosts" in found
    assert not local.exists() and not [*(other / "own").iterdir()]


def change_weights(model: Path) -> None:
    file = model / "model.safetensors"
    weights = {name: weight + 0.1 for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("differs", ["weights", "config", "layers", "generation_config"])
def test_another_model_of_the_same_name(workspace, folders, differs):
    changes = {"config": {"rms_norm_eps": 1e-2}, "layers": {"num_hidden_layers": 3}}
    write_model(Path(folders[0], "model"))
    other = write_model(Path(folders[1], "model"), **changes.get(differs, {}))
    if differs == "weights":
        change_weights(other)
    elif differs == "generation_config":
        (other / "generation_config.json").write_text('{"repetition_penalty": 1.5}')
    found = said([workspace.settings(f"model-{differs}", steps=2, model="model")] * 2, folders)
    assert "rank 1 reads another model than rank 0 from model: give all hosts the same" in found


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", ["teacher", "reference"])
def test_another_model_beside(workspace, folders, tmp_path, name):
    """Whose shards would be those of two models."""
    models = [write_model(Path(folder, "other")) for folder in folders]
    change_weights(models[1])
    changes: dict[str, object] = {"task": "distill", "teacher": "other"}
    if name == "reference":
        changes = {"task": "dpo", "reference": "other", "data": tmp_path / "pairs.jsonl"}
        pair = {"prompt": "say", "chosen": "yes", "rejected": "no"}
        (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8)
    found = said([workspace.settings(f"beside-{name}", steps=2, **changes)] * 2, folders)
    assert "rank 1 reads another model than rank 0 from other: give all hosts the same" in found


OTHERS = {
    "data": {"data": "rows.jsonl"},
    "data of a stream": {"data": "rows.jsonl", "streaming": "true"},
    "eval_data": {"eval_data": "rows.jsonl"},
    "sample_prompts": {"sample_prompts": "[rows.jsonl]"},
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", OTHERS)
def test_other_rows(workspace, folders, case):
    """Of the same name and size."""
    for folder, word in zip(folders, ("seven", "eight"), strict=True):
        rows = [json.dumps({"prompt": f"say {word} {i}", "completion": "yes"}) for i in range(40)]
        Path(folder, "rows.jsonl").write_text("\n".join(rows))
    changes = {"steps": 2, "eval_data": workspace.held_out} | OTHERS[case]
    found = said([workspace.settings(f"rows-{case}", **changes)] * 2, folders)
    name = case.split()[0]
    assert f"rank 1 has other {name} than rank 0: give all hosts the same files" in found


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
    Ranks(2, load_checkpoints, folders).finish(60)
