import json
import pwd
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import save_file

from tests.support.hub_server import HubServer
from tigon.data.cache import cache_root
from tigon.tokenizer.files import find_files as tokenizer_files
from tigon.weights import Checkpoint, Repository

NAME = "lab/tiny"


def fill(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_local_directory(tmp_path: Path) -> None:
    fill(tmp_path / "sub", config__json="{}")
    assert Repository(tmp_path, subfolder="sub").file("config.json").read_text() == "{}"
    assert Repository(str(tmp_path / "sub")).optional_file("other.json") is None
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no file config.json"):
        Repository(tmp_path).file("config.json")
    with pytest.raises(ValueError, match="local directory and has no revision 'v2'"):
        Repository(tmp_path, revision="v2")
    with pytest.raises(NotADirectoryError, match=r"config.json is a file; give the directory"):
        Repository(tmp_path / "sub" / "config.json")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(NotADirectoryError, match=r"a.gguf is a file; .* `tigon export FILE DIREC"):
        Repository(tmp_path / "a.gguf")


def test_only_files_asked_for_are_requested(hub: HubServer) -> None:
    root = fill(hub.root / NAME, config__json="{}", pytorch_model__bin="b", big__safetensors="c")
    tensors = {"w": torch.randn(100, 30), "b": torch.randn(7)}
    save_file(tensors, root / "model.safetensors")
    repository = Repository(NAME)
    assert repository.file("config.json").read_text() == "{}"
    assert repository.optional_file("generation_config.json") is None
    checkpoint = Checkpoint.open(repository)
    out = torch.empty(100, 30)
    checkpoint.read_into("w", out)
    assert torch.equal(out, tensors["w"])
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert hub.heads.keys() == {f"{NAME}/{name}" for name in names}
    assert hub.gets == {f"{NAME}/config.json": 1, f"{NAME}/model.safetensors": 1}

    again = Repository(NAME)
    assert again.file("config.json") == repository.file("config.json")
    assert again.optional_file("generation_config.json") is None
    assert hub.heads[f"{NAME}/generation_config.json"] == 1  # known to be absent in that commit
    assert hub.gets.total() == 2


def test_revision(hub: HubServer, tmp_path: Path) -> None:
    fill(hub.root / NAME, config__json="main")
    commit = hub.push(NAME, fill(tmp_path / "old", config__json="old"), revision="v1.0")
    hub.push(NAME, fill(tmp_path / "pr", config__json="pr"), revision="refs/pr/1")
    assert Repository(NAME).file("config.json").read_text() == "main"
    assert Repository(NAME, revision="v1.0").file("config.json").read_text() == "old"
    assert Repository(NAME, revision=commit).file("config.json").read_text() == "old"
    assert Repository(NAME, revision="refs/pr/1").file("config.json").read_text() == "pr"
    offline = Repository(NAME, revision="refs/pr/1", local_files_only=True)
    assert offline.file("config.json").read_text() == "pr"
    with pytest.raises(RevisionNotFoundError, match="v9"):
        Repository(NAME, revision="v9").file("config.json")


@pytest.mark.parametrize("first", ["config.json", "absent.json"])
def test_all_files_come_from_the_first_ones_commit(
    hub: HubServer, tmp_path: Path, first: str
) -> None:
    hub.push(NAME, fill(tmp_path / "1", config__json="1", a__json="1", b__json="1"))
    repository = Repository(NAME)
    repository.optional_file(first)
    hub.push(NAME, fill(tmp_path / "2", config__json="2", a__json="2", b__json="2"))
    assert repository.file("a.json").read_text() == "1"
    assert Repository(NAME, local_files_only=True).optional_file("b.json") is None
    assert Repository(NAME).file("b.json").read_text() == "2"
    assert repository.file("b.json").read_text() == "1"


def test_subfolder(hub: HubServer) -> None:
    fill(hub.root / NAME, config__json="top")
    fill(hub.root / NAME / "a/b", config__json="deep", x__bin="")
    repository = Repository(NAME, subfolder="a/b")
    assert repository.file("config.json").read_text() == "deep"
    message = r"lab/tiny \(revision main\) has no file a/b/other.json"
    with pytest.raises(FileNotFoundError, match=message):
        repository.file("other.json")
    assert repository.listing() == ["config.json", "x.bin"]


def test_tokens(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lab/private", "lab/gated"):
        fill(hub.root / name, config__json="secret")
    hub.private["lab/private"] = hub.gated["lab/gated"] = "hf_right"
    for token in (None, "hf_wrong"):
        with pytest.raises(RepositoryNotFoundError, match="lab/private"):
            Repository("lab/private", token=token).file("config.json")
        with pytest.raises(GatedRepoError, match="lab/gated"):
            Repository("lab/gated", token=token).optional_file("config.json")
    assert Repository("lab/gated", token="hf_right").file("config.json").read_text() == "secret"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert Repository("lab/private").file("config.json").read_text() == "secret"


@pytest.mark.parametrize("way", ["option", "environment"])
def test_offline(way: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(hub.root / NAME, config__json="{}", extra__json="{}")
    options: dict[str, Any] = {"cache_dir": tmp_path / "elsewhere"}
    path = Repository(NAME, **options).file("config.json")
    assert path.is_relative_to(tmp_path / "elsewhere")
    requests = hub.heads.total() + hub.gets.total()
    if way == "option":
        options["local_files_only"] = True
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = Repository(NAME, **options)
    assert offline.file("config.json") == path
    assert offline.optional_file("absent.json") is None
    message = r"lab/tiny \(revision main\) has no file extra.json in the cache .*elsewhere"
    with pytest.raises(FileNotFoundError, match=message):
        offline.file("extra.json")
    said = "load it once online" if way == "option" else "downloads are off"
    with pytest.raises(FileNotFoundError, match=rf"lab/other .*in the cache .*{said}"):
        Repository("lab/other", **options).file("config.json")
    with pytest.raises(FileNotFoundError, match=rf"lab/other .*in the cache .*{said}"):
        tokenizer_files(Repository("lab/other", **options))
    assert hub.heads.total() + hub.gets.total() == requests


def test_missing_repository_and_bad_names(hub: HubServer) -> None:
    for request in (Repository.file, Repository.optional_file):
        with pytest.raises(RepositoryNotFoundError, match="lab/none"):
            request(Repository("lab/none"), "config.json")
    with pytest.raises(FileNotFoundError, match=r"no directory a/b/c .* is owner/name"):
        Repository("a/b/c").file("config.json")
    with pytest.raises(ValueError, match="a b"):
        Repository("lab/a b").file("config.json")


def test_hub_out_of_reach(hub: HubServer) -> None:
    fill(hub.root / NAME, config__json="{}", extra__json="{}")
    first = Repository(NAME)
    first.file("config.json")
    assert first.optional_file("absent.json") is None
    hub.close()
    again = Repository(NAME)
    assert again.file("config.json").read_text() == "{}"
    assert again.optional_file("absent.json") is None
    message = f"cannot reach {hub.endpoint} for extra.json.*set HF_HUB_OFFLINE=1"
    with pytest.raises(ConnectionError, match=message):
        again.optional_file("extra.json")
    with pytest.raises(ConnectionError, match=r"config\.json of lab/other"):
        Repository("lab/other").optional_file("config.json")


def test_pickles_are_never_downloaded(hub: HubServer) -> None:
    fill(hub.root / NAME, config__json="{}", pytorch_model__bin="pickle")
    message = r"lab/tiny has neither .*; its pickled weights \(pytorch_model.bin\) are not read"
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint.open(Repository(NAME))
    assert hub.gets.total() == 0
    assert not any("pytorch_model" in name for name in hub.heads)


def test_a_path_is_never_taken_for_a_repository(hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    paths = ("./model", "../a/b", "~/no-such-model", "/no/such", Path("a/b"), "runs/sft/")
    for name in (*paths, "runs/sft/hf", "other/sft/hf"):
        with pytest.raises(FileNotFoundError, match=f"no directory {name} "):
            Repository(name)
    with pytest.raises(FileNotFoundError, match=r"no directory runs/sft .* a folder owner here"):
        Repository("runs/sft")
    assert Repository("runs/sft", revision="main").directory is None
    assert Repository("organisation/sft").directory is None


def sharded(hub: HubServer) -> list[str]:
    """The shards of lab/tiny, beside a consolidated file as some repositories have."""
    root = fill(hub.root / NAME, config__json="{}", consolidated__safetensors="not a shard")
    shards = {f"model-0000{i}-of-00003.safetensors": f"w{i}" for i in (1, 2, 3)}
    for shard, name in shards.items():
        save_file({name: torch.randn(500, 10)}, root / shard)
    index = {"weight_map": {name: shard for shard, name in shards.items()}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return [f"{NAME}/{shard}" for shard in shards]


def test_of_shards_and_a_consolidated_file_only_the_shards_are_fetched(hub: HubServer) -> None:
    names = sharded(hub)
    Checkpoint.open(Repository(NAME))
    assert hub.gets.keys() == {*names, f"{NAME}/model.safetensors.index.json"}
    assert all(hub.gets[name] == 1 for name in names)
    (hub.root / NAME / "model.safetensors.index.json").unlink()
    message = r"has neither model.safetensors nor .*; other weights there: consolidated"
    with pytest.raises(FileNotFoundError, match=message):
        Checkpoint.open(Repository(NAME, cache_dir=hub.root / "cache"))
    assert f"{NAME}/consolidated.safetensors" not in hub.gets


def test_a_download_goes_on_where_the_connection_broke(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sharded(hub)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2)  # of which it keeps whole ones
    hub.cuts[names[1]] = 2
    path = Repository(NAME).file(names[1].removeprefix(f"{NAME}/"))
    content = (hub.root / names[1]).read_bytes()
    assert path.read_bytes() == content
    assert hub.gets[names[1]] == 3
    assert hub.sent[names[1]] == len(content)  # no byte twice


def test_a_download_that_breaks_for_good_leaves_no_half_file(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = sharded(hub)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    hub.cuts[names[1]] = 1000
    message = r"cannot download model-00002-of-00003.safetensors of lab/tiny"
    with pytest.raises(ConnectionError, match=message):
        Checkpoint.open(Repository(NAME))
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert "model-00002-of-00003.safetensors" not in left
    assert not [name for name in left if name.endswith(".incomplete")]
    offline = Repository(NAME, local_files_only=True)
    with pytest.raises(FileNotFoundError, match=r"00003.safetensors in the cache"):
        offline.file("model-00002-of-00003.safetensors")
    hub.cuts.clear()
    before = hub.gets.copy()
    assert Checkpoint.open(Repository(NAME)).tensors.keys() == {"w1", "w2", "w3"}
    assert (hub.gets - before).keys() == {names[1]}  # the others were whole


def test_a_hub_that_does_not_answer_is_given_up_soon(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder "runs" here would be another error
    monkeypatch.setattr("tigon.hub.TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        where = f"http://127.0.0.1:{silent.getsockname()[1]}"
        template = where + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=r"cannot reach .* of runs/sftt"):
            Repository("runs/sftt").file("config.json")
        assert time.monotonic() - began < 30  # the client would try for more than two minutes


def test_user_without_a_home_directory(tmp_path, monkeypatch):
    """As a container may give its process the number of a user that nobody is."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("TIGON_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert Repository(tmp_path).directory == tmp_path  # needs no cache
    for locate in (partial(Repository, "owner/name"), cache_root):
        with pytest.raises(ValueError, match=r"^~/\.cache/.*: no home .* for ~: set HOME; a"):
            locate()
