"""What other trainers call the settings of parallel runs."""

SHARDING = (
    "nothing to set: weights, gradients and optimizer states are divided over all ranks; "
    "sharding=gradients leaves each rank all weights"
)
STAGE = "sharding: full (ZeRO-3, as FSDP2 has it) or gradients (ZeRO-2)"
SHARDS = "parallel.fsdp; by default, all ranks that the other dimensions leave"
REPLICAS = "parallel.replicate: groups of ranks, each with all weights"
WHOLE_EXPERTS = "nothing to set: with parallel.expert above 1 each rank has whole experts"
PIPELINE = (
    "no pipeline parallelism, docs/scale.md says why: give parallel.fsdp, parallel.tensor or "
    "parallel.context"
)
DATA = (
    "parallel.fsdp, whose ranks shard the weights, or parallel.replicate, whose ranks each have "
    "all weights; by default all ranks that the other dimensions leave are fsdp"
)
DEEPSPEED = (
    "no DeepSpeed: FSDP2 shards weights, gradients and optimizer states over all ranks (ZeRO-3) "
    "without a setting; sharding=gradients is ZeRO-2, optimizer_offload=true keeps states in host "
    "memory"
)
ALONGSIDE = "nothing to set: communication overlaps computation where it can"
VOCABULARY = "nothing to set: with parallel.tensor ranks always divide the vocabulary of the loss"
PROCESSES = "--nproc N for the processes of this host; torchrun for several: docs/multihost.md"
HOSTS = "torchrun --nnodes N ... -m tigon.train config.yaml: docs/multihost.md"
BACKEND = "nothing to set: NCCL on GPUs, gloo on a CPU"
TIMEOUT = "nothing to set: docs/multihost.md says after how long a stalled run ends"
RECORDER = "TORCH_FR_BUFFER_SIZE, a variable of the environment: docs/multihost.md"
PLACEMENT = "parallel: {replicate: 1, fsdp: null, context: 1, tensor: 1, expert: 1}, or auto"

DEGREES = ("parallel", "parallel_degree", "parallel_size", "parallel_dim", "model_parallel_size")
DIMENSIONS = {
    name: called
    for x, y, called in (
        ("tensor", "tp", "parallel.tensor"),
        ("context", "cp", "parallel.context"),
        ("expert", "ep", "parallel.expert"),
        ("pipeline", "pp", PIPELINE),
    )
    for name in (y, f"{y}_size", f"{y}_degree", *(f"{x}_{z}" for z in DEGREES))
}
# What DeepSpeed, accelerate, verl and axolotl call sequence parallel divides the tokens of a row in
# attention too; Megatron's divides them between matrices alone
ULYSSES = ("sequence_parallel_size", "sequence_parallel_degree", "sp_size", "sp")
RINGS = ("ulysses_size", "ulysses_degree", "ulysses_sequence_parallel_size", "ring_attn_size")

# Of torchtitan, Megatron-LM, accelerate, DeepSpeed, transformers, axolotl and verl
PARALLEL = {
    **DIMENSIONS,
    **dict.fromkeys((*ULYSSES, *RINGS, "ring_attention", "heads_k_stride"), "parallel.context"),
    "sequence_parallel": (
        "parallel.tensor, which divides the tokens between matrices too; parallel.context divides "
        "long rows, as DeepSpeed's Ulysses"
    ),
    **dict.fromkeys(
        ("expert_tensor_parallel_size", "expert_tensor_parallel_degree"), WHOLE_EXPERTS
    ),
    "enable_expert_parallel": "parallel.expert",
    "moe_expert_parallel_size": "parallel.expert",
    **dict.fromkeys(
        (
            "data_parallel_shard_degree",
            "data_parallel_shard_dim",
            "data_parallel_shard",
            "dp_shard",
        ),
        SHARDS,
    ),
    **dict.fromkeys(("dp_shard_size", "dp_shard_degree", "fsdp_size", "fsdp_degree"), SHARDS),
    **dict.fromkeys(
        ("data_parallel_replicate_degree", "data_parallel_replicate_dim", "dp_replicate"), REPLICAS
    ),
    **dict.fromkeys(("dp_replicate_size", "dp_replicate_degree", "hsdp", "hybrid_shard"), REPLICAS),
    "num_distributed_optimizer_instances": REPLICAS,
    **dict.fromkeys(("data_parallel_size", "data_parallel", "dp", "dp_size"), DATA),
    "deepspeed": DEEPSPEED,
    **dict.fromkeys(("accelerate", "ddp", "fsdp_config"), SHARDING),
    **dict.fromkeys(("fsdp_version", "use_torch_fsdp2", "fsdp_auto_wrap_policy"), SHARDING),
    **dict.fromkeys(("use_megatron_fsdp", "zero3_init_flag", "zero3", "zero2"), SHARDING),
    **dict.fromkeys(
        ("sharding_strategy", "fsdp_sharding_strategy", "reshard_after_forward"), STAGE
    ),
    **dict.fromkeys(("fsdp_reshard_after_forward", "use_distributed_optimizer"), STAGE),
    **dict.fromkeys(("zero_optimization", "zero_stage", "zero"), STAGE),
    "data_parallel_sharding_strategy": STAGE,
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"), ALONGSIDE),
    **dict.fromkeys(("enable_async_tensor_parallel", "async_tensor_parallel"), ALONGSIDE),
    **dict.fromkeys(("loss_parallel", "enable_loss_parallel", "disable_loss_parallel"), VOCABULARY),
    **dict.fromkeys(
        ("num_layers_per_virtual_pipeline_stage", "pipeline_parallel_schedule", "pipeline"),
        PIPELINE,
    ),
    **dict.fromkeys(("nproc_per_node", "nproc", "num_processes", "gpus_per_node"), PROCESSES),
    **dict.fromkeys(("gpus", "num_gpus", "world_size", "devices"), PROCESSES),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), HOSTS),
    **dict.fromkeys(("backend", "ddp_backend", "distributed_backend", "dist_backend"), BACKEND),
    **dict.fromkeys(("ddp_timeout", "distributed_timeout_minutes", "nccl_timeout"), TIMEOUT),
    **dict.fromkeys(("init_timeout_seconds", "train_timeout_seconds"), TIMEOUT),
    **dict.fromkeys(("trace_buf_size", "flight_recorder", "nccl_flight_recorder"), RECORDER),
    **dict.fromkeys(("parallelism", "parallelism_config", "device_mesh", "mesh"), PLACEMENT),
}
