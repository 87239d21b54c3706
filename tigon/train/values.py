"""What the values that settings have in other trainers are called here."""

COSINE = "cosine, which falls to min_lr_ratio of lr; warmup_steps is 0 unless set"
LINEAR = "linear, which falls to min_lr_ratio of lr: set that to 0; warmup_steps is 0 unless set"
EIGHT_BIT = "adamw_8bit"
PAGED = "optimizer_offload=true in place of pages"
FEW = "none; adamw_bf16 and adamw_8bit have states of few bytes"

DTYPES = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "torch.float32"), "float32"),
    "fp8": "bfloat16, with fp8=true",
    **dict.fromkeys(
        ("fp16", "float16", "half", "16-mixed", "torch.float16"),
        "bfloat16; float16 would need its gradients scaled",
    ),
}

# What the values of other trainers are called, by our setting
VALUES: dict[str, dict[str, str]] = {
    "optimizer": {
        **dict.fromkeys(
            ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "torch.optim.AdamW"),
            "adamw, which is fused",
        ),
        **dict.fromkeys(
            ("adamw_bnb_8bit", "adamw_torch_8bit", "ao_adamw_8bit", "bitsandbytes.optim.AdamW8bit"),
            EIGHT_BIT,
        ),
        "paged_adamw": f"adamw, with {PAGED}",
        "paged_adamw_32bit": f"adamw, with {PAGED}",
        "paged_adamw_8bit": f"{EIGHT_BIT}, with {PAGED}",
        "bitsandbytes.optim.PagedAdamW8bit": f"{EIGHT_BIT}, with {PAGED}",
        "adamw_torch_4bit": f"{EIGHT_BIT}: there are no states of 4 bits",
        "ao_adamw_4bit": f"{EIGHT_BIT}: there are no states of 4 bits",
        **dict.fromkeys(("adafactor", "lion", "lion_8bit", "lomo", "galore_adamw"), FEW),
        "torch.optim.SGD": "sgd",
    },
    "schedule": {
        **dict.fromkeys(
            ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_warmup"), COSINE
        ),
        "linear_with_warmup": LINEAR,
        "constant_with_warmup": "constant, with warmup_steps",
        "warmup_stable_decay": "wsd, with decay_steps and decay_type",
        "polynomial": "linear, which is the polynomial of power 1",
        "cosine_with_restarts": "cosine, which has no restarts",
        "inverse_sqrt": "none; wsd with decay_type=sqrt is the nearest",
        "reduce_lr_on_plateau": "none; patience ends a run whose eval loss does not fall",
    },
    "activation_checkpointing": {
        "full": "true",
        "none": "false",
        "memory_budget": "auto, with memory_budget in GiB",
        **dict.fromkeys(("selective", "op"), "auto, or N for every n-th block"),
    },
    "sharding": {
        **dict.fromkeys(("zero3", "fsdp", "fsdp2", "full_shard", "FULL_SHARD"), "full"),
        **dict.fromkeys(("zero2", "shard_grad_op", "SHARD_GRAD_OP"), "gradients"),
        **dict.fromkeys(
            ("zero1", "ddp", "no_shard", "NO_SHARD"),
            "gradients, which leaves each rank all weights and nothing else",
        ),
        **dict.fromkeys(
            ("hsdp", "hybrid_shard", "HYBRID_SHARD"),
            "full, with parallel.replicate: groups of ranks, each with all weights",
        ),
    },
    "loss_type": {
        "gspo": "none; importance_sampling_level=sequence",
        "bnpo": "dapo, whose mean is of the whole step",
        "simpo": "none; task=simpo",
        "alphapo": "none; task=simpo is the nearest",
        "kto": "none; task=kto",
        "kto_pair": "none; task=kto",
        "orpo": "none; task=orpo",
        "cdpo": "sigmoid, with label_smoothing",
        "sft": "none; cpo_alpha of task=cpo adds the cross-entropy of the chosen answers",
        **dict.fromkeys(
            ("exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "discopop"),
            "none; docs/preference.md lists the losses",
        ),
        **dict.fromkeys(("sapo", "vespo", "luspo"), "none; of grpo dapo, grpo, dr_grpo or cispo"),
    },
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "attention": {
        **dict.fromkeys(("flash_attention_2", "flash_attention_3"), "auto, flash or fa4"),
        "eager": "reference",
    },
}
