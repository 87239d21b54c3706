"""Bad settings and bad data end a run with one line, and before anything is written."""

import json
import re

import pytest
import torch

from tests.support.small import LLAMA, write_model
from tigon.train import build, load, main
from tigon.train import data as train_data
from tigon.train.notes import find_unused_settings
from tigon.train.optim import learning_rate


@pytest.fixture
def fails(workspace, tmp_path):
    def run(message: str, *settings: str) -> None:
        with pytest.raises(SystemExit, match=message):
            main([*workspace.settings("x", run_dir=tmp_path / "run"), *settings])
        assert not (tmp_path / "run").exists()

    return run


def test_settings(fails):
    fails("task='lora' is another trainer's; here: sft with lora.rank=16", "task=lora")
    fails("task='gkd' is another trainer's; here: distill with teacher", "task=gkd")
    if not torch.cuda.is_available():
        fails("device=cuda, but torch sees no CUDA device", "device=cuda")


def test_chat_templates(fails, workspace, tmp_path):
    fails("no chat template chatml: name a Jinja file", "chat_template=chatml")
    fails("x.jinja.: task=pretrain has no use for it", "chat_template=x.jinja", "task=pretrain")
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    fails("chat template", f"chat_template={tmp_path}/bad.jinja")


def test_chat_template_kwargs(fails):
    kwargs = "chat_template_kwargs={{{}: false}}".format
    fails("has 'enable_thinkin', which the chat template does not", kwargs("enable_thinkin"))
    fails("chat_template_kwargs must be an object of the chat template's own", kwargs("messages"))
    fails("chat_template_kwargs must be an object", kwargs("strftime_now"))
    fails("chat_template_kwargs='x' is not a dictionary or null", "chat_template_kwargs=x")
    fails("task=pretrain has no use for it", "task=pretrain", kwargs("m"))


def test_data(fails, workspace, tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    fails(r"no data file matches .*data\.jsonl", f"data={path}")
    with monkeypatch.context() as patch:  # before data is tokenized, which may take hours
        patch.setattr(train_data, "tokenize", None)
        missing = r"eval_data: no data file matches .*data\.jsonl'; .* eval_data=\[\] for none"
        fails(missing, f"eval_data={path}")
        path.write_text("")
        fails(r"data\.jsonl is empty", f"eval_data={path}")
    fails(r"data\.jsonl is empty", f"data={path}")
    good = workspace.data.read_text().splitlines()[0]
    path.write_text(f'{good}\n{{"messages": [{{"role": "user", "content": "hi"}}]}}\n')
    bad = r"data\.jsonl:2: .*no turn of the role 'assistant'.*; bad_rows=skip leaves such rows out$"
    fails(bad, f"data={path}")
    fails(bad, f"eval_data={path}")
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 2)
    none = r"data\.jsonl has no good row of 2: .*data\.jsonl:1: .*no turn of the role 'assistant'"
    fails(none, f"data={path}", "bad_rows=skip")
    fails(r"no example of .* has anything to learn within seq_len 4", "seq_len=4")


def test_data_of_another_kind_says_what_it_is(fails, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n')
    fails(r"data\.jsonl:1: its keys 'text' are those of task=pretrain", f"data={path}")
    fails("its keys 'messages' are those of task=sft", "task=pretrain")
    fails("for chats, set teacher", "task=distill")
    path.write_text('{\n  "messages": []\n}\n')
    fails("data.jsonl:1: not valid JSON: .*; each line must be a whole object", f"data={path}")
    path.write_text("[]\n")
    fails(r"not a list; one list of all rows is a \.json file", f"data={path}")
    path.write_text('{"dialog": [{"role": "user", "content": "a"}]}\n')
    renamed = "columns={messages: dialog}"
    fails(r"by columns=, 'messages' is called 'dialog' \(an entry of", renamed)


def test_rows_that_do_not_fill_a_step_are_noted(workspace, tmp_path, capsys):
    main(["--dry-run", *workspace.settings("x", run_dir=tmp_path / "run", batch_size=1024)])
    said = capsys.readouterr().out
    rows = re.search(r"^data: .* tokens, (\d+) rows", said, re.M)[1]
    assert f"note: batch_size=1024 is more than the {rows} rows of the data, so an epoch" in said
    assert "takes minutes on a CPU" not in said
    main(["--dry-run", *workspace.settings("x", run_dir=tmp_path / "run", batch_size=rows)])
    assert "so an epoch" not in capsys.readouterr().out


def test_long_steps_of_a_cpu_are_noted(workspace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "SLOW_STEP", 0)
    main(["--dry-run", *workspace.settings("x", run_dir=tmp_path / "run", batch_size=8)])
    assert re.search(
        "note: a step of up to [0-9,]+ tokens takes minutes on a CPU", capsys.readouterr().out
    )


def test_the_default_lr_of_an_adapter_is_noted(workspace, tmp_path, capsys):
    def said(**given):
        main(["--dry-run", *workspace.settings("x", run_dir=tmp_path / "run", **given)])
        return capsys.readouterr().out

    assert "note: lr=1e-05 is for all weights" in said(**{"lora.rank": 2}, lr=1e-5)
    assert "for all weights" not in said(**{"lora.rank": 2}, lr=1e-4) + said(lr=1e-5)


def test_settings_without_effect_are_noted(workspace, tmp_path):
    def notes(device="cpu", **settings):
        given = {"steps": 6, "eval_data": "[]", **settings}
        config = load(None, workspace.settings("x", run_dir=tmp_path / "run", **given))
        return " ".join(find_unused_settings(config, 6, torch.device(device)))

    assert notes() == notes(warmup_steps=6) == notes(spike="stop", spike_sigma=6) == ""
    warmup = "warmup_steps=7 of 6 steps; below 1 it is a share of them, as warmup_steps=0.1"
    assert notes(warmup_steps=7) == f"lr=0.003 is not reached: {warmup}"
    reached = load(None, workspace.settings("x", steps=6, warmup_steps=6))
    assert learning_rate(reached, 5, 6) == pytest.approx(reached.lr)
    assert notes(schedule="wsd", decay_steps=0.3) == ""
    assert "lr does not fall: decay_steps=0.2 of 6 steps is 1" in notes(schedule="wsd")
    assert notes(eval_every=2, eval_metrics="nll") == (
        "without eval_data, nothing comes of eval_every, eval_metrics"
    )
    assert "spike=stop needs spike_sigma" in notes(spike="stop")
    for name, what in (("activation_offload", "memory"), ("optimizer_offload", "memory")):
        assert notes(**{name: "true"}) == f"{name}=true saves no {what} on a CPU"
        assert notes("cuda", **{name: "true"}) == ""
    assert "accumulate_fp32=true changes nothing" in notes(accumulate_fp32="true")
    assert notes(accumulate_fp32="true", param_dtype="bfloat16") == ""
    assert notes(fp8="true", dtype="bfloat16") == "fp8=true saves no time on a CPU"
    held_out = {"eval_data": workspace.data, "keep_best": 1}
    assert "keep_best=1: no step before the last" in notes(**held_out, eval_every=2)
    assert "keep_best" in notes(**held_out, eval_every=2, save_every=3)
    assert notes(**held_out, eval_every=2, save_every=4) == ""


def test_run_dir_that_cannot_be_made(workspace, tmp_path):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SystemExit, match=f"run_dir={run_dir} cannot be made: "):
            main(workspace.settings("x", run_dir=run_dir))


def test_models(fails, workspace, tmp_path):
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    fails("old is a run or a checkpoint of one: give its run_dir/hf", f"model={tmp_path}/old")
    fails("nowhere", f"model={tmp_path}/nowhere")
    config = tmp_path / "config.json"
    tokenizer = f"tokenizer={workspace.model}"
    fails(r"init=.*config\.json is not a config\.json file", "model=", tokenizer, f"init={config}")
    config.write_text(json.dumps({**LLAMA, "model_type": "lama"}))
    fails(
        r"config\.json: model_type 'lama' is not 'deepseek_v3' or",
        "model=",
        tokenizer,
        f"init={config}",
    )
    for dtype in ("save", "__class__", "float8_e4m3fn"):
        config.write_text(json.dumps({**LLAMA, "dtype": dtype}))
        message = rf"config\.json: unsupported dtype '{dtype}': use .*; export_dtype= says what"
        fails(message, "model=", tokenizer, f"init={config}")
    small = write_model(tmp_path / "small", vocab_size=30)
    fails(
        r"the tokenizer gives token \d+, or a row has it, but the model's vocabulary has 30",
        f"model={small}",
    )


def test_without_arguments_or_with_help_it_explains_itself(capsys, workspace):
    with pytest.raises(SystemExit, match="2"):
        main([])
    printed = capsys.readouterr()
    usage = "torchrun --nproc-per-node 8 -m tigon train config.yaml"
    assert usage in printed.err and not printed.out
    main(["--help", "lr=fast"])
    assert usage in capsys.readouterr().out
    main([*workspace.settings("x"), "--print-config"])
    assert "lr: 0.003\n" in capsys.readouterr().out
    assert not (workspace.root / "x").exists()
