"""push_to_hub, `tigon push` and the setting push_to_hub, against a hub on loopback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file

import tigon
from tests.support.hub_server import HubServer, hub
from tests.support.small import write_chats, write_model
from tigon.cli import main
from tigon.models.pretrained.upload import is_generated_card
from tigon.train import main as train
from tigon.train import publish

__all__ = ["hub"]

NAME = "me/words"
WRITES = "hf_writes"


@pytest.fixture
def online(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    hub.writers.add(WRITES)
    monkeypatch.setenv("HF_TOKEN", WRITES)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    return hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("push") / "model")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Two steps with evaluations of two named sets; the best is the last."""
    root = folder.parent
    data = write_chats(root / "train.jsonl", 12)
    held = [write_chats(root / f"{name}.jsonl", 3, seed=1) for name in ("math", "chat")]
    settings = "seq_len=64 batch_size=2 steps=2 lr=1e-2 eval_every=1 hf_best=true"
    sets = f"eval_data={{math: {held[0]}, chat: {held[1]}}}"
    train([f"run_dir={root / 'run'}", f"model={folder}", f"data={data}", sets, *settings.split()])
    return root / "run"


def files(hub: HubServer, revision: str = "main", name: str = NAME) -> dict[str, bytes]:
    commit = hub.commit(name, revision)
    assert commit is not None
    root = hub.files(commit)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_model_and_its_tokenizer(online: HubServer, folder: Path, tmp_path: Path) -> None:
    model = tigon.from_pretrained(folder)
    tokenizer = tigon.Tokenizer.from_pretrained(folder)
    where = model.push_to_hub(NAME, tokenizer=tokenizer, private=True, commit_message="first")
    assert where == f"{online.endpoint}/{NAME}"
    assert online.created[NAME]["visibility"] == "private"
    assert online.messages[online.commit(NAME) or ""] == "first"
    model.save_pretrained(tmp_path / "same", tokenizer=tokenizer)
    expected = {p.name: p.read_bytes() for p in (tmp_path / "same").iterdir()}
    sent = files(online)
    text = sent.pop("README.md").decode()
    assert sent == expected
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["tigon", "llama"]
    assert is_generated_card(text) and "LlamaForCausalLM` with 82,304 parameters" in text
    again = tigon.from_pretrained(NAME)
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


def test_one_commit_replaces_the_weights_of_another_export(online: HubServer, folder: Path) -> None:
    model = tigon.from_pretrained(folder)
    model.push_to_hub(NAME)
    assert "model.safetensors" in files(online)
    model.push_to_hub(NAME, max_shard_size="100KB")
    shards = {name for name in files(online) if name.endswith("safetensors")}
    assert len(shards) > 2 and "model.safetensors" not in shards
    model.push_to_hub(NAME)
    assert [name for name in files(online) if "safetensors" in name] == ["model.safetensors"]
    assert len(online.messages) == 3


def test_a_broken_upload_changes_nothing_and_the_next_goes_on(online, folder):
    model = tigon.from_pretrained(folder)
    model.push_to_hub(NAME)
    before = files(online)
    with torch.no_grad():
        model.model.norm.weight += 1
        model.model.embed_tokens.weight += 1
    known = set(online.large)
    online.cuts["puts"] = 1000
    with pytest.raises(ConnectionError, match=r"the upload to me/words broke: .*are kept$"):
        model.push_to_hub(NAME, max_shard_size="100KB")
    assert files(online) == before
    online.cuts["puts"] = 0
    tried = online.puts.copy()
    model.push_to_hub(NAME, max_shard_size="100KB")
    new = set(online.large) - known
    again = [oid for oid, count in (online.puts - tried).items() if oid not in new or count > 1]
    assert new and not again
    assert "model.safetensors" not in files(online)


def test_branches_and_pull_requests(online: HubServer, folder: Path) -> None:
    model = tigon.from_pretrained(folder)
    model.push_to_hub(NAME)
    before = files(online)
    model.push_to_hub(NAME, revision="bf16", dtype=torch.bfloat16)
    assert files(online) == before
    assert tigon.from_pretrained(NAME, revision="bf16").dtype == torch.bfloat16
    url = model.push_to_hub(NAME, dtype=torch.float16, create_pr=True)
    assert url == f"{online.endpoint}/{NAME}/discussions/1"
    assert files(online) == before
    assert tigon.from_pretrained(NAME, revision="refs/pr/1").dtype == torch.float16
    with pytest.raises(ValueError, match="a pull request is for main"):
        model.push_to_hub(NAME, revision="bf16", create_pr=True)


def test_a_card_that_was_edited_stays(online: HubServer, folder: Path) -> None:
    model = tigon.from_pretrained(folder)
    model.push_to_hub(NAME)
    model.push_to_hub(NAME, card="---\nlicense: mit\n---\nMine\n")  # ours was untouched
    assert files(online)["README.md"] == b"---\nlicense: mit\n---\nMine\n"
    with pytest.warns(
        UserWarning, match=r"README.md of me/words is not as Tigon wrote it, and sta"
    ):
        model.push_to_hub(NAME, dtype=torch.bfloat16)
    assert files(online)["README.md"].endswith(b"Mine\n")
    assert tigon.from_pretrained(NAME).dtype == torch.bfloat16
    model.push_to_hub(NAME, overwrite_card=True)
    assert is_generated_card(files(online)["README.md"].decode())


def test_upload_without_permission(hub, folder, monkeypatch):
    model = tigon.from_pretrained(folder)
    hub.readers.add("hf_reads")
    for token, status in ((None, "401"), ("hf_wrong", "401"), ("hf_reads", "403")):
        with pytest.raises(HfHubHTTPError, match=status):
            model.push_to_hub(NAME, token=token)
    for name in ("a/b/c", "../up", "a b", "/abs"):
        with pytest.raises(ValueError, match=r"is no name of a hub repository \(owner/name\)"):
            model.push_to_hub(name)
    hub.close()
    with pytest.raises(ConnectionError, match=f"cannot reach {hub.endpoint} for me/words"):
        model.push_to_hub(NAME, token=WRITES)


def test_a_run_with_its_card(online, run, capsys):
    capsys.readouterr()
    assert main(["push", str(run), NAME, "--private"]) == 0
    assert capsys.readouterr().out == f"{online.endpoint}/{NAME}\n"
    sent = files(online)
    text = sent.pop("README.md").decode()
    assert sent == {p.name: p.read_bytes() for p in (run / "hf").iterdir()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "eval_loss" in row][-1]
    loss = [row["loss"] for row in rows if "loss" in row][-1]
    assert f"Training loss of the last step: {loss:.4f}." in text
    accuracy = f"{100 * last['eval_accuracy/math']:.2f}%"
    assert f"| these weights | 2 | math | {last['eval_loss/math']:.4f} | {accuracy} |" in text
    assert f"| these weights | 2 | all held-out | {last['eval_loss']:.4f} |" in text
    lines = ("- Task: sft", "- Data: train.jsonl", "| `lr` | 0.01 |", f"torch {torch.__version__}")
    assert all(line in text for line in lines)
    assert str(run.parent) not in text and "/" not in text.split("## Training")[1]
    assert main(["push", str(run / "hf-best"), "me/best"]) == 0
    best = min(rows, key=lambda row: row.get("eval_loss", 9e9))["step"]
    card = files(online, name="me/best")["README.md"].decode()
    assert f"The weights are those after step {best}." in card


def test_base_model_and_data_of_the_hub(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    text = (run / "config.yaml").read_text()
    private = "/home/me/secret/rows.jsonl"
    for base in ("lab/base", "/cache/models--lab--base/snapshots/" + "0" * 40):
        changed = [
            f"model: {base}" if line.startswith("model:") else line for line in text.splitlines()
        ]
        at = changed.index("data:")
        changed[at + 1] = f"- {{path: 'hf://lab/rows', weight: 1}}\n- hf://lab/hidden\n- {private}"
        (tmp_path / "run/config.yaml").write_text("\n".join(changed))

        def is_public(name: str, kind: str) -> bool:
            return (name, kind) in (("lab/base", "model"), ("lab/rows", "dataset"))

        made = publish.run_card(tmp_path / "run", tmp_path / "run/hf", NAME, is_public)
        data: Any = ModelCard(made).data
        assert (data.base_model, data.datasets) == ("lab/base", ["lab/rows"])
        assert "fine-tuned from [lab/base](https://huggingface.co/lab/base)" in made
        assert "hidden" not in made and "secret" not in made and "rows.jsonl" in made
        unknown = publish.run_card(tmp_path / "run", tmp_path / "run/hf", NAME, lambda *_: False)
        assert "lab/" not in unknown and "a checkpoint that is not on the hub" in unknown


def test_a_card_cannot_be_made_to_say_something_else(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    settings = {
        "task": "a\nb: <script>",
        "optimizer": "[x](http://y)",
        "model": "-\n---\n",
        "lr": [],
    }
    (tmp_path / "run/config.yaml").write_text(json.dumps(settings))
    rows = [{"step": 1, "loss": 1.0, "eval_loss/<img>|x": 2.0, "eval_loss": 2.0}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = publish.run_card(tmp_path / "run", tmp_path / "run/hf", NAME, lambda *_: True)
    assert ModelCard(made).data.tags == ["tigon"]
    assert "<script>" not in made and "http://y" not in made
    assert r"| best | 1 | \<img\>\|x | 2.0000 |" in made


def test_nothing_but_the_export_is_uploaded(online, folder, tmp_path):
    export = tmp_path / "export"
    tigon.from_pretrained(folder).save_pretrained(export)
    (export / ".env").write_text("SECRET")
    (export / "optimizer.pt").write_text("large")
    assert main(["push", str(export), NAME]) == 0
    expected = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert files(online).keys() == expected


def test_folders_that_are_no_export(online, run, folder, tmp_path, capsys):
    """A checkpoint's weights have other names: those of the model on the hub would go, and its
    paths come. A run's folder may be anybody's: no link of it is followed."""
    model = tigon.from_pretrained(folder)
    model.push_to_hub(NAME)
    before = files(online)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    model.save_pretrained(tmp_path / "link")
    (tmp_path / "private.json").write_text("{}")
    (tmp_path / "link/vocab.json").symlink_to(tmp_path / "private.json")
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "hf", ignore_errors=True)
    (copy / "hf").symlink_to(folder)
    lora = Path(shutil.copytree(run, tmp_path / "lora"))
    shutil.rmtree(lora / "hf", ignore_errors=True)
    (lora / "adapter").mkdir()
    (lora / "adapter/adapter_config.json").write_text("{}")
    for path, message in (
        (tmp_path / "shards", "has no file 'model-00002-of-"),
        (tmp_path / "link", "vocab.json is a link to"),
        (tmp_path, "holds no exported model"),
        (lora, f"adapter is an adapter: `hf upload OWNER/NAME {lora}/adapter .` uploads it"),
        (lora / "adapter", f"`tigon export {lora}/adapter DIRECTORY --merge` makes a model"),
        (copy, f"hf is a link to {folder}: if that is the export"),
        (max((run / "checkpoints").glob("step-*")), "is a checkpoint of a run: `tigon export"),
    ):
        capsys.readouterr()
        assert main(["push", str(path), NAME]) == 1
        assert message in capsys.readouterr().err
    assert files(online) == before


def test_offline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), NAME]) == 1
    error = capsys.readouterr().err
    assert "offline mode is enabled" in error and "set HF_HUB_OFFLINE" not in error


def test_a_run_pushes_its_export(online, folder, run, tmp_path, capsys):
    data = run.parent / "train.jsonl"
    base = [f"model={folder}", f"data={data}", *["seq_len=64", "batch_size=2", "steps=1"]]
    train([f"run_dir={tmp_path / 'a'}", f"push_to_hub={NAME}", "push_private=true", *base])
    assert f"pushed to {online.endpoint}/{NAME}\n" in capsys.readouterr().out
    assert online.created[NAME]["visibility"] == "private"
    sent = load_file(tmp_path / "a/hf/model.safetensors")
    assert tigon.from_pretrained(NAME).state_dict().keys() >= {"model.norm.weight"}
    assert torch.equal(tigon.from_pretrained(NAME).model.norm.weight, sent["model.norm.weight"])

    online.writers.clear()
    b = tmp_path / "b"
    train([f"run_dir={b}", f"push_to_hub={NAME}", "push_private=true", *base])
    out = capsys.readouterr().out
    assert "not pushed: " in out and "401" in out
    assert f"to push it: tigon push {b} me/words --private" in out
    assert (b / "hf/model.safetensors").is_file()
    for setting, message in (
        ("push_to_hub=a/b/c", "is no name of a hub repository"),
        ("export=false", "needs export=true"),
    ):
        with pytest.raises(SystemExit, match=message):
            train([f"run_dir={tmp_path / 'c'}", f"push_to_hub={NAME}", *base, setting])
