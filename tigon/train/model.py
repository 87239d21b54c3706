"""Builds the models of a run: the trained model, its adapter, and frozen references."""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from tigon.data.sources import hash_files
from tigon.hub import check_folder
from tigon.kernels.linear.fp8 import MIN_CAPABILITY, supports_fp8
from tigon.layers import Attention, GatedMLP, Linear, SparseMoE
from tigon.models import MODELS, CausalLM, build, load_weights, materialize
from tigon.models.adapters.adapters import init_adapter
from tigon.models.adapters.lora import savable_modules
from tigon.models.config import torch_dtype
from tigon.models.init import DRAWS, init_sharded_weights
from tigon.models.moe import MoEConfig
from tigon.models.pretrained.load import (
    as_sequence_classifier,
    open_model,
    parse_any_config,
    read_config,
)
from tigon.models.pretrained.match import warn_of_other_modalities
from tigon.models.pretrained.quantization import quantize_model, quantized_bytes
from tigon.parallel import (
    Meshes,
    MeshSizes,
    keep_rank_zero,
    shard_experts,
    shard_gradients,
    shard_model,
    share_context,
)
from tigon.settings.config import Config, micro_batch_rows
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.distributed import World, local, meshes_of, shard
from tigon.train.optim import check_local_model
from tigon.train.vocabulary import read_vocabulary
from tigon.utils.config import build_settings, prefix_errors, read_settings
from tigon.utils.json import escape, quote, read_json
from tigon.weights import Checkpoint, Repository
from tigon.weights.write import all_finite


def build_model(config: Config, world: World, source: Path | None = None) -> CausalLM:
    """Builds the run's model on its device: in `weights_dtype`, sharded by `parallelize`.

    Each rank reads only the rows that it keeps. With a checkpoint `source` the weights are only
    allocated, for `checkpoint.load`; with lora only those of the adapter are left to it.
    """
    dtype, weights = weights_dtype(config, world.device), None
    whole = None if config.lora is not None else source  # with all weights, not an adapter's alone
    if whole is not None:
        model = model_from_checkpoint_config(whole, dtype)
    else:
        model, weights = _build_base(config, dtype)
    if config.lora is not None:
        add_lora(model, config)
    parallelize(model, config, world)
    with prefix_errors(escape(config.init or config.model)):
        materialize(model, world.device)
    if whole is None:
        _load_or_init_weights(model, config, weights, dtype)
    if config.lora is not None:  # equally on any number of ranks
        init_adapter(model, generator=torch.Generator().manual_seed(config.seed))
    if model.zero2 is not None:
        model.zero2.allocate()
    return apply_model_settings(model, config)


def _build_base(config: Config, dtype: torch.dtype) -> tuple[CausalLM, Checkpoint | None]:
    """Returns the meta model without adapter, and its weights, None if they are random."""
    if config.init:
        return _meta_base(config, dtype), None
    options: dict[str, Any] = {"dtype": dtype, "labels": config.labels, "seed": config.seed}
    if config.lora is not None:
        options["quantize"] = config.lora.quantize
    repository = Repository(config.model, revision=config.revision)
    if (vocabulary := read_vocabulary(config)) is not None:
        stored = read_model_config(config).vocab_size
        spare = {number for number in vocabulary.new_ids.values() if number < stored}
        options |= {"vocab_size": vocabulary.rows(stored), "mean_rows": spare}
    model, checkpoint = build(repository, MODELS, **options)
    warn_of_other_modalities(checkpoint)
    return model, checkpoint


def _load_or_init_weights(
    model: CausalLM, config: Config, weights: Checkpoint | None, dtype: torch.dtype
) -> None:
    """Loads the weights, or without any draws those of `init`, the same on any number of ranks."""
    if weights is not None:
        load_weights(model, weights)
        return
    torch.manual_seed(config.seed)
    init_sharded_weights(model, _meta_base(config, dtype))


def read_model_config(config: Config, source: Path | None = None) -> Any:
    """Returns the config of the checkpoint `source`, or of the model that the settings name, as its
    config.json has it: before new_tokens and scores."""
    if source is not None or config.init:
        return _read_config_file(_init_path(config) if source is None else source / "config.json")
    return read_config(Repository(config.model, revision=config.revision), MODELS)


def base_digest(config: Config) -> str:
    """Returns a digest of samples of the base model's weights, wherever its files are; of `init`
    one of its config.json, the seed, and the version of what a seed draws."""
    if config.init:
        return hash_files([_init_path(config)], config.seed, DRAWS)
    return sampled_digest(config.model, config.revision)


def sampled_digest(path: str, revision: str | None = None) -> str:
    """Returns a digest of samples of the weights in a directory or hub repository."""
    *_, opened = open_model(Repository(path, revision=revision), MODELS, None)
    return opened().sampled_digest()


def build_adapted_model(
    config: Config, dtype: torch.dtype | None, device: str | torch.device
) -> CausalLM:
    """Builds a LoRA run's base in `dtype`, and an uninitialized adapter, in one process."""
    dtype = dtype or torch_dtype(read_model_config(config).dtype or "float32")
    model, weights = _build_base(config, dtype)
    add_lora(model, config)
    materialize(model, torch.device(device))
    _load_or_init_weights(model, config, weights, dtype)
    return model


def weights_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Returns the dtype of the weights: param_dtype, or the compute dtype of a frozen base."""
    if config.lora is not None:
        return compute_dtype(config, device)
    return getattr(torch, config.param_dtype)


def parallelize(model: CausalLM, config: Config, world: World) -> None:
    """Shards the model in place by `parallel` and `sharding`; on one rank only if `is_sharded`."""
    compute = compute_dtype(config, world.device)
    if world.size == 1 and not is_sharded(config, 1, compute):
        return
    meshes = meshes_of(world)
    _shard_layers(model, meshes)
    if config.sharding == "gradients":
        shard_gradients(model, meshes.weights, compute, sum_dtype(config))
    elif is_sharded(config, meshes.sizes.fsdp_ranks, compute):
        one = config.batch_size == micro_batch_rows(config) * world.data.size
        shard(model, world, compute, one_backward=one)


def _shard_layers(model: CausalLM, meshes: Meshes) -> None:
    """Shards experts, matrices and tokens of rows over the ranks of their meshes, in place."""
    if meshes.expert is not None and has_experts(model):
        shard_experts(model, meshes.expert)
    if meshes.tensor is not None:
        shard_model(model, meshes.tensor)
    if meshes.context is not None:
        share_context(model, meshes.context)


def sum_dtype(config: Config) -> torch.dtype:
    """Returns the dtype in which sharding=gradients adds gradients up."""
    return torch.float32 if config.accumulate_fp32 else getattr(torch, config.param_dtype)


def is_sharded(config: Config, ranks: int, compute: torch.dtype) -> bool:
    """Returns whether FSDP2 or ZeRO-2 holds the weights of `ranks` ranks, not counting those of
    tensor parallelism: always those of several, and of one where it must cast weights to the
    compute dtype or add gradients up in float32."""
    dtype = getattr(torch, config.param_dtype)
    casts = config.lora is None and compute != dtype  # the base of an adapter is not cast
    return ranks > 1 or casts or (config.accumulate_fp32 and dtype != torch.float32)


def apply_model_settings(model: CausalLM, config: Config) -> CausalLM:
    """Applies the settings that do not depend on the weights, in place; returns the model in train
    mode. Raises ValueError for settings that the model cannot have."""
    if config.labels and not model.config.labels:  # of a checkpoint: others get a head of scores
        raise ValueError(
            f"the run goes on with a model that predicts tokens, and task={config.task} trains one "
            "that scores sequences: begin another run_dir, with model= an export of this one"
        )
    if model.config.labels != config.labels:
        raise ValueError(
            f"the model gives {model.config.labels} scores of a sequence and predicts no token: "
            f"task=reward trains it, and task={config.task} a language model"
        )
    if (coef := config.router_aux_loss_coef) is not None:
        if not isinstance(model.config, MoEConfig):
            lacks = "aux_loss" if has_experts(model) else "experts"
            name = model.config.architecture
            raise ValueError(f"router_aux_loss_coef={coef}, but {name} has no {lacks}")
        routing: dict[str, Any] = {"output_router_logits": coef > 0, "router_aux_loss_coef": coef}
        model.config = replace(model.config, **routing)
    if config.activation_checkpointing != "auto":  # else `StepChoice.apply` sets it
        model.activation_checkpointing = config.activation_checkpointing
    model.activation_offload = config.activation_offload
    set_fp8(model, config)
    model.use_attention(config.attention)
    export_dtype(config, model)  # an error now, rather than when training is done
    return model.train()


def set_fp8(model: CausalLM, config: Config) -> None:
    """Sets `fp8` of each projection: with fp8=true, true unless fp8_except matches it or its sizes,
    which change once the model is sharded, are not supported."""
    excluded = match_fp8_except(config, model)
    for name, layer in named_projections(model):
        # Both shapes, so that all ranks decide the same
        local_shape = layer.weight_meta.shape
        spec = model.shard_specs.get(f"{name}.weight")
        shape = local_shape if spec is None else spec.shape
        fits = supports_fp8(shape) and supports_fp8(local_shape)
        layer.fp8 = config.fp8 and name not in excluded and fits


def meta_model(config: Config, dtype: torch.dtype, source: Path | None = None) -> CausalLM:
    """Returns the run's model on the meta device, with its adapter and settings; reads no weights.

    `source`: the checkpoint that the run resumes from, whose config replaces the model's unless the
    run trains an adapter; raises ValueError if its weight files are too small for it.
    """
    if config.lora is None and source is not None:
        model = model_from_checkpoint_config(source, dtype)
    else:
        model = _meta_base(config, dtype)
    if config.lora is not None:
        add_lora(model, config)
    return apply_model_settings(model, config)


def export_dtype(config: Config, model: CausalLM) -> torch.dtype:
    """Returns the dtype of run_dir/hf: export_dtype, or by default that of the model's config.json,
    or param_dtype if it names none.

    Raises ValueError if a model cannot have it.
    """
    if config.export_dtype != "auto":
        return torch_dtype(config.export_dtype)
    try:
        return torch_dtype(model.config.dtype or config.param_dtype)
    except ValueError as error:
        raise ValueError(f"config.json: {error}; export_dtype= says what to export") from None


def model_from_checkpoint_config(source: Path, dtype: torch.dtype) -> CausalLM:
    """Returns the model of a run's checkpoint on the meta device, without the adapter that it may
    have. Raises ValueError if its files are too small for the weights."""
    check_folder(source)
    model = _from_config(_read_config_file(source / "config.json"), dtype, source / "config.json")
    if read_adapter_run_config(source) is not None:  # the base's weights are elsewhere
        return model
    needed = 2 * sum(p.numel() for p in model.parameters())
    stored = sum(path.stat().st_size for path in source.glob("weights-*.safetensors"))
    if needed > stored:  # raise before allocating
        raise ValueError(
            f"{escape(source / 'config.json')} needs weights of at least {needed} bytes, and the "
            f"checkpoint has {stored}"
        )
    stacked = bool(checkpoint.read_metadata(source).get("stacked_experts"))
    origin = replace(model.config.source, stacked_experts=stacked)
    model.config = replace(model.config, source=origin)
    model.generation_config = read_json(source / "generation_config.json")
    return model


def has_experts(model: CausalLM) -> bool:
    """Returns whether any layer is a mixture of experts."""
    may_have = bool(getattr(model.config, "experts", 0))  # in a few layers, or in none
    return may_have and any(isinstance(module, SparseMoE) for module in model.modules())


def named_projections(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Yields the linear layers of attention and MLPs with their names: no router, no head."""
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, Attention | GatedMLP):
            for child, layer in module.named_children():
                if isinstance(layer, Linear):
                    yield f"{name}.{child}", layer


def match_fp8_except(config: Config, model: CausalLM) -> set[str]:
    """Returns the projections that `fp8_except` matches; ValueError for a pattern without any."""
    names = [name for name, _ in named_projections(model)]
    matches: set[str] = set()
    for pattern in config.fp8_except:
        found = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")}
        if not found:
            kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ValueError(
                f"fp8_except={quote(pattern)} matches no projection; they are {kinds}, such as "
                f"{names[0]}"
            )
        matches |= found
    return matches


def check_fp8(config: Config, device: torch.device) -> None:
    """Raises ValueError for fp8=true in another dtype than bfloat16, or on a GPU without fp8
    products; a CPU runs their slow definition."""
    if not config.fp8:
        return
    if (dtype := compute_dtype(config, device)) != torch.bfloat16:
        raise ValueError(f"fp8=true needs dtype=bfloat16, not {str(dtype).removeprefix('torch.')}")
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"fp8=true needs a GPU from sm_89 on; {name} is sm_{major}{minor}")


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Returns the dtype of activations: by default bfloat16 on a GPU, else param_dtype."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, config.param_dtype)


def _init_path(config: Config) -> Path:
    """Returns the path of `init`, or raises FileNotFoundError."""
    path = Path(config.init)
    if not path.is_file():
        raise FileNotFoundError(f"init={path} is not a config.json file")
    return path


def _read_config_file(path: Path) -> Any:
    """Returns the model config of a config.json; ValueError names the file and the wrong key."""
    with prefix_errors(escape(path)):
        return parse_any_config(read_json(path, nan=True), MODELS)


def _meta_base(config: Config, dtype: torch.dtype) -> CausalLM:
    """Returns the model of the settings, with labels and new_tokens, on meta; without adapter."""
    values = read_model_config(config)
    if config.labels:
        values = as_sequence_classifier(values, config.labels)
    if (vocabulary := read_vocabulary(config)) is not None:
        values = replace(values, vocab_size=vocabulary.rows(values.vocab_size))
    return _from_config(values, dtype, config.init or config.model)


def _from_config(values: Any, dtype: torch.dtype, place: str | Path) -> CausalLM:
    """Returns the model of a config on the meta device; a ValueError names the config's place."""
    with prefix_errors(escape(place)):
        return MODELS[values.model_type].from_config(values, dtype=dtype, device="meta")


# The adapter of a run.


def add_lora(model: CausalLM, config: Config) -> None:
    """Adds the settings' adapter in param_dtype, uninitialized, to a base quantized if need be."""
    assert config.lora is not None
    if config.lora.quantize and not quantized_bytes(model):
        quantize_model(model, config.lora.quantize)
    adapter = config.lora.adapter(config.model, config.revision or "")
    saved = adapter.modules_to_save + ("score",) * bool(config.labels)  # new, so trained whole
    if config.new_tokens:  # PEFT resizes its base alike, and finds the rows in the adapter
        saved = (*saved, *savable_modules(model))
    adapter = replace(adapter, modules_to_save=tuple(dict.fromkeys(saved)))
    model.add_adapter(adapter, dtype=getattr(torch, config.param_dtype))


def read_adapter_run_config(source: Path) -> Config | None:
    """Returns the config of the run that saved an adapter checkpoint; None for a full model."""
    values: dict[str, Any] = checkpoint.read_metadata(source).get("config", {})
    if not values.get("lora"):
        return None
    with prefix_errors(f"{source / 'run.json'}", ValueError):
        return build_settings(Config, read_settings(Config, values))


# Checks of the model against tokenizer, data and ranks.


def check_context(config: Config, source: Path | None = None) -> None:
    """Raises ValueError for sequences longer than the model's context, before they are made."""
    context = read_model_config(config, source).max_position_embeddings
    check_longest(config, context, "the model")


def check_resumed_model(config: Config, source: Path) -> None:
    """Raises ValueError if the settings name a model of another type or size than the checkpoint's,
    whose weights are what is trained on. The same model may have another path, and its files may
    be gone."""
    saved = checkpoint.read_metadata(source)["config"]
    if all(saved.get(name) == getattr(config, name) for name in ("model", "init")):
        return
    sizes = [
        (c.model_type, f"{c.num_hidden_layers} layers", f"hidden_size {c.hidden_size}")
        for c in (read_model_config(config, source), read_model_config(config))
    ]
    if sizes[0] != sizes[1]:
        was, now = map(", ".join, sizes)
        raise ValueError(
            f"{source} is of a {was}, and {config.model or config.init} is a {now}: choose another "
            "run_dir, or give the model that it has"
        )


def check_longest(config: Config, context: int, model_name: str) -> None:
    """Raises ValueError if the settings allow sequences of more than `context` tokens."""
    name = "seq_len" if config.max_length is None else "max_length"
    if (longest := min(config.seq_len, config.max_length or config.seq_len)) > context:
        raise ValueError(
            f"{name}={longest} is more than {model_name}'s context of {context} tokens "
            f"(max_position_embeddings): set {name}={context} or less"
        )


def check_sizes(config: Config, sizes: MeshSizes, source: Path | None = None) -> None:
    """Raises ValueError for a model that a mesh of these sizes cannot share."""
    if sizes.tensor * sizes.context * sizes.expert > 1:
        model = meta_model(config, getattr(torch, config.param_dtype), source)
        keep_rank_zero(model, sizes)
        check_local_model(model, config)


# Frozen models: references and teachers.


def load_frozen(
    config: Config, world: World, path: str, *, vocab_size: int | None = None
) -> CausalLM:
    """Loads a frozen model from a directory or hub repository, in the compute dtype.

    Several ranks shard it; every rank calls this. `vocab_size`: keeps only its first tokens. Raises
    ValueError for weights that are NaN or infinite.
    """
    compute = compute_dtype(config, world.device)
    model, stored = build(Repository(path), MODELS, dtype=compute, vocab_size=vocab_size)
    if world.size > 1:
        meshes = meshes_of(world)
        _shard_layers(model, meshes)
        if meshes.sizes.fsdp_ranks > 1:
            shard(model, world, compute)
    materialize(model, world.device)
    load_weights(model, stored)
    weights = {name: local(p.detach()) for name, p in model.named_parameters()}
    weights = {name: rows for name, rows in weights.items() if rows.numel()}  # a rank may have none
    if not all_finite(weights.values(), model.device):  # every loss would be NaN
        name = next(name for name, rows in weights.items() if not all_finite([rows], rows.device))
        raise ValueError(f"{path} has values that are NaN or infinite in {name}, in {model.dtype}")
    model.use_attention(config.attention)
    model.requires_grad_(False)
    return model.eval()


def meta_model_from_path(
    path: str, dtype: torch.dtype = torch.float32, *, vocab_size: int | None = None
) -> CausalLM:
    """Returns the model of a directory or hub repository on the meta device, from its config.json
    alone; `vocab_size` replaces that of the config."""
    config = read_config(Repository(path), MODELS)
    if vocab_size is not None:
        config = replace(config, vocab_size=vocab_size)
    return _from_config(config, dtype, path)


def check_frozen(config: Config, path: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a frozen model has another vocabulary than the tokenizer, or a context
    shorter than the run's sequences. Reads no weights."""
    context = read_config(Repository(path), MODELS).max_position_embeddings
    check_longest(config, context, path)
    frozen_vocab = Tokenizer.from_pretrained(path).backend.get_vocab()
    vocab = tokenizer.backend.get_vocab()
    if frozen_vocab == vocab:
        return
    token = min(vocab.items() ^ frozen_vocab.items(), key=lambda item: item[1])[0]
    raise ValueError(
        f"{path} has another vocabulary: token {token!r} is {frozen_vocab.get(token)} there "
        f"and {vocab.get(token)} here"
    )
