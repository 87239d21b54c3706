"""What the settings of other trainers are called here; `values` has their values."""

from collections.abc import Iterable

from tigon.train.names_aligned import ADAPTERS, ALIGNED, FOUR_BITS
from tigon.train.names_parallel import PARALLEL, SHARDING
from tigon.utils.config import find_misspelled

EPOCHS_OR_STEPS = "steps, or epochs"
ROWS = "batch_size: rows of a step over all ranks, of which each takes micro_batch_size at a time"
SINKS = "log_to: tensorboard, wandb; metrics.jsonl is always written"
WANDB = "log_to=wandb; W&B's own variables say the rest, as WANDB_PROJECT, _ENTITY and _NAME"
DTYPE = "dtype=bfloat16, which auto takes on a GPU; weights stay in param_dtype"
EIGHT_BITS = "fp8=true, whose scales are of rows"
BEST = "hf_best=true exports the best to run_dir/hf-best; keep_best keeps its checkpoint"
LEARNED = "train_on: assistant (the default), all_turns, last or all"
AHEAD = "nothing to set: a thread makes the next batches ahead"
SHARE = "warmup_steps: below 1 it is a share of all steps"
GROUPS = "parameter_groups: [{match: '*.mlp.*', lr: 2e-5, weight_decay: 0.0}]"
FREEZE = "parameter_groups: [{match: '*.layers.0.*', freeze: true}]"
OPTIMIZER = (
    "optimizer: adamw (adamw_torch_fused), adamw_bf16, adamw_8bit (adamw_bnb_8bit, "
    "adamw_torch_8bit), muon or sgd; optimizer_offload=true in place of paged ones"
)
STATES = "optimizer: adamw_bf16 has states of bfloat16, adamw_8bit of 8 bits"
PURE = "param_dtype=bfloat16"
OFFLOAD = "optimizer_offload=true keeps optimizer states in host memory; weights stay on the GPU"
AVERAGE = "ema_decay, such as 0.999"
TAKE = "take, of an entry of data: {path: chats.jsonl, take: 1000}"
HELD_OUT = "eval_data, files that are held out, or eval_fraction, such as 0.05, of the rows of data"
NEW_TOKENS = "new_tokens: [...], which embedding and head get rows for"
SHUFFLED = "nothing to set: training data is shuffled, by seed"
FUSED = "nothing to set: the kernels are fused already"
NO_NOISE = "no noise is added to embeddings"
END = "nothing to set: what ends the template's turns is learned, and exported as eos"

# Keys by which other trainers' configs choose the class of a group, as in optimizer._component_
CHOICES = ("_component_", "_target_", "mode", "name", "path", "source", "type")

# Of transformers and TRL, torchtune, axolotl, torchtitan, LLaMA-Factory and litgpt
OTHERS = {
    **PARALLEL,
    "fsdp": SHARDING,  # not within parallel, which has an fsdp of its own
    "adapter": ADAPTERS,
    "tokens": "new_tokens",
    "add_special_tokens": "new_tokens",
    "new_special_tokens": "new_tokens",
    "resize_vocab": "new_tokens, which resizes the model where it has to",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
    "assistant_only_loss": LEARNED,
    "attn_implementation": "attention",
    "attention_backend": "attention",
    "attn_type": "attention",
    "base_model": "model",
    "bf16": DTYPE,
    "fp16": DTYPE,
    "checkpoint": "model, to start from; resume, to go on from one",
    "checkpointing_steps": "save_every",
    "chat_template_path": "chat_template",
    "chat_template_jinja": "chat_template, which takes a file",
    "completion_only_loss": LEARNED,
    "dataset": "data: files or globs",
    "dataset.split": "split, of an entry of data: {path: hf://owner/name, split: train}",
    "dataset.column_map": "columns: {messages: NAME}",
    "dataset_val": "eval_data",
    **dict.fromkeys(("max_samples", "max_train_samples", "max_eval_samples"), TAKE),
    "dataset_name": "data: files or globs",
    "dataset_path": "data: files or globs",
    "datasets": "data: files or globs",
    "data_path": "data: files or globs",
    "data_seed": "seed",
    "early_stopping_patience": "patience",
    "enable_fp8_training": "fp8",
    "enable_float8": "fp8",
    "float8": EIGHT_BITS,
    "filter_fqns": "fp8_except, which takes shell patterns",
    "fp8_recipe": EIGHT_BITS,
    "fp8_recipe_name": EIGHT_BITS,
    "mixed_precision": f"{DTYPE}; fp8=true for products of 8-bit floats",
    "eval_dataset": "eval_data",
    "eval_steps": "eval_every",
    "run_val_every_n_steps": "eval_every",
    "eval_strategy": "eval_every: steps between evaluations",
    "evaluation_strategy": "eval_every: steps between evaluations",
    "evals_per_epoch": "eval_every: steps between evaluations",
    **dict.fromkeys(("sdp_attention", "xformers_attention"), "attention"),
    "flash_attention": "attention: auto takes the fastest backend that is there",
    "full_determinism": "deterministic",
    "global_batch_size": "batch_size",
    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_accumulation": f"{ROWS}; steps accumulate what does not fit at once",
    "gradient_accumulation_steps": f"{ROWS}; steps accumulate what does not fit at once",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing: true, or N for every n-th block",
    "activation_checkpoint": "activation_checkpointing",
    "activation_checkpointing_kwargs": "activation_checkpointing: true, or N for every n-th block",
    "selective_ac_option": "activation_checkpointing: N recomputes every n-th block",
    "activation_checkpoint.memory_budget": (
        "activation_checkpointing=auto, with memory_budget in GiB rather than as a share"
    ),
    "enable_activation_offloading": "activation_offload",
    "activation_offloading": "activation_offload",
    "cpu_offload_activations": "activation_offload",
    "enable_activation_checkpointing": "activation_checkpointing",
    "hub_model_id": "push_to_hub",
    "hub_private_repo": "push_private",
    "hub_revision": "push_to_hub pushes to main; `tigon push --revision` to a branch",
    "hub_strategy": "push_to_hub pushes once, when the run is done",
    "hub_token": "nothing to set, as settings are saved: HF_TOKEN or `hf auth login`",
    "label_smoothing_factor": "label_smoothing",
    "learning_rate": "lr",
    "load_best_model_at_end": BEST,
    "load_in_4bit": FOUR_BITS,
    "load_in_8bit": "lora.quantize: nf4 has 4 bits; keep leaves an fp8 checkpoint its 8",
    "local_batch_size": ROWS,
    "logging_steps": "log_every",
    "logging_strategy": "log_every: steps between lines",
    "log_every_n_steps": "log_every",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_epochs": "epochs",
    "max_seq_len": "seq_len",
    "max_seq_length": "seq_len",
    "model_max_length": "seq_len",
    "block_size": "seq_len",
    "cutoff_len": "seq_len",
    "sequence_len": "seq_len",
    "max_steps": "steps",
    "max_steps_per_epoch": EPOCHS_OR_STEPS,
    "micro_batch": "micro_batch_size",
    "min_lr": "min_lr_ratio, a share of lr",
    "model_name": "model",
    "model_name_or_path": "model",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "optim": OPTIMIZER,
    "optimizer_type": OPTIMIZER,
    "optimizer_name": OPTIMIZER,
    "exp_avg_dtype": STATES,
    "exp_avg_sq_dtype": STATES,
    "bf16_stochastic_round": "stochastic_rounding",
    "stochastic_round": "stochastic_rounding",
    "pure_bf16": PURE,
    "full_bf16": PURE,
    "optimizer_cpu_offload": OFFLOAD,
    "offload_optimizer": OFFLOAD,
    "optimizer_in_bwd": "optimizer_in_backward",
    "cpu_offload": OFFLOAD,
    "fsdp_cpu_offload": OFFLOAD,
    "freeze": FREEZE,
    "frozen_parameters": FREEZE,
    "accumulate_allreduce_grads_in_fp32": (
        "accumulate_fp32; with sharding=full, sums over ranks are in float32 anyway"
    ),
    "ema": AVERAGE,
    "use_ema": AVERAGE,
    "ema_beta": AVERAGE,
    "optim_args": "momentum, nesterov, ns_steps, adjust_lr_fn, adamw_lr",
    "muon_lr": "lr; adamw_lr is that of what muon leaves to AdamW",
    "muon_momentum": "momentum",
    "newton_schulz_steps": "ns_steps",
    "lr_groups": GROUPS,
    "param_groups": GROUPS,
    "optim_target_modules": GROUPS,
    "embedding_lr": GROUPS,
    "embedding_lr_scale": GROUPS,
    "no_decay_params": GROUPS,
    "unfrozen_parameters": FREEZE,
    "freeze_layers": FREEZE,
    "freeze_trainable_layers": FREEZE,
    "trainable_modules": FREEZE,
    "out_dir": "run_dir",
    "output_dir": "run_dir",
    "overwrite_output_dir": "a run never overwrites another: choose another run_dir",
    "packed": "packing",
    "sample_packing": "packing",
    "per_device_eval_batch_size": "micro_batch_size",
    "per_device_train_batch_size": ROWS,
    "precision": DTYPE,
    "report_to": SINKS,
    "metric_logger": SINKS,
    "logger_name": SINKS,
    "use_tensorboard": SINKS,
    "enable_tensorboard": SINKS,
    "enable_wandb": SINKS,
    "use_wandb": SINKS,
    "wandb_project": WANDB,
    "wandb_entity": WANDB,
    "wandb_name": WANDB,
    "wandb_run_id": WANDB,
    "run_name": WANDB,
    "disable_tqdm": "nothing to set: a run says lines, one every log_every steps in a file",
    "logging_first_step": "nothing to set: the first step of a process always has its line",
    "include_tokens_per_second": "nothing to set: tokens_per_second is always logged",
    "include_num_input_tokens_seen": "nothing to set: tokens are always logged",
    "log_peak_memory_stats": "nothing to set: memory is always logged",
    "generate_samples": "sample_prompts, and sample_tokens",
    "num_generation_samples": "sample_prompts, and sample_tokens",
    "profiler": "profile={start: 10, steps: 3}",
    "enable_profiling": "profile={start: 10, steps: 3}",
    "profiler_steps": "profile={start: 10, steps: 3}",
    "profiler_steps_start": "profile={start: 10, steps: 3}",
    "resume_from_checkpoint": "resume: auto, or the path of a checkpoint",
    "auto_resume_from_checkpoints": "resume=auto",
    "save_steps": "save_every",
    "save_strategy": "save_every: steps between checkpoints",
    "save_interval": "save_every",
    "save_total_limit": "keep_last",
    "save_only_model": "export writes the weights alone, to run_dir/hf",
    "tf32": "nothing to set: torch.backends decides",
    "tokenizer_name": "tokenizer",
    "tokenizer_name_or_path": "tokenizer",
    **dict.fromkeys(("compile", "torch_compile", "torch_compile_backend"), FUSED),
    "torch_compile_mode": FUSED,
    "torch_dtype": DTYPE,
    "total_steps": "steps",
    "train_data": "data",
    "train_file": "data",
    "ignore_empty_think": "train_on_empty_thinking: false (the default) is true there",
    "train_on_inputs": "train_on: assistant (the default) is false, all is true",
    "train_on_input": "train_on: assistant (the default) is false, all is true",
    "train_on_prompt": "train_on: assistant (the default) is false, all is true",
    "mask_prompt": "train_on: assistant (the default) is true, all is false",
    "roles_to_train": LEARNED,
    "train_on_eos": END,
    "eos_token": END,
    "special_tokens": f"{NEW_TOKENS}; else the tokenizer's own",
    **dict.fromkeys(("added_tokens", "add_tokens", "add_special_tokens", "tokens"), NEW_TOKENS),
    **dict.fromkeys(("additional_special_tokens", "resize_vocab"), NEW_TOKENS),
    "dataloader_num_workers": AHEAD,
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_persistent_workers"), AHEAD),
    "dataset_num_proc": "workers",
    "dataset_processes": "workers",
    "preprocessing_num_workers": "workers",
    "dataset_prepared_path": "nothing to set: $TIGON_CACHE is where tokenised data is kept",
    "dataset_text_field": "columns={text: NAME}, with task=pretrain",
    "dataset_kwargs": "data: files or globs",
    "group_by_length": "nothing to set: rows are packed, and dealt to ranks by their cost",
    "length_column_name": "nothing to set: rows are packed, and dealt to ranks by their cost",
    "padding_free": "packing",
    "pad_to_sequence_len": "nothing to set: packed rows have seq_len tokens",
    "eval_packing": "packing, which is for both",
    "eval_sample_packing": "packing, which is for both",
    **dict.fromkeys(("neftune_noise_alpha", "noisy_embedding_alpha"), NO_NOISE),
    "metric_for_best_model": "nothing to set: the best has the lowest eval loss",
    "greater_is_better": "nothing to set: the best has the lowest eval loss",
    "saves_per_epoch": "save_every: steps between checkpoints",
    "logging_dir": "run_dir",
    "use_cpu": "device=cpu",
    "no_cuda": "device=cpu",
    "streaming_multipack_buffer_size": "shuffle_window",
    "shuffle_buffer_size": "shuffle_window",
    **dict.fromkeys(("shuffle", "shuffle_dataset", "shuffle_merged_datasets"), SHUFFLED),
    "test_datasets": "eval_data",
    "train_steps": "steps",
    "use_liger_kernel": FUSED,
    **dict.fromkeys(("val_set_size", "val_size", "test_size", "eval_split_ratio"), HELD_OUT),
    **dict.fromkeys(("validation_split", "validation_split_percentage"), HELD_OUT),
    "validation_file": "eval_data",
    "warmup": "warmup_steps",
    "warmup_ratio": SHARE,
    "lr_warmup_fraction": SHARE,
    "warmup_proportion": SHARE,
    "lr_warmup_steps": "warmup_steps",
    "num_decay_steps": "decay_steps, of schedule=wsd",
    "num_stable_steps": "decay_steps, of schedule=wsd: what is neither warm-up nor decay is stable",
    "decay_ratio": "decay_steps, of schedule=wsd: below 1 it is a share of all steps",
    "lr_decay_style": "schedule",
    "lr_scheduler_kwargs": "min_lr_ratio; decay_steps and decay_type of schedule=wsd",
    "min_lr_rate": "min_lr_ratio",
    "min_lr_factor": "min_lr_ratio",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "num_warmup_steps": "warmup_steps",
    "weight_decay_rate": "weight_decay",
}
OTHERS |= {name: f"parallel.{name}" for name in ("replicate", "context", "tensor", "expert")}
OTHERS |= ALIGNED
OTHERS |= {f"parallel.{name}": called for name, called in PARALLEL.items()}


def answer(name: str, known: Iterable[str]) -> str:
    """What to write in place of a setting that is unknown."""
    known = list(known)
    if name in OTHERS:
        return f"here: {OTHERS[name]}"
    if "." in name:  # optimizer.lr, dataset.source
        first, last = name.split(".", 1)[0], name.rsplit(".", 1)[1]
        for part in (last, first) if last in CHOICES else (last,):
            if part in known or part in OTHERS:
                return f"here: {OTHERS.get(part, part)}"
    meant = find_misspelled(name, [*known, *OTHERS])  # ours first, of equally near ones
    if meant is None:
        return "`tigon train --help` lists all"
    if meant in known:
        return f"did you mean {meant!r}?"
    return f"if {meant!r} is meant, here: {OTHERS[meant]}"
