import re
from typing import get_args

import pytest
import yaml

from tigon.data.formats import REQUIRED_KEYS
from tigon.train.config import CONFLICTS, REQUIRES, Config, Lora, Parallel
from tigon.train.config_file import dump, load, load_aliases, suggest_setting
from tigon.train.launch import help_text
from tigon.train.tasks import TASKS
from tigon.utils.config import ConfigError, field_types

OTHERS, VALUES = load_aliases().names, load_aliases().values
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
    with pytest.raises(ConfigError, match=r"columns=3 and columns\.text contradict"):
        load(path, ["columns=3", "columns.text=a"])


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


def test_help_names_every_setting_with_its_default():
    text = help_text()
    for name, default in (("seq_len", "2048"), ("lr", "1.0e-05"), ("schedule", "cosine")):
        assert re.search(rf"^  {name}: .*{default}$", text, re.MULTILINE)
    assert all(f"  {name}: " in text for name in Config.__dataclass_fields__)


def test_help_names_every_task_format_and_dimension():
    dimensions = Parallel.__dataclass_fields__
    for name, known in (("task", TASKS), ("format", REQUIRED_KEYS), ("parallel", dimensions)):
        said = help_text().partition(f"\n  {name}: ")[2].splitlines()[1]
        assert set(known) <= set(re.findall(r"\w+", said)), said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate=1", "unknown setting 'learning_rate'; here: lr"),
        ("learing_rate=1", "unknown setting 'learing_rate'; if 'learning_rate' is meant, here: lr"),
        ("gradient_accumulation_steps=4", "batch_size: rows of a step over all ranks"),
        ("--num-train-epochs=3", "unknown setting 'num_train_epochs'; here: epochs"),
        ("report_to=wandb", "log_to: tensorboard, wandb"),
        ("sample_prompts=[2 + 2?]", "not valid YAML: line 1: expected ',' .*; quote a text in it"),
        ("lora.rank=0", "lora.rank=0 must be at least 1"),
        ("lora.r=8", "unknown setting 'lora.r'"),
        ("lora=16", "lora=16 is not .*; its settings have its name, as lora.rank=16$"),
        ("lora.targets=q_proj,v_proj", r"a tuple of names, \('q_proj', 'v_proj'\)"),
        ("lora.alpha=0", "alpha is a positive float32 number"),
        ("lora.modules_to_save=norm", "modules_to_save='norm'"),
        ("nonsense_at_all=8", "unknown setting 'nonsense_at_all'; `tigon train --help` lists all"),
        ("train_on_inputs=true", "here: train_on: assistant .* is false, all is true"),
        ("load_best_model_at_end=true", "here: hf_best=true exports the best to run_dir/hf-best"),
        ("dataset.source=a", "unknown setting 'dataset.source'; here: data: files"),
        ("optimizer.lr=1", "unknown setting 'optimizer.lr'; here: lr"),
        ("lr=inf", "lr=inf must be finite"),
        ("lr=fast", "lr='fast' is not a number"),
        ("max_grad_norm=null", "'null' is not a number: clip gradients .*; 0: never"),
        ("parallel={tensor:2}", "unknown setting 'parallel.tensor:2'; .* after it: tensor: 2"),
        ("steps=1.5", "steps='1.5' is not a whole number or null"),
        ("teacher=null", "teacher=null is not text; teacher='' is empty$"),
        ("packing=yes please", "packing='yes please' is not true or false"),
        ("schedule=cosin", "schedule='cosin' is not one of cosine, linear, constant, wsd"),
        ("data=[1, 2]", r"data=.\[1, 2\]. is not text or a group of settings or a list of texts"),
        ("data=[{path: a, wieght: 1}]", r"data\[0\]\.wieght.; did you mean .weight."),
        ("data=[a, {weight: 1}]", r"data\[1\] needs .path.; it has weight"),
        ("data=[{path: a, weight: x}]", r"data\[0\]\.weight=.x. is not a number"),
        ("lr=-1", "lr=-1 must be at least 0"),
        ("batch_size=0", "batch_size=0 must be at least 1"),
        ("micro_batch_size=3", "batch_size=8 must be a multiple of micro_batch_size=3"),
        ("micro_batch_size=9999999", "of seq_len=2048 are 20,479,997,952 tokens in one"),
        ("seq_len=268435457", "seq_len=268435457 must be at most 268435456"),
        ("init=c.json", "exactly one of model .* and init .* there are model=m and init=c.json"),
        ("run_dir=", "run_dir is required"),
        ("seed", "'seed': settings are given as key=value or --key value"),
        ("dtype=float32 --param-dtype bfloat16", "dtype='float32 --param-dtype bfloat16' is not"),
    ],
)
def test_bad_settings_name_key_and_value(override, message):
    with pytest.raises(ValueError, match=message):
        load(None, [*NEEDED, *([override] if isinstance(override, str) else override)])


def test_a_group_without_settings_has_the_defaults():
    assert load(None, NEEDED).lora is None
    assert load(None, [*NEEDED, "lora={}"]).lora == Lora()
    assert load(None, [*NEEDED, "lora.rank=3", "lora.targets=o_proj"]).lora == Lora(
        rank=3, targets=("o_proj",)
    )


def test_group_word_and_settings_contradict(tmp_path):
    for given in (["parallel=auto", "parallel.tensor=2"], ["parallel.tensor=2", "parallel=auto"]):
        said = "parallel='auto' and parallel.tensor=2 contradict each other: give one of them"
        with pytest.raises(ValueError, match=f"^{said}$"):
            load(None, [*NEEDED, *given])
    path = tmp_path / "auto.yaml"
    path.write_text("parallel: auto\n")
    assert load(path, [*NEEDED, "parallel.tensor=2"]).parallel.tensor == 2  # which wins over it
    assert load(path, NEEDED).parallel == "auto"


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "seed", "max_grad_norm"])
def test_numbers_of_too_many_digits_are_named(name):
    with pytest.raises(ValueError, match=f"^{name}={10**22} must be (at most|below) "):
        load(None, [*NEEDED, f"{name}={10**22}"])


def test_aliases_name_settings_that_exist():
    """No name is both; and an answer of one word is a setting."""
    assert not set(OTHERS) & set(Config.__dataclass_fields__)
    for name in Parallel.__dataclass_fields__:
        assert getattr(load(None, [*NEEDED, f"parallel.{name}=2"]).parallel, name) == 2
    words = {text for text in OTHERS.values() if text.replace(".", "").isidentifier()}
    groups = (("lora", Lora), ("parallel", Parallel))
    inside = {f"{group}.{name}" for group, kind in groups for name in kind.__dataclass_fields__}
    assert words <= set(Config.__dataclass_fields__) | inside
    assert not set(OTHERS) & inside


# Settings of transformers, TRL, axolotl and torchtune that have no counterpart, or one that no
# similar name says
FAR = """
accelerator_config auto_find_batch_size average_tokens_across_devices base_model_config
batch_eval_metrics batch_size_val cache_implementation checkpointer.checkpoint_dir
custom_sharded_layers dataloader_in_order dataset.new_system_prompt dataset_keep_in_memory debug
device_map do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay
eval_max_new_tokens eval_on_start eval_sequence_len eval_table_size excess_length_strategy gc_steps
entropy_coef field_messages gpu_memory_limit hub_always_push ignore_data_skip label_names
lisa_n_layers local_rank log_level log_multimodal log_unique_prompts loss lr_div_factor max_memory
min_p min_sample_len model_init_kwargs num_completions_to_print num_generations_eval optimizer.fused
packing_strategy pad_token peft_layer_replication prediction_loss_only project push_dataset_to_hub
remove_unused_columns roles sample_packing_bin_size sapo_temperature_neg save_last_epoch_only
split_thinking strict tokenizer_type top_k train_on_split train_sampling_strategy use_cache
vllm_importance_sampling_cap vllm_model_impl wandb_watch adam_beta3
"""


@pytest.mark.parametrize("name", FAR.split())
def test_distant_names_are_not_suggested(name):
    assert suggest_setting(name, Config.__dataclass_fields__) == "`tigon train --help` lists all"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_samples", "here: take, of an entry"),
        ("test_size", "here: eval_data, files that are held out, or eval_fraction"),
        ("eval_split_ratio", "here: eval_data, files that are held out, or eval_fraction"),
        ("added_tokens", "here: new_tokens"),
        ("tokens", "here: new_tokens"),
        ("dataset.split", "here: split, of an entry"),
        ("dataset.source", "here: data"),
        ("relora", "here: no: "),
        ("sede", "did you mean 'seed'?"),
        ("Batch-Size", "did you mean 'batch_size'?"),
        ("sequnce_len", "if 'sequence_len' is meant, here: seq_len"),
        ("weigth_decay", "did you mean 'weight_decay'?"),
        ("learning_rat", "if 'learning_rate' is meant, here: lr"),
    ],
)
def test_misspelled_and_foreign_names_are_answered(name, expected):
    assert suggest_setting(name, Config.__dataclass_fields__).startswith(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("optimizer=adamw_torch_fused", "another trainer's; here: adamw, which is fused"),
        ("optimizer=paged_adamw_8bit", "here: adamw_8bit, with optimizer_offload=true"),
        ("optimizer=adafactor", "here: none; adamw_bf16 and adamw_8bit have states of few bytes"),
        ("schedule=cosine_with_min_lr", "here: cosine, which falls to min_lr_ratio of lr"),
        ("schedule=constant_with_warmup", "here: constant, with warmup_steps"),
        ("param_dtype=bf16", "here: bfloat16"),
        ("attention=flash_attention_2", "here: auto, flash or fa4"),
        ("sharding=zero2", "here: gradients"),
        ("sharding=FULL_SHARD", "here: full"),
        ("activation_checkpointing=full", "here: true"),
        ("activation_checkpointing=selective", "here: auto, or N for every n-th block"),
    ],
)
def test_values_of_other_trainers_are_answered(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(None, [*NEEDED, given])
    path = tmp_path / "c.yaml"
    path.write_text(given.replace("=", ": "))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_no_value_is_another_trainers_and_ours():
    """And an answer begins with a value of ours, if it names any."""
    kinds = field_types(Config)
    for name, others in VALUES.items():
        kind = kinds[name]
        ours = {v for part in get_args(kind) for v in get_args(part) or (part,)}
        ours |= {"true", "false"} if bool in ours else set()
        assert ours and not ours & set(others)
        for text in others.values():
            assert re.split(r"[,;: ]", text)[0] in {*ours, "none"}, text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("parallel.dp_shard=2", "here: parallel.fsdp"),
        ("parallelism_config.dp_replicate_size=2", "here: parallel.replicate"),
        ("sharding=HYBRID_SHARD", "here: full, with parallel.replicate: groups"),
        ("parallel.tensor_parallel=2", "here: parallel.tensor$"),
        ("ulysses_sequence_parallel_size=2", "here: parallel.context$"),
        ("expert_parallel_degree=2", "here: parallel.expert$"),
        ("parallel.pp=2", "no pipeline parallelism, docs/scale.md says why: give parallel"),
        ("tensor=2", "here: parallel.tensor$"),
        ("parallel={tp: 2}", "unknown setting 'parallel.tp'; here: parallel.tensor"),
        ("parallelism={tp_size: 2}", "here: parallel: {replicate: 1"),
        ("deepspeed=ds.json", "here: no DeepSpeed: FSDP2 shards .* sharding=gradients is ZeRO-2"),
        ("num_processes=2", "here: --nproc N"),
        ("comm.trace_buf_size=2000", "here: TORCH_FR_BUFFER_SIZE"),
        ("activation_checkpoint.memory_budget=0.5", "auto, with memory_budget in GiB rather"),
        ("activation_checkpoint.mode=full", "here: activation_checkpointing"),
        ("parallelism.fsdp_reshard_after_forward=never", "here: sharding: full .* or gradients"),
        ("lora={r: 8}", "unknown setting 'lora.r'; here: lora.rank"),
        ("r=8", "here: lora.rank"),
        ("lora.init_lora_weights=pissa", "PiSSA, OLoRA and LoftQ are not there"),
        ("mixed_precision=fp8", "fp8=true for products"),
        ("kd_ratio=0.5", "here: cross_entropy_weight, which is 1 less"),
    ],
)
def test_settings_of_other_trainers_are_answered(given, message):
    with pytest.raises(ConfigError, match=message):
        load(None, [*NEEDED, given])


def test_names_inside_a_group_of_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("lora:\n  r: 8\n  lora_alpha: 16\n")
    with pytest.raises(ValueError, match=r"2 unknown settings:\n.*lora.rank\n.*lora.alpha"):
        load(tmp_path / "c.yaml")


def test_command_line_replaces_alternatives_of_file(tmp_path):
    (tmp_path / "c.yaml").write_text("run_dir: x\ndata: x\nmodel: x\nepochs: 2\n")
    found = load(tmp_path / "c.yaml", ["steps=4"])
    assert (found.epochs, found.steps) == (None, 4)
    found = load(tmp_path / "c.yaml", ["steps=null", "init=y", "tokenizer=z"])
    assert (found.epochs, found.model, found.init) == (2, "", "y")
    (tmp_path / "c.yaml").write_text("run_dir: x\ndata: x\nmodel: x\nepochs: 2\nsteps: 4\n")
    with pytest.raises(ValueError, match=r"epochs=2 .* steps=4: give one of them"):
        load(tmp_path / "c.yaml")


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
}
UNFULFILLED = {
    "export=true": "export=false",
    "dtype=auto|bfloat16": "dtype=float32",
    "lr>0": "lr=0",
    "lora.merge=true": "lora.merge=false",
}
# What a row also needs, so that no other row refuses it first
CONTEXT = {
    "adamw_lr>0": ["optimizer=muon"],
    "lora.quantize=keep": ["tokenizer=t", "model="],
    "init": ["model="],
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
    assert " needs " in message and message.endswith(reason) and "\n" not in message
    assert all(name in message for name in setting_names(condition, needed))
    assert message != refusal([*given, *arguments(needed)])


@pytest.mark.parametrize("value", ["true", "False"])
def test_push_to_a_truth_value_is_refused(value):
    with pytest.raises(ValueError, match=f"push_to_hub={value} is no repository"):
        load(None, [*NEEDED, f"push_to_hub={value}"])


def test_all_unknown_settings_are_named_at_once():
    with pytest.raises(ValueError, match="3 unknown settings") as error:
        load(None, [*NEEDED, "base_model=m", "num_epochs=2", "val_set_size=0.1"])
    told = str(error.value).splitlines()[1:]
    assert told[:2] == ["  'base_model'; here: model", "  'num_epochs'; here: epochs"]
    assert told[2].startswith("  'val_set_size'; here: eval_data")


def test_data_in_place_of_a_config(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match=r"no YAML file of settings: give data as data=.*chats"):
        load(path)


def test_null_of_a_text_in_a_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("teacher:\n")
    with pytest.raises(ValueError, match="teacher=null is not text; teacher='' is empty"):
        load(file, NEEDED)
    file.write_text("teacher: 'null'\n")  # in quotes it is a text
    assert load(file, NEEDED).teacher == "null"


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config file .*none\.yaml"):
        load(tmp_path / "none.yaml")
    path = tmp_path / "c.yaml"
    for text, message in (
        ("lr: [", r"c\.yaml is not valid YAML"),
        ("- lr", r"c\.yaml: needs `key: value` lines, not a list"),
        ("lr: fast", r"c\.yaml: lr='fast' is not a number"),
        ("sede: 1", r"c\.yaml: unknown setting 'sede'; did you mean 'seed'"),
        ("seed: 1\nlr: 1\nseed: 2", r"c\.yaml: line 3: seed is also set in line 1"),
        ("seed: true", r"c\.yaml: seed=True is not a whole number"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(path)
