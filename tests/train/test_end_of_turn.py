"""What ends the assistant's turns is learned, and generation by the exported model stops there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tests.small import CHATML
from tigon.models import MODELS
from tigon.tokenizer import Tokenizer
from tigon.train import main, pack
from tigon.train.model import add_stop_tokens

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
EOS = PLAIN.replace("\n{%", "{{ eos_token if m.role == 'assistant' }}\n{%")
PROMPT = "{% if add_generation_prompt %}assistant: {% endif %}"
UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
UNKNOWN = CHATML.replace("<|im_end|>", "<|end of turn|>")


@pytest.fixture
def base(workspace: Any, tmp_path: Path) -> Path:
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


def test_a_base_model_learns_to_stop(workspace: Any, base: Path, tmp_path: Path) -> None:
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
def test_a_template_that_would_never_end_is_refused(
    workspace: Any, base: Path, tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        train(workspace, tmp_path / "run", base, template)
    assert not (tmp_path / "run").exists()


def test_a_model_that_stops_already_stays_as_it_is(
    workspace: Any, base: Path, tmp_path: Path
) -> None:
    exported = train(workspace, tmp_path / "run", base, EOS + PROMPT, steps=1)
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text()) == json.loads((base / name).read_text())
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == 0


def test_the_tokenizers_eos_stays_where_the_template_writes_it(base: Path) -> None:
    for template, expected in ((CHATML + "{{ eos_token }}", 0), (CHATML, 2)):
        tokenizer = Tokenizer.from_pretrained(base)
        tokenizer.chat_template = template
        model = MODELS["llama"].from_pretrained(base)
        model.generation_config = {}
        add_stop_tokens(model, tokenizer, {2})
        assert model.config.eos_token_id == [0, 2] and model.generation_config == {}
        assert tokenizer.eos_token_id == expected


def test_seq_len_beyond_the_models_context(
    workspace: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="seq_len=513 is more than the model's context of 512 tok"):
        main(workspace.settings("x", run_dir=tmp_path / "run", seq_len=513))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="seq_len=513 is more than the model's context of 512 tok"):
        pack([f"model={workspace.model}", f"data={workspace.data}", "seq_len=513"])
    assert capsys.readouterr().out == ""  # before the data are made, which may take long
