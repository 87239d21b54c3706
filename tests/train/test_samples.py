"""Texts that the model in training generates at evaluations."""

import itertools
import json
import re
import shutil

import pytest
import torch

import tigon
from tests.train.layouts import assert_same_metrics
from tigon.train import logging, main, trainer
from tigon.train.logging import read_metrics

PROMPTS = ["the model", "who asked it back"]
BITS = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
SETTINGS = {"steps": 4, "save_every": 2, "eval_every": 2, "sample_tokens": 9}


def samples(workspace, run):
    return read_metrics(workspace.root / run / "samples.jsonl")


@pytest.fixture(scope="module")
def with_and_without(workspace):
    """Of two runs, the second writes samples; the settings of that one."""
    settings = {**SETTINGS, "eval_data": workspace.held_out, "export": "true"}
    main(workspace.settings("sampleless", **settings))
    settings["sample_prompts"] = json.dumps(PROMPTS)
    main(workspace.settings("sampled", **settings))
    return settings


def test_the_run_is_the_same_bits(workspace, with_and_without):
    assert_same_metrics(workspace, "sampleless", "sampled", *BITS, rel=0)
    assert len(workspace.metrics("sampled", "eval_loss")) == 3
    assert not (workspace.root / "sampleless/samples.jsonl").exists()


def test_they_are_what_the_model_says(workspace, with_and_without):
    """At each evaluation and to each prompt; the last ones as the exported model says them."""
    rows = samples(workspace, "sampled")
    assert [(row["step"], row["prompt"]) for row in rows] == [
        (s, p) for s in (0, 2, 4) for p in PROMPTS
    ]
    exported = workspace.root / "sampled/hf"
    end = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    for source, step in ((workspace.model, 0), (exported, 4)):
        model = tigon.from_pretrained(source).eval()
        tokenizer = tigon.Tokenizer.from_pretrained(source)
        for row in rows:
            if row["step"] == step:
                said = [{"role": "user", "content": row["prompt"]}]
                ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)
                made = model.generate(torch.tensor([ids]), max_new_tokens=9, eos_token_id=None)
                written = [*itertools.takewhile(lambda i: i != end, made[0, len(ids) :].tolist())]
                text = tokenizer.decode(written)
                assert row["text"] == text


def test_once_each_over_a_kill(workspace, with_and_without, monkeypatch, capsys):
    """Between the samples and the row of the evaluation that they belong to."""
    line = logging._line

    def killed(row):
        if row["step"] == 2 and "eval_loss" in row:
            raise KeyboardInterrupt
        return line(row)

    monkeypatch.setattr(logging, "_line", killed)
    settings = workspace.settings("resampled", **with_and_without)
    with pytest.raises(KeyboardInterrupt):
        main(settings)
    assert [row["step"] for row in samples(workspace, "resampled")] == [0, 0, 2, 2]
    monkeypatch.setattr(logging, "_line", line)
    main([*settings, "resume=auto"])  # there is no checkpoint yet: from the beginning
    assert samples(workspace, "resampled") == samples(workspace, "sampled")
    shutil.rmtree(workspace.checkpoint("resampled", 4))
    main([*settings, "resume=auto"])
    assert samples(workspace, "resampled") == samples(workspace, "sampled")
    shown = capsys.readouterr().out
    assert re.search(r'step 4/4  eval loss .*\n  "the model" -> "', shown)


def test_prompts_of_a_file(workspace, monkeypatch, tmp_path):
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "few"}]
    file.write_text(json.dumps({"messages": turns}) + '\n\n{"prompt": "back\u2028é"}\n')
    settings = {"steps": 1, "eval_data": workspace.held_out, "sample_prompts": file}
    sample, seen = trainer.generate, []

    def watched(model, prompts, *rest):
        before = torch.get_rng_state()
        rows = sample(model, prompts, *rest)
        assert torch.equal(before, torch.get_rng_state()) and model.training
        seen.append(prompts)
        return rows

    monkeypatch.setattr(trainer, "generate", watched)
    main(workspace.settings("filed", **settings, sample_tokens=3))
    assert [row["prompt"] for row in samples(workspace, "filed")] == ["user: the", "back\u2028é"]
    assert "é" in (workspace.root / "filed/samples.jsonl").read_text(encoding="utf-8")
    text = {"task": "pretrain", "data": workspace.root / "text.txt"}
    text["data"].write_text("the model reads some of these words")
    text["eval_data"] = text["data"]
    main(workspace.settings("raw", **{**settings, **text, "sample_prompts": "the model"}))
    tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)
    assert seen[-1][0].ids == tokenizer.encode("the model")


def test_bad_prompts_are_named_before_the_first_step(workspace, tmp_path):
    file = tmp_path / "prompts.jsonl"
    for text, message in (
        ('{"text": "a"}\n', r'prompts.jsonl:1: a prompt has "prompt", a text, or "messages"'),
        ('{"prompt": "a"}\n[', "prompts.jsonl:2: not valid JSON"),
        ('{"prompt": "a"}\n' * 65, "sample_prompts has 65 prompts: give at most 64"),
        (json.dumps({"prompt": "back " * 600}), "a prompt of .* the model reads 512 at most"),
        ('{"messages": ["a"]}', "prompts.jsonl:1: a message is an object with role and content"),
        ("[" * 100_000, "prompts.jsonl:1: not valid JSON"),
        (" \n", "prompts.jsonl has no prompts"),
    ):
        file.write_text(text)
        settings = {"eval_data": workspace.held_out, "sample_prompts": file}
        with pytest.raises(SystemExit, match=message):
            main(workspace.settings("unsampled", **settings))
    settings = {"eval_data": workspace.held_out, "sample_prompts": "none.jsonl"}
    with pytest.raises(SystemExit, match="there is no such file"):
        main([*workspace.settings("x", **settings), "--dry-run"])
    file.write_text("[")
    with pytest.raises(SystemExit, match="there is no such file"):  # before data are tokenized
        main(workspace.settings("x", **settings, data=file))
