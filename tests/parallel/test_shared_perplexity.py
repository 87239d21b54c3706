"""`tigon eval perplexity --tp 2` on two ranks, against one process."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import tigon
from tests.parallel.ranks import run_command, run_on_ranks
from tests.support.small import EXPERTS, TEXT, write_chats, write_model
from tests.train.ranks import Ranks
from tigon.cli import main
from tigon.eval import perplexity
from tigon.train import main as train

MODELS, FILES = ("llama", "experts"), ("chats.jsonl", "text.txt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("commands")
    write_model(directory / "llama", eos_token_id=None)
    write_model(directory / "experts", **EXPERTS | {"num_experts": 6})
    write_chats(directory / "chats.jsonl", 6)
    (directory / "text.txt").write_text(f"{TEXT} " * 20)
    return directory


def measures(model: tigon.CausalLM, directory: Path) -> list[list[float]]:
    tokenizer = tigon.Tokenizer.from_pretrained(directory / "llama")
    found = [perplexity(model, tokenizer, str(directory / name), context=48) for name in FILES]
    return [[r.perplexity, r.loss, r.accuracy, r.tokens] for r in found]


def measure_on_ranks(directory: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name in MODELS:
        model = tigon.from_pretrained(f"{directory}/{name}", mesh=mesh)
        found[name] = measures(model, Path(directory))
    return found


def test_two_ranks_measure_what_one_does(saved):
    both = run_on_ranks(2, measure_on_ranks, str(saved))
    for name in MODELS:
        expected = measures(tigon.from_pretrained(saved / name), saved)
        for found in both:
            for ours, alone in zip(found[name], expected, strict=True):
                assert ours == pytest.approx(alone, rel=1e-5)
        assert expected[0][3] > 20 and expected[1][3] > 200


def test_a_run_is_measured_by_two_ranks_and_said_once(saved, tmp_path, capsys):
    data, run = saved / "chats.jsonl", tmp_path / "run"
    settings = "seq_len=64 lr=1e-2 batch_size=2 steps=2 device=cpu"
    train([f"run_dir={run}", f"model={saved / 'experts'}", f"data={data}", *settings.split()])
    command = ["eval", "perplexity", str(run), str(data)]
    capsys.readouterr()
    assert main([*command, "--device", "cpu"]) == 0
    alone = capsys.readouterr().out.split()
    for more in [], ["--expert-parallel"]:
        ours = Ranks(2, run_command, [*command, "--tp", "2", *more]).finish().split()
        assert ours[::2] == alone[::2] == ["perplexity", "loss", "accuracy", "tokens", "bits/byte"]
        values = [[float(value) for value in said[1::2]] for said in (ours, alone)]
        assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "nowhere", "said"),
    [
        (["text.txt", "--context", "4096"], False, "context=4096 is not in [2, 512]"),
        (["missing.txt"], False, "missing.txt"),
        (["./text.txt"], True, "rank 1: "),
    ],
)
def test_what_is_wrong_is_said_once(saved, monkeypatch, tmp_path, more, nowhere, said):
    monkeypatch.chdir(saved)
    command = ["eval", "perplexity", str(saved / "llama"), *more, "--tp", "2"]
    ranks = Ranks(2, run_command, command, str(tmp_path) if nowhere else "")
    (line,) = ranks.fail(1, 1)
    assert line.startswith("tigon eval: ") and said in line and ranks.printed == ""
