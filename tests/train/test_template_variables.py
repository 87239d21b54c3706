"""What a run gives its chat template: the time at which it began, and variables."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.small import CHATML
from tests.train.conftest import Workspace
from tests.train.ranks import train_on
from tigon.data import ChatEncoder
from tigon.tokenizer import chat_template
from tigon.train import build, main, pack
from tigon.train.export import load_checkpoint

DATED = "{{ date_string if date_string is defined else strftime_now('%d %b') }}" + CHATML
SAYS = "{{ mood }}{{ size }}" + CHATML
DAY, NEXT = datetime(2026, 5, 1, 9), datetime(2026, 5, 2, 9)


class Clock:
    time = DAY


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Clock]:
    """The present time of this process, but not of workers; and an empty cache."""
    monkeypatch.setattr(chat_template, "now", lambda: Clock.time)
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "cache"))
    Clock.time = DAY
    return Clock


def losses(workspace: Workspace, run: str, **changes: Any) -> list[float]:
    main(workspace.settings(run, steps=4, save_every=2, **changes))
    return workspace.metrics(run, "loss")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_run_keeps_its_day(
    workspace: Workspace,
    clock: type[Clock],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"chat_template": write(tmp_path / "dated.jinja", DATED)}
    whole = losses(workspace, "dated", **given, workers=1)  # a process with the clock of today
    assert "the chat template writes the time, 01 May, which a" in capsys.readouterr().out
    source = workspace.root / "dated/checkpoints/step-00000002"
    assert json.loads((source / "run.json").read_text())["strftime_now"] == "2026-05-01T09:00:00"
    clock.time = NEXT
    monkeypatch.setenv("TIGON_CACHE", str(tmp_path / "empty"))
    assert losses(workspace, "dated-on", resume=source, **given) == whole[2:]
    assert losses(workspace, "another", **given) != whole
    # A variable pins it, and the cache with it
    given |= {"chat_template_kwargs": "{date_string: 01 May}"}
    pinned = losses(workspace, "pinned", **given)
    assert pinned == whole
    with pytest.raises(SystemExit, match=r"order of the data: chat_template_kwargs null -> {"):
        main(workspace.settings("x", steps=4, resume=source, **given))


def test_what_was_packed_on_another_day(
    workspace: Workspace, clock: type[Clock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    encode = ChatEncoder.__call__

    def counting(self: ChatEncoder, block: Any) -> Any:
        examples = encode(self, block)
        made.append(len(examples))
        return examples

    monkeypatch.setattr(ChatEncoder, "__call__", counting)
    dated = f"chat_template={write(tmp_path / 'dated.jinja', DATED)}"
    common = [str(workspace.data), f"model={workspace.model}", "seq_len=128"]
    for days, again, *settings in (
        ((DAY, datetime(2026, 5, 1, 23)), False, dated),
        ((DAY, NEXT), True, dated),
        ((DAY, NEXT), False, dated, "chat_template_kwargs={date_string: today}"),
        ((DAY, NEXT), False),
    ):
        monkeypatch.setenv("TIGON_CACHE", str(tmp_path / f"{days}{settings}".replace("/", "")[:99]))
        counts = []
        for clock.time in days:
            made.clear()
            pack([*common, *settings])
            counts.append(sum(made))
        assert counts == [43, 43 if again else 0], settings


def test_ranks_have_the_time_of_the_first(workspace: Workspace, tmp_path: Path) -> None:
    """Written to the microsecond: with its own time, each rank would have other data."""
    template = write(tmp_path / "exact.jinja", "{{ strftime_now('%f') }}" + CHATML)
    train_on(2, workspace.settings("two", steps=1, chat_template=template))
    assert len(workspace.metrics("two", "loss")) == 1


def test_variables_of_a_run_and_of_rows(
    workspace: Workspace, clock: type[Clock], tmp_path: Path
) -> None:
    given = {"chat_template": write(tmp_path / "t.jinja", SAYS)}
    rows = [json.loads(line) for line in workspace.data.read_text().splitlines()]

    def data(name: str, **variables: Any) -> dict[str, Any]:
        text = "".join(json.dumps(r | {"chat_template_kwargs": variables}) + "\n" for r in rows)
        return {"data": write(tmp_path / f"{name}.jsonl", text), **given}

    of_rows = losses(workspace, "of-rows", **data("both", mood="a", size=1))
    of_run = losses(workspace, "of-run", **given, chat_template_kwargs="{mood: a, size: 1}")
    mixed = data("mood", mood="a") | {"chat_template_kwargs": "{mood: b, size: 1}"}
    assert of_run == of_rows == losses(workspace, "mixed", **mixed)
    assert of_run != losses(workspace, "other", **given, chat_template_kwargs="{mood: b, size: 1}")


def test_samples_and_checkpoints_have_them(
    workspace: Workspace, clock: type[Clock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []
    read = build.read_prompts

    def reading(config: Any, tokenizer: Any, model: Any) -> Any:
        found = read(config, tokenizer, model)
        prompts.extend(tokenizer.decode(p.ids) for p in found)
        return found

    monkeypatch.setattr(build, "read_prompts", reading)
    losses(
        workspace,
        "sampled",
        chat_template=write(tmp_path / "t.jinja", SAYS),
        chat_template_kwargs="{mood: glad}",
        eval_data=workspace.held_out,
        sample_prompts="[hi]",
        sample_tokens=1,
    )
    # `tigon chat RUN` asks as the run did
    tokenizer = load_checkpoint(workspace.root / "sampled/checkpoints/step-00000004")[1]
    assert tokenizer.chat_template_kwargs == {"mood": "glad"} and tokenizer.strftime_now is None
    assert prompts == ["glad<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"]
