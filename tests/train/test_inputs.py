"""Bad settings and bad data end a run with one line, and before anything is written."""

import json

import pytest
import torch

from tests.small import LLAMA, write_model
from tigon.train import main


@pytest.fixture
def fails(workspace, tmp_path):
    def run(message: str, *settings: str) -> None:
        with pytest.raises(SystemExit, match=message):
            main([*workspace.settings("x", run_dir=tmp_path / "run"), *settings])
        assert not (tmp_path / "run").exists()

    return run


def test_settings(fails):
    fails("tigon.train: unknown setting 'batchsize'; did you mean 'batch_size'", "batchsize=2")
    fails("tigon.train: lr='fast' is not a number", "lr=fast")
    fails("no objective is called task='stf'; did you mean 'sft'", "task=stf")
    fails("device='tpu' is not one of auto, cuda, cpu", "device=tpu")
    if not torch.cuda.is_available():
        fails("device=cuda, but torch sees no CUDA device", "device=cuda")


def test_chat_templates(fails, workspace, tmp_path):
    fails(r"no chat template .*/nowhere\.jinja", f"chat_template={tmp_path}/nowhere.jinja")
    fails("task=pretrain has no chats", "chat_template=x.jinja", "task=pretrain")
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}")
    fails("chat template", f"chat_template={tmp_path}/bad.jinja")


def test_data(fails, workspace, tmp_path):
    path = tmp_path / "data.jsonl"
    fails(r"no data file matches .*data\.jsonl", f"data={path}")
    path.write_text("")
    fails(r"data\.jsonl is empty", f"data={path}")
    good = workspace.data.read_text().splitlines()[0]
    path.write_text(f'{good}\n{{"messages": [{{"role": "user", "content": "hi"}}]}}\n')
    fails(r"data\.jsonl:2: .*no turn of the role 'assistant'", f"data={path}")
    fails(r"data\.jsonl:2: .*no turn of the role 'assistant'", f"eval_data={path}")
    fails(r"no example of .* has anything to learn within seq_len 4", "seq_len=4")


def test_models(fails, workspace, tmp_path):
    fails("nowhere", f"model={tmp_path}/nowhere")
    config = tmp_path / "config.json"
    tokenizer = f"tokenizer={workspace.model}"
    fails(r"init=.*config\.json is not a config\.json file", "model=", tokenizer, f"init={config}")
    config.write_text(json.dumps({**LLAMA, "model_type": "lama"}))
    fails(r"config\.json: model_type 'lama' is not one of", "model=", tokenizer, f"init={config}")
    small = write_model(tmp_path / "small", vocab_size=30)
    fails(r"the tokenizer gives token \d+, but the model's vocabulary has 30", f"model={small}")


def test_without_arguments_or_with_help_it_explains_itself(capsys, workspace):
    with pytest.raises(SystemExit, match="2"):
        main([])
    printed = capsys.readouterr()
    usage = "torchrun --nproc-per-node 8 -m tigon.train config.yaml"
    assert usage in printed.err and not printed.out
    main(["--help", "lr=fast"])
    assert usage in capsys.readouterr().out
    main([*workspace.settings("x"), "--print-config"])
    assert "lr: 0.003\n" in capsys.readouterr().out
    assert not (workspace.root / "x").exists()
