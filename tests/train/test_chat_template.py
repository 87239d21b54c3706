"""Chat templates in runs: what ends turns is learned, the time stays, variables reach them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.support.small import CHATML
from tests.train.conftest import Workspace
from tests.train.ranks import train_on
from tigon.models import MODELS
from tigon.tokenizer import Tokenizer, chat_template
from tigon.train import build, load, main, pack
from tigon.train.export import load_checkpoint
from tigon.train.vocabulary import add_stop_tokens

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
UNKNOWN = CHATML.replace("<|im_end|>", "<|end of turn|>")


@pytest.fixture
def base(workspace, tmp_path) -> Path:
    """The model and its tokenizer as a base model has them: eos ends documents, no template."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in workspace.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": 0}))
    return folder


def train(workspace: Any, run: Path, base: Path, template: str, **settings: Any) -> Path:
    path = run.with_suffix(".jinja")
    path.write_text(template)
    chats = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "the model"}]
    data = run.with_suffix(".jsonl")
    data.write_text(f"{json.dumps({'messages': chats})}\n" * 8)
    given = {"model": base, "chat_template": path, "export": True, "data": data} | settings
    main(workspace.settings("x", run_dir=run, **given))
    return run / "hf"


def test_a_base_model_learns_to_stop(workspace, base, tmp_path):
    assert Tokenizer.from_pretrained(base).eos_token == "<|endoftext|>"
    exported = train(workspace, tmp_path / "run", base, CHATML, steps=30, lr=1e-2)
    end = Tokenizer.from_pretrained(base).encode("<|im_end|>")[0]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text())["eos_token_id"] == [0, end]
    model = tigon.from_pretrained(exported, dtype=torch.float32)
    tokenizer = Tokenizer.from_pretrained(exported)
    assert tokenizer.eos_token_id == end
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "so"}], add_generation_prompt=True
    )
    out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0, len(ids) :]) == "the model<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (PLAIN + PROMPT, r"jsonl:1: the chat template ends .*the model', which is not a special"),
        (UNKNOWN, r"jsonl:1: the chat template ends what the assistant says in .*of turn\|>"),
        (UNMARKED, r"jsonl:1: .*and what follows, '<\|im_end\|>\\n', is not learned"),
    ],
)
def test_a_template_that_would_never_end_is_refused(workspace, base, tmp_path, template, message):
    with pytest.raises(SystemExit, match=message):
        train(workspace, tmp_path / "run", base, template)
    assert not (tmp_path / "run").exists()


def test_eos_stays_if_the_template_writes_it(base):
    for template, expected in ((CHATML + "{{ eos_token }}", 0), (CHATML, 2)):
        tokenizer = Tokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        model = MODELS["llama"].from_pretrained(base)
        model.generation_config = {}
        add_stop_tokens(model, tokenizer, {2})
        assert model.config.eos_token_id == [0, 2] and model.generation_config == {}
        assert tokenizer.eos_token_id == expected


def test_seq_len_beyond_the_models_context(workspace, tmp_path, capsys):
    with pytest.raises(SystemExit, match="seq_len=513 is more than the model's context of 512 tok"):
        main(workspace.settings("x", run_dir=tmp_path / "run", seq_len=513))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="seq_len=513 is more than the model's context of 512 tok"):
        pack(load(None, workspace.settings("x", seq_len=513)))
    assert capsys.readouterr().out == ""  # before the data are made, which may take long


# What a run gives its chat template: the time at which it began, and variables.


DATED = "{{ date_string if date_string is defined else strftime_now('%d %b') }}" + CHATML
SAYS = "{{ mood }}{{ size }}" + CHATML
DAY, NEXT = datetime(2026, 5, 1, 9), datetime(2026, 5, 2, 9)


class Clock:
    time = DAY


@pytest.fixture
def clock(monkeypatch, tmp_path) -> type[Clock]:
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


def test_a_run_keeps_its_day(workspace, clock, tmp_path, monkeypatch, capsys):
    given = {"chat_template": write(tmp_path / "dated.jinja", DATED)}
    whole = losses(workspace, "dated", **given, workers=1)  # a process with the clock of today
    assert "the chat template writes the time, 01 May, which a" in capsys.readouterr().out
    source = workspace.checkpoint("dated", 2)
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


def test_ranks_have_the_time_of_the_first(workspace, tmp_path):
    """Written to the microsecond: with its own time, each rank would have other data."""
    template = write(tmp_path / "exact.jinja", "{{ strftime_now('%f') }}" + CHATML)
    train_on(2, workspace.settings("two", steps=1, chat_template=template))
    assert len(workspace.metrics("two", "loss")) == 1


def test_variables_of_a_run_and_of_rows(workspace, clock, tmp_path):
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


def test_samples_and_checkpoints_have_them(workspace, clock, tmp_path, monkeypatch):
    prompts: list[str] = []
    read = build.read_prompts

    def reading(config: Any, tokenizer: Any, context: int) -> Any:
        found = read(config, tokenizer, context)
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
    tokenizer = load_checkpoint(workspace.checkpoint("sampled", 4))[1]
    assert tokenizer.chat_template_kwargs == {"mood": "glad"} and tokenizer.strftime_now is None
    # Before the data are read, and with the tokens that they bring
    assert prompts == ["glad<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"] * 2
