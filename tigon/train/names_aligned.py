"""What other trainers call the settings of adapters, preferences and distillation."""

ADAPTERS = "lora: {rank: 16, alpha: 32, targets: [q_proj, v_proj]}, as lora.rank=16"
FOUR_BITS = "lora.quantize=nf4, which keeps the frozen base in 4 bits: docs/adapters.md"
PLUS = "parameter_groups: [{match: '*.lora_B.*', lr: 2e-3}], which is LoRA+"
MERGE = "lora.merge=true writes the merged model too; `tigon export RUN DIRECTORY --merge` any time"
BEGIN = "model: what `tigon export ADAPTER DIRECTORY --merge` writes of the adapter and its base"
PLAIN = "nothing to set: A begins random and B at 0"
NO_SAMPLING = "no: completions are in the rows; examples/grpo.py generates them"
REFERENCE = (
    "reference: a model; without it the one that is trained, as it was at the beginning, whose "
    "log-probabilities are computed once"
)

ALIGNED = {
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target_modules": "lora.targets",
    "target_modules": "lora.targets",
    "modules_to_save": "lora.modules_to_save",
    "use_dora": "lora.dora",
    "use_rslora": "lora.rslora",
    "qlora": FOUR_BITS,
    "use_qlora": FOUR_BITS,
    "bnb_4bit_quant_type": FOUR_BITS,
    "use_peft": ADAPTERS,
    "peft": ADAPTERS,
    "alpha": "lora.alpha",
    "apply_lora_to_mlp": "lora.targets: gate_proj, up_proj and down_proj, or all-linear",
    "apply_lora_to_output": "lora.targets: lm_head",
    "dora": "lora.dora",
    "exclude_modules": "lora.targets, which names all that have an adapter",
    "init_lora_weights": PLAIN,
    "peft_init_lora_weights": PLAIN,
    "layers_to_transform": "lora.targets, with patterns such as '*.layers.1.*'",
    "lora_attn_modules": "lora.targets",
    "lora_bias": "no: adapters have no biases",
    "lora_mlp_modules": "lora.targets",
    "lora_model_dir": BEGIN,
    "adapter_name_or_path": BEGIN,
    "adapter_path": BEGIN,
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_plus_lr_ratio": PLUS,
    "loraplus_lr_ratio": PLUS,
    "lora_target_linear": "lora.targets: all-linear",
    "merge_lora": MERGE,
    "peft_use_dora": "lora.dora",
    "quantize_base": FOUR_BITS,
    "r": "lora.rank",
    "rslora": "lora.rslora",
    "target_parameters": "lora.targets, which experts.gate_up_proj and experts.down_proj may be in",
    "task_type": "nothing to set: task says what the adapter's model does",
    "precompute_ref_log_probs": REFERENCE,
    "precompute_ref_batch_size": "micro_batch_size",
    "ref_model": REFERENCE,
    "ref_model_name_or_path": REFERENCE,
    "model_ref": REFERENCE,
    "sync_ref_model": "no: the reference stays what it was",
    "loss_weights": "one loss_type at a time; cpo_alpha weighs the cross-entropy of task=cpo",
    "rpo_alpha": "cpo_alpha, of task=cpo and task=simpo",
    "orpo_alpha": "beta, of task=orpo",
    "gamma": "simpo_gamma",
    "dpo_beta": "beta",
    "pref_beta": "beta",
    "pref_loss": "task: dpo, ipo, apo, cpo, simpo, orpo or kto; loss_type",
    "rl": "task: dpo, ipo, apo, cpo, simpo, orpo, kto or grpo",
    "max_prompt_length": "max_length: the most tokens of a prompt with one answer",
    "truncation_mode": "truncate: sequences are cut at their end, as keep_start does",
    "teacher_model_name_or_path": "teacher",
    "teacher_model": "teacher",
    "kd_temperature": "temperature",
    "kd_alpha": "cross_entropy_weight, which is 1 less the share of the divergence",
    "kd_ce_alpha": "cross_entropy_weight",
    "lmbda": "no: answers are those of the rows, which examples/grpo.py shows how to generate",
    "num_generations": NO_SAMPLING,
    "epsilon_low": "epsilon",
    "cliprange": "epsilon",
    "kl_coef": "beta",
    "disable_dropout": "nothing to set: models have no dropout; lora.dropout is 0 unless set",
    "f_divergence_type": "no: the divergence of dpo is the reverse KL",
    "force_use_ref_model": REFERENCE,
    "kd_ratio": "cross_entropy_weight, which is 1 less the share of the divergence",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "ld_alpha": "no: all tokens of an answer weigh the same",
    "num_iterations": "no: a step learns from its rows once; epochs says how often a run does",
    "ref_adapter_name": REFERENCE,
    "reference_free": "task=cpo or task=simpo, which have no reference",
    "reference_model": REFERENCE,
    "reward_funcs": NO_SAMPLING,
    "rl_beta": "beta",
    "seq_kd": "no: answers are those of the rows; let the teacher write them before",
    "use_vllm": NO_SAMPLING,
    "use_weighting": "no: WPO's weights are not there",
}
LORA = (
    *("lora_alpha", "lora_dropout", "target_modules", "target_parameters", "exclude_modules"),
    *("use_dora", "use_rslora", "layers_to_transform", "init_lora_weights", "task_type"),
    *("lora_bias", "loraplus_lr_ratio"),
)
ALIGNED |= {f"lora.{name}": ALIGNED[name] for name in LORA}
ALIGNED |= {"lora.r": "lora.rank", "lora.bias": ALIGNED["lora_bias"]}
