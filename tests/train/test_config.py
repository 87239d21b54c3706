import os
import re
from typing import get_args

import pytest
import yaml

from tigon.kernels.attention import backends
from tigon.settings.command import help_text
from tigon.settings.config import Backend, Config, Lora, Parallel
from tigon.settings.data import REQUIRED_KEYS, TASK_ROWS, match_paths
from tigon.settings.load import ALIASES, dump, load, load_aliases
from tigon.settings.rules import CONFLICTS, REQUIRES
from tigon.train.tasks import TASKS
from tigon.utils.config import field_types
from tigon.utils.yaml import parse_yaml

OTHERS, VALUES = load_aliases()
NEEDED = ["run_dir=runs/a", "model=m", "data=a.jsonl"]


def test_file_and_both_forms_of_override(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("run_dir: runs/a\nmodel: m\ndata: [a.jsonl, b.jsonl]\nlr: 2e-5\nseed: 1\n")
    config = load(path, ["seed=2", "--batch-size", "16", "--packing=false", "eval_data=e.jsonl"])
    assert config.data == ("a.jsonl", "b.jsonl")
    assert config.lr == 2e-5  # which YAML reads as text
    assert (config.seed, config.batch_size, config.packing) == (2, 16, False)
    assert config.eval_data == ("e.jsonl",)
    assert load(None, [*NEEDED, "run_dir=2024", "data=[x, y]", "steps=null"]) == Config(
        run_dir="2024", model="m", data=("x", "y")
    )


def test_entries_of_a_dictionary(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: m\ndata: a.jsonl\nrun_dir: r\n"
        "chat_template_kwargs: {date_string: 26 Jul 2024, enable_thinking: true}\n"
    )
    dotted = "chat_template_kwargs.enable_thinking=false"
    config = load(path, [dotted, "columns.messages=dialog"])
    both = {"date_string": "26 Jul 2024", "enable_thinking": False}
    assert (config.chat_template_kwargs, config.columns) == (both, {"messages": "dialog"})
    config = load(path, ["chat_template_kwargs={a: 1}", "--chat-template-kwargs.b", "x"])
    assert config.chat_template_kwargs == {"a": 1, "b": "x"}
    assert load(path, ["chat_template_kwargs=null"]).chat_template_kwargs is None
    assert load(path, ["chat_template_kwargs=null", dotted]).chat_template_kwargs == {
        "enable_thinking": False
    }
    assert load(path, ["columns.text=a: b: c"]).columns == {"text": "a: b: c"}


def test_home_directories(tmp_path, monkeypatch):
    """Shells replace them in a word of their own alone, and nothing does in a file."""
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "run.yaml"
    path.write_text("run_dir: ~/runs/a\nmodel: m\ndata: a.jsonl\nresume: ~/runs/b\n")
    config = load(path, [])
    assert (config.run_dir, config.resume) == ("/home/me/runs/a", "/home/me/runs/b")
    assert load(path, ["resume=auto", "run_dir=./~"]).run_dir == "./~"
    with pytest.raises(ValueError, match="~nobody-here/a: no home directory is known for ~nobody"):
        load(path, ["run_dir=~nobody-here/a"])


def test_what_is_printed_can_be_read_back(tmp_path):
    config = load(None, [*NEEDED, "resume=auto", "lr=1e-7", "steps=3", "separator=\n\n"])
    path = tmp_path / "c.yaml"
    path.write_text(dump(config))
    assert load(path) == config
    assert list(yaml.safe_load(dump(config))) == list(Config.__dataclass_fields__)


def test_choices_are_those_of_the_packages_that_import_torch():
    assert get_args(Backend) == get_args(backends.Backend)
    assert TASK_ROWS.keys() == TASKS.keys()


def test_help_names_settings_defaults_and_values():
    text = help_text()
    for name, default in (("seq_len", "2048"), ("lr", "1.0e-05"), ("schedule", "cosine")):
        assert re.search(rf"^  {name}: .*{default}$", text, re.MULTILINE)
    assert all(f"  {name}: " in text for name in Config.__dataclass_fields__)
    dimensions = Parallel.__dataclass_fields__
    for name, known in (("task", TASKS), ("format", REQUIRED_KEYS), ("parallel", dimensions)):
        help = text.partition(f"\n  {name}: ")[2].splitlines()[1]
        assert set(known) <= set(re.findall(r"\w+", help)), help


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Names: ours misspelled, another trainer's, inside a group, and of nobody
        ("learning_rate=1", "unknown setting 'learning_rate'; here: lr"),
        ("learing_rate=1", "'learing_rate'; if 'learning_rate' is meant, here: lr"),
        ("weigth_decay=1", "did you mean 'weight_decay'"),
        ("--num-train-epochs=3", "unknown setting 'num_train_epochs'; here: epochs"),
        ("dataset.source=a", "unknown setting 'dataset.source'; here: data: files"),
        ("optimizer.lr=1", "unknown setting 'optimizer.lr'; here: lr"),
        ("compile.enable=true", "unknown setting 'compile.enable'; here: nothing to set"),
        ("quantize=nf4", "unknown setting 'quantize'; here: lora.quantize"),
        ("lora.r=8", "unknown setting 'lora.r'; here: lora.rank"),
        ("lora={r: 8}", "unknown setting 'lora.r'; here: lora.rank"),
        ("parallel={tp: 2}", "unknown setting 'parallel.tp'; here: parallel.tensor"),
        ("parallel={tensor:2}", "unknown setting 'parallel.tensor:2'; .* after it: tensor: 2"),
        ("data=[{path: a, wieght: 1}]", r"data\[0\]\.wieght.; did you mean .weight."),
        ("data=[{path: a, type: b}]", r"unknown setting 'data\[0\].type'; here: .* keys tell its"),
        ("eval_data={path: a, subset: b}", r"'eval_data\[0\].subset'; here: config, of a data set"),
        (
            "data=[{path: a, type: b}, {path: c, shards: 3}]",
            r"2 unknown .*\n.*\n.*data\[1\].shards",
        ),
        ("nonsense_at_all=8", "unknown setting 'nonsense_at_all'; `tigon train --help` lists all"),
        ("device_map=auto", "unknown setting 'device_map'; `tigon train --help` lists all"),
        # Values of another trainer
        ("optimizer=adamw_torch_fused", "another trainer's; here: adamw, which is fused"),
        ("sharding=zero2", "here: gradients"),
        ("activation_checkpointing=moe", "=.moe. is not true or false or .* of auto, experts"),
        # Values of another kind
        ("sample_prompts=[2 + 2?]", "not valid YAML: line 1: expected ',' .*; quote a text in it"),
        ("lora=16", "lora=16 is not .*; its settings have its name, as lora.rank=16$"),
        ("lora.targets=q_proj,v_proj", r"a tuple of names, \('q_proj', 'v_proj'\)"),
        ("lora.alpha=0", "alpha is a positive float32 number"),
        ("lora.modules_to_save=norm", "modules_to_save='norm'"),
        ("lr=fast", "lr='fast' is not a number"),
        ("max_grad_norm=null", "'null' is not a number: clip gradients .*; 0: never"),
        ("steps=1.5", "steps='1.5' is not a whole number or null"),
        ("teacher=null", "teacher=null is not text; teacher='' is empty$"),
        ("packing=yes please", "packing='yes please' is not true or false"),
        ("schedule=cosin", "schedule='cosin' is not one of cosine, linear, constant, wsd"),
        ("data=[1, 2]", r"data=.\[1, 2\]. is not text or a group of settings or a list of texts"),
        ("eval_data=", r"eval_data='' is not text .*; eval_data=\[\] is an empty list$"),
        ("loss=x", "unknown setting 'loss'; here: nothing to set: task says which loss"),
        ("data=[a, {weight: 1}]", r"data\[1\] needs .path.; it has weight"),
        ("push_to_hub=False", "push_to_hub=False is no repository"),
        # Values out of range
        ("lora.rank=0", "lora.rank=0 must be at least 1"),
        ("lr=inf", "lr=inf must be finite"),
        ("seq_len=268435457", "seq_len=268435457 must be at most 268435456"),
        (f"seed={10**22}", f"^seed={10**22} must be at most "),
        (f"max_grad_norm={10**22}", f"^max_grad_norm={10**22} must be below "),
        (f"z_loss={10**19}", f"^z_loss={10**19} must be below "),
        ("epochs=inf", "epochs=inf must be finite"),
        ("beta2=99", "beta2=99 must be below 1"),
        ("min_lr_ratio=10", "min_lr_ratio=10 must be at most 1"),
        ("micro_batch_size=3", "batch_size=8 must be a multiple of micro_batch_size=3"),
        ("micro_batch_size=9999999", "of seq_len=2048 are more than 268435456"),
        # Settings that are missing or too many
        ("init=c.json", "model=m is to fine-tune, init=c.json to train from scratch: leave one"),
        ("model=", "model is required: a directory or hub repository .*; or init, a config.json"),
        ("run_dir=", "run_dir is required"),
        ("seed", "'seed': settings are given as key=value or --key value, after the config file"),
        ("columns=3 columns.text=a", r"columns=3 and columns\.text contradict"),
        ("parallel=auto parallel.tensor=2", "parallel='auto' and parallel.tensor=2 contradict"),
        ("parallel.tensor=2 parallel=auto", "parallel='auto' and parallel.tensor=2 contradict"),
        ("base_model=m num_epochs=2", "2 unknown settings:\n  'base_model'.*\n  'num_epochs'"),
    ],
)
def test_bad_settings_name_key_and_value(override, message):
    given = override.split() if override.count("=") > 1 and "{" not in override else [override]
    with pytest.raises(ValueError, match=message):
        load(None, [*NEEDED, *given])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: [", r"c\.yaml is not valid YAML"),
        ("- lr", r"c\.yaml: needs `key: value` lines, not a list"),
        ("lr: fast", r"c\.yaml: lr='fast' is not a number"),
        ("sede: 1", r"c\.yaml: unknown setting 'sede'; did you mean 'seed'"),
        ("seed: 1\nlr: 1\nseed: 2", r"c\.yaml: line 3: seed is also set in line 1"),
        ("seed: true", r"c\.yaml: seed=True is not a whole number"),
        ("teacher:", "teacher=null is not text; teacher='' is empty"),
        ("sharding: FULL_SHARD", "here: full"),
        ("lora:\n  r: 8\n  lora_alpha: 16", r"2 unknown settings:\n.*lora.rank\n.*lora.alpha"),
        ("training: {steps: 3}", r"setting 'training\.steps'; here: steps$"),
        ("checkpoint: {enable: true}", "'checkpoint.enable'; here: save_every$"),
        ("optimizer: {_component_: A, lr: 1}", r": optimizer\n.*'optimizer\.lr'; here: lr$"),
        ("special_tokens: {pad_token: x}", r"'special_tokens\.pad_token'; here: new_tokens"),
        ("run_dir: x\ndata: x\nmodel: x\nepochs: 2\nsteps: 4", r"epochs=2 .* steps=4: give one"),
    ],
)
def test_bad_files_are_named(text, message, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_files_that_are_no_config_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config file .*none\.yaml"):
        load(tmp_path / "none.yaml")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"no YAML file of settings: give data as data=.*chats"):
        load(tmp_path / "chats.jsonl")
    (tmp_path / "titan.toml").write_text("[training]\nsteps = 3\n")
    with pytest.raises(ValueError, match=r"titan\.toml: settings are YAML, not TOML"):
        load(tmp_path / "titan.toml")
    (tmp_path / "chats.json").write_text(f"[{' ' * 2**20}]")  # which takes YAML minutes
    with pytest.raises(ValueError, match=r"has 1,048,578 bytes, .*: if these are data, give data="):
        load(tmp_path / "chats.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is not a regular file: settings are read from"):
        load(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe is a pipe or a device: .*give a file"):
        match_paths(str(tmp_path / "pipe"))


def test_a_group_without_settings_has_the_defaults():
    assert load(None, NEEDED).lora is None
    assert load(None, [*NEEDED, "lora={}"]).lora == Lora()
    assert load(None, [*NEEDED, "lora.rank=3", "lora.targets=o_proj"]).lora == Lora(
        rank=3, targets=("o_proj",)
    )


def test_command_line_group_replaces_file_word(tmp_path):
    path = tmp_path / "auto.yaml"
    path.write_text("parallel: auto\n")
    assert load(path, [*NEEDED, "parallel.tensor=2"]).parallel.tensor == 2  # which wins over it
    assert load(path, NEEDED).parallel == "auto"


def test_aliases_name_settings_that_exist():
    """No name is both, or stands twice; and an answer of one word is a setting."""
    assert parse_yaml(ALIASES.read_bytes(), ALIASES)  # which raises for a key given twice
    assert not set(OTHERS) & set(Config.__dataclass_fields__)
    for name in Parallel.__dataclass_fields__:
        assert getattr(load(None, [*NEEDED, f"parallel.{name}=2"]).parallel, name) == 2
    words = {text for text in OTHERS.values() if text.replace(".", "").isidentifier()}
    groups = (("lora", Lora), ("parallel", Parallel))
    inside = {f"{group}.{name}" for group, kind in groups for name in kind.__dataclass_fields__}
    assert words <= set(Config.__dataclass_fields__) | inside
    assert not set(OTHERS) & inside


def test_no_value_is_another_trainers_and_ours():
    """And an answer begins with a value of ours, if it names any."""
    kinds = field_types(Config)
    for name, others in VALUES.items():
        kind = kinds[name]
        ours = {v for part in get_args(kind) for v in get_args(part) or (part,)}
        ours |= {"true", "false"} if bool in ours else set()
        ours |= set(TASKS) if name == "task" else set()
        assert ours and not ours & set(others)
        for text in others.values():
            assert re.split(r"[,;: ]", text)[0] in {*ours, "none"}, text


def test_command_line_replaces_alternatives_of_file(tmp_path):
    (tmp_path / "c.yaml").write_text("run_dir: x\ndata: x\nmodel: x\nepochs: 2\neval_data: e\n")
    found = load(tmp_path / "c.yaml", ["steps=4", "eval_fraction=0.1"])
    assert (found.epochs, found.steps) == (None, 4)
    assert (found.eval_fraction, found.eval_data) == (0.1, ())
    found = load(tmp_path / "c.yaml", ["steps=null", "init=y", "tokenizer=z"])
    assert (found.epochs, found.model, found.init) == (2, "", "y")
    assert load(tmp_path / "c.yaml", ["eval_fraction=0"]).eval_data == ("e",)  # which is none


# A value for each condition of the tables that says none, true aside
SAMPLES = {
    **{"epochs": "2", "steps": "3", "eval_fraction": "0.1", "eval_data": "e.jsonl"},
    **{"init": "c.json", "tokenizer": "t", "lora": "{}", "lora.quantize": "nf4"},
    **{"parallel.replicate>1": "2", "parallel.tensor>1": "2", "parallel.expert>1": "2"},
    **{"ema_decay": "0.9", "spike_sigma>0": "3", "memory_budget": "8", "fp8_except": "o_proj"},
    **{"keep_best": "1", "sample_prompts": "hello", "patience": "2", "eval_every": "5"},
    **{"push_to_hub": "a/b", "momentum": "0.9", "momentum>0": "0.9", "nesterov": "false"},
    **{"ns_steps": "6", "adjust_lr_fn": "original", "adamw_lr": "1", "adamw_lr>0": "1"},
    **{"lr>0": "1", "decay_steps": "9", "decay_type": "sqrt"},
    **{"logits_to_keep": "4", "eval_logits_to_keep>0": "4", "max_completion_length": "9"},
    **{"label_smoothing": "0.1", "z_loss": "0.1", "cross_entropy_weight>0": "0.1"},
    **{"reference": "m", "beta>0": "0.1"},
}
UNFULFILLED = {
    "export=true": "export=false",
    "dtype=auto|bfloat16": "dtype=float32",
    "lr>0": "lr=0",
    "lora.merge=true": "lora.merge=false",
    "model": "model=",
}
# What a row also needs, so that no other row refuses it first
CONTEXT = {
    "adamw_lr>0": ["optimizer=muon"],
    "lora.quantize=keep": ["tokenizer=t", "model="],
    "init": ["model="],
    "revision": ["init=c.json", "tokenizer=t"],
    "optimizer_in_backward": ["max_grad_norm=0"],
    "patience": ["eval_every=5", "eval_data=e.jsonl"],
    "push_to_hub & lora": ["lora={}"],
}


def arguments(condition: str) -> list[str]:
    """Command-line settings that fulfil a condition of CONFLICTS or REQUIRES."""
    terms = condition.split(" or ")[0].split(" & ")
    return [
        term.split("|")[0] if "=" in term else f"{term.split('>')[0]}={SAMPLES.get(term, 'true')}"
        for term in terms
    ]


def setting_names(*conditions: str) -> list[str]:
    return [re.match(r"[\w.]+", term)[0] for c in conditions for term in re.split(" & | or ", c)]


def refusal(given: list[str]) -> str:
    """The message that these settings get, empty if they are accepted."""
    try:
        load(None, [*NEEDED, *given])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("first", "second", "advice"), CONFLICTS, ids=lambda text: text[:24])
def test_conflicting_settings_are_named(first, second, advice):
    context = CONTEXT.get(first, [])
    message = refusal([*context, *arguments(first), *arguments(second)])
    assert message.endswith(advice) and "\n" not in message
    assert all(name in message for name in setting_names(first, second))
    for single in (first, second):  # each of the two is fine without the other
        assert advice not in refusal([*context, *arguments(single)])


@pytest.mark.parametrize(("condition", "needed", "reason"), REQUIRES, ids=lambda text: text[:24])
def test_settings_that_need_another_name_it(condition, needed, reason):
    given = [*CONTEXT.get(condition, []), *arguments(condition)]
    given = [text for text in given if text.partition("=")[0] not in setting_names(needed)]
    unfulfilled = UNFULFILLED.get(needed)
    message = refusal([*given, unfulfilled] if unfulfilled else given)
    verb = "need" if " & " in condition else "needs"
    assert f" {verb} " in message and message.endswith(reason) and "\n" not in message
    assert "not none" not in message  # which is no value that a user has given
    assert all(name in message for name in setting_names(condition, needed))
    assert message != refusal([*given, *arguments(needed)])
