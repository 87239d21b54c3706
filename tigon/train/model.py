"""Models that a run reads and does not train: references and teachers."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from tigon.data.sources import hash_files
from tigon.hub import check_folder
from tigon.kernels.linear.fp8 import MIN_CAPABILITY, supports_fp8
from tigon.layers import Attention, GatedMLP, Linear, SparseMoE
from tigon.models import (
    MODELS,
    CausalLM,
    begin_adapter,
    build,
    describe,
    init_parts,
    load_weights,
    materialize,
    quantise,
    quantised_bytes,
    read_config,
    saved_ends,
    scored,
    torch_dtype,
)
from tigon.parallel import (
    MeshSizes,
    cut_model,
    find_zero,
    shard_gradients,
    share_context,
    share_experts,
    take_part,
)
from tigon.tokenizer import Tokenizer
from tigon.train import checkpoint
from tigon.train.config import Config
from tigon.train.distributed import World, local, meshes_of, shard
from tigon.train.optim import check_part
from tigon.train.vocabulary import read_vocabulary
from tigon.utils.config import ConfigError, build_settings, read_settings
from tigon.utils.json import escape, quote, read_json
from tigon.weights import Checkpoint, Repository, all_finite


def load_frozen(
    config: Config, world: World, path: str, *, vocab_size: int | None = None
) -> CausalLM:
    """Of a directory or a hub repository, in the dtype of the computation, on the run's device.

    Divided over the ranks if there are several. Every rank calls this. `vocab_size`: with that many
    tokens, the first that it has.
    """
    compute = compute_dtype(config, world.device)
    model, weights = build(Repository(path), MODELS, dtype=compute, vocab_size=vocab_size)
    if world.size > 1:
        meshes = meshes_of(world)
        if meshes.expert is not None and has_experts(model):
            share_experts(model, meshes.expert)
        if meshes.tensor is not None:
            cut_model(model, meshes.tensor)
        if meshes.context is not None:
            share_context(model, meshes.context)
        if meshes.sizes.dividing > 1:
            shard(model, world, compute)
    materialize(model, world.device)
    load_weights(model, weights)
    _check_finite(model, path)
    model.use_attention(config.attention)
    model.requires_grad_(False)
    return model.eval()


def _check_finite(model: CausalLM, path: str) -> None:
    """ValueError for weights that would make every loss NaN, which would then name rows."""
    own = {name: local(p.detach()) for name, p in model.named_parameters()}
    own = {name: rows for name, rows in own.items() if rows.numel()}  # a rank may have none
    if all_finite(own.values(), model.device):
        return
    name = next(name for name, rows in own.items() if not all_finite([rows], rows.device))
    raise ValueError(f"{path} has values that are NaN or infinite in {name}, in {model.dtype}")


def outline_of(
    path: str, dtype: torch.dtype = torch.float32, *, vocab_size: int | None = None
) -> CausalLM:
    """Such a model on the meta device, from its config.json alone."""
    config = read_config(Repository(path), MODELS)[1]
    if vocab_size is not None:
        config = replace(config, vocab_size=vocab_size)
    return MODELS[config.model_type].from_config(config, dtype=dtype, device="meta")


def check_frozen(config: Config, path: str, tokenizer: Tokenizer) -> None:
    """ValueError if a model's tokens are not those of the tokenizer, or it cannot read the run's
    longest sequences. From its files alone, without weights."""
    context = read_config(Repository(path), MODELS)[1].max_position_embeddings
    check_longest(config, context, path)
    theirs = Tokenizer.from_pretrained(path).backend.get_vocab()
    ours = tokenizer.backend.get_vocab()
    if theirs == ours:
        return
    token = min(ours.items() ^ theirs.items(), key=lambda item: item[1])[0]
    raise ValueError(
        f"{path} has another vocabulary: token {token!r} is {theirs.get(token)} there and "
        f"{ours.get(token)} here"
    )


# What a model, its tokenizer and its data have to agree on.


def check_context(config: Config, source: Path | None = None) -> None:
    """ValueError for sequences that are longer than what the model can read. Before they are made:
    that may take long, and a cache for such a run would be of no use.
    """
    check_longest(config, context_of(config, source), "the model")


def check_longest(config: Config, context: int, whose: str) -> None:
    """ValueError for sequences of more than `context` tokens, which a model reads at most."""
    name = "seq_len" if config.max_length is None else "max_length"
    if (longest := min(config.seq_len, config.max_length or config.seq_len)) > context:
        raise ValueError(
            f"{name}={longest} is more than {whose}'s context of {context} tokens "
            f"(max_position_embeddings): set {name}={context} or less"
        )


def check_sizes(config: Config, sizes: MeshSizes, source: Path | None = None) -> None:
    """ValueError for a model that so many ranks cannot share; also before data are made."""
    if sizes.tensor * sizes.context * sizes.expert > 1:
        model = outline(config, getattr(torch, config.param_dtype), source)
        take_part(model, sizes)
        check_part(model, config)


def stop_at(model: CausalLM, tokenizer: Tokenizer, ends: Collection[int]) -> None:
    """Generation by the trained model stops at these tokens, with which it learns to end a turn.

    They join what config.json and generation_config.json say. The one that a model did not stop at
    before becomes the tokenizer's eos, which other programs read.
    """
    generation = dict(model.generation_config)
    said = generation.get("eos_token_id", model.config.eos_token_id)
    new = sorted(set(ends) - set(_stop_tokens(said)))
    if not new:
        return
    model.config = replace(model.config, eos_token_id=_joined(model.config.eos_token_id, new))
    if generation:
        model.generation_config = generation | {"eos_token_id": _joined(said, new)}
    if len(new) == len(ends) == 1 and not tokenizer.template_reads("eos_token"):
        tokenizer.use_eos(new[0])


def _stop_tokens(ids: int | list[int] | None) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids or ())


def _joined(ids: int | list[int] | None, new: list[int]) -> int | list[int]:
    all_ids = list(dict.fromkeys([*_stop_tokens(ids), *new]))
    return all_ids if len(all_ids) > 1 else all_ids[0]


# The adapter of a run: from its settings into the model, and out of its checkpoints.


def add_lora(model: CausalLM, config: Config) -> None:
    """The settings' adapter, in param_dtype, with a reward model's head; on a model without memory
    without values. Before it the base is quantised where the settings say so and it is not yet."""
    assert config.lora is not None
    if config.lora.quantize and not quantised_bytes(model):
        quantise(model, config.lora.quantize)
    own = config.lora.adapter(config.model, config.revision or "")
    if config.labels and "score" not in own.modules_to_save:  # new, and so trained whole
        own = replace(own, modules_to_save=(*own.modules_to_save, "score"))
    if config.new_tokens:  # PEFT resizes its base alike, and finds the rows in the adapter
        ends = (*own.modules_to_save, *saved_ends(model))
        own = replace(own, modules_to_save=tuple(dict.fromkeys(ends)))
    model.add_adapter(own, dtype=getattr(torch, config.param_dtype))


def begin_lora(model: CausalLM, config: Config) -> None:
    """Its first values: the same on any number of ranks."""
    begin_adapter(model, generator=torch.Generator().manual_seed(config.seed))


def settings_of(source: Path) -> Config | None:
    """The settings of the run that made a checkpoint of an adapter; None: it is one of a model."""
    values: dict[str, Any] = checkpoint.read_metadata(source).get("config", {})
    if not values.get("lora"):
        return None
    try:
        return build_settings(Config, read_settings(Config, values))
    except ValueError as error:
        raise ValueError(f"{source / 'run.json'}: {error}") from None


# The model of a run: built from a checkpoint or a config.json, sharded, on its device.


def build_model(config: Config, world: World, source: Path | None = None) -> CausalLM:
    """In param_dtype; sharded when there are ranks to share it, or dtype is another, or
    gradients of bfloat16 weights add up in float32.

    Each rank reads only the rows that it keeps. Of a run's checkpoint `source` the model is only
    allocated, for `checkpoint.load`.
    """
    dtype = held_dtype(config, world.device)
    if config.lora is not None:
        model, weights = _base(config, dtype)
        add_lora(model, config)
        divide(model, config, world)
        _allocate(model, config, world)
        _fill(model, config, weights, dtype)
        begin_lora(model, config)
    elif source is not None:
        model = described(source, dtype)
        divide(model, config, world)
        materialize(model, world.device)
    elif config.init:
        model = _from_init(config, dtype)
        divide(model, config, world)
        _allocate(model, config, world)
        _fill(model, config, None, dtype)
    else:
        repository = Repository(config.model, revision=config.revision)
        how: dict[str, Any] = {"dtype": dtype, "labels": config.labels, "seed": config.seed}
        model, weights = build(repository, MODELS, **how, **_tokens(config))
        divide(model, config, world)
        _allocate(model, config, world)
        if source is None:
            load_weights(model, weights)
    if (zero := find_zero(model)) is not None:
        zero.allocate()
    return finish(model, config)


def _allocate(model: CausalLM, config: Config, world: World) -> None:
    try:
        materialize(model, world.device)
    except ConfigError as error:
        raise ConfigError(f"{escape(config.init or config.model)}: {error}") from None


def _base(config: Config, dtype: torch.dtype) -> tuple[CausalLM, Checkpoint | None]:
    """What an adapter is added to; its weights are to be loaded, unless they are random."""
    if config.init:
        return _from_init(config, dtype), None
    how: dict[str, Any] = {"dtype": dtype, "labels": config.labels, "seed": config.seed}
    if config.lora is not None:
        how["quantize"] = config.lora.quantize
    repository = Repository(config.model, revision=config.revision)
    return build(repository, MODELS, **how, **_tokens(config))


def _tokens(config: Config) -> dict[str, Any]:
    """The options of `build` that new_tokens need."""
    vocabulary = read_vocabulary(config)
    if vocabulary is None:
        return {}
    stored = stored_rows(config)
    spare = {number for number in vocabulary.new_ids.values() if number < stored}
    return {"vocab_size": vocabulary.rows(stored), "mean_rows": spare}


def _fill(model: CausalLM, config: Config, weights: Checkpoint | None, dtype: torch.dtype) -> None:
    """With a checkpoint's weights, or with those that `init` draws: the same on any ranks."""
    if weights is not None:
        load_weights(model, weights)
        return
    torch.manual_seed(config.seed)
    init_parts(model, _from_init(config, dtype))


def stored_rows(config: Config) -> int:
    """The rows of embedding and head that the run's model begins with, before new_tokens."""
    if config.init:
        return _config_of(_init(config)).vocab_size
    return read_config(Repository(config.model, revision=config.revision), MODELS)[1].vocab_size


def describe_tokens(config: Config) -> list[str]:
    """What the run's user is told of new_tokens."""
    vocabulary = read_vocabulary(config)
    return [] if vocabulary is None else vocabulary.describe(stored_rows(config))


def base_digest(config: Config) -> str:
    """What changes with the weights of the model that an adapter is added to, wherever its files
    are. Every rank may call this: little is read."""
    if config.init:
        return hash_files([_init(config)], config.seed)
    return sampled_digest(config.model, config.revision)


def sampled_digest(path: str, revision: str | None = None) -> str:
    """Likewise of any model."""
    *_, opened = describe(Repository(path, revision=revision), MODELS, None)
    return opened().sampled_digest()


def adapted(config: Config, dtype: torch.dtype | None, device: str | torch.device) -> CausalLM:
    """The base of a run with lora and its adapter, whose values are to be loaded, in one process.

    The base is in `dtype`; None is that of its config.json. The adapter is in its own.
    """
    outlined = outline(config, torch.float32)
    dtype = dtype or torch_dtype(outlined.config.dtype or "float32")
    model, weights = _base(config, dtype)
    add_lora(model, config)
    materialize(model, torch.device(device))
    _fill(model, config, weights, dtype)
    return model


def held_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Of the model's weights: param_dtype; under an adapter, frozen, that of the computation."""
    if config.lora is not None:
        return compute_dtype(config, device)
    return getattr(torch, config.param_dtype)


def divide(model: CausalLM, config: Config, world: World) -> None:
    """Over the ranks, as `sharding` says; a model that needs none of it stays as it is."""
    compute = compute_dtype(config, world.device)
    if not is_sharded(config, world.size, compute):
        return
    meshes = meshes_of(world)
    if meshes.expert is not None:
        share_experts(model, meshes.expert)
    if meshes.tensor is not None:
        cut_model(model, meshes.tensor)
    if meshes.context is not None:
        share_context(model, meshes.context)
    if config.sharding == "gradients":
        shard_gradients(model, meshes.weights, compute, sum_dtype(config))
    elif is_sharded(config, meshes.sizes.dividing, compute):
        one = config.batch_size == config.micro_batch_size * world.data.size
        shard(model, world, compute, one_backward=one)


def sum_dtype(config: Config) -> torch.dtype:
    """In which gradients add up with sharding=gradients, over micro-batches and ranks."""
    return torch.float32 if config.accumulate_fp32 else getattr(torch, config.param_dtype)


def is_sharded(config: Config, ranks: int, compute: torch.dtype) -> bool:
    """Whether so many ranks divide the model: that casts weights, too, and adds up gradients over
    micro-batches in float32, on one rank as on many."""
    dtype = getattr(torch, config.param_dtype)
    if config.lora is not None:  # the base is not cast
        return ranks > 1 or (config.accumulate_fp32 and dtype != torch.float32)
    return ranks > 1 or compute != dtype or (config.accumulate_fp32 and dtype != torch.float32)


def finish(model: CausalLM, config: Config) -> CausalLM:
    """The settings that do not depend on its weights."""
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
    if config.router_aux_loss_coef is not None:
        set_balance(model, config.router_aux_loss_coef)
    if config.activation_checkpointing != "auto":  # else memory.resolve_checkpointing chooses
        model.activation_checkpointing = config.activation_checkpointing
    model.activation_offload = config.activation_offload
    set_fp8(model, config)
    model.use_attention(config.attention)
    export_dtype(config, model)  # an error now, rather than when training is done
    return model.train()


def set_fp8(model: CausalLM, config: Config) -> None:
    """Which projections have products of 8-bit floats; again of a model that is divided since."""
    kept = in_bfloat16(config, model)
    for name, layer in projections(model):
        # A whole one that fits has parts on all ranks that do, or on none
        own = layer.weight_meta.shape
        cut = model.cuts.get(f"{name}.weight")
        whole = own if cut is None else cut.shape
        layer.fp8 = config.fp8 and name not in kept and supports_fp8(whole) and supports_fp8(own)


def outline(config: Config, dtype: torch.dtype, source: Path | None = None) -> CausalLM:
    """The model of a run on the meta device, from its config.json alone. `dtype`: `held_dtype`."""
    if config.lora is None and source is not None:
        model = described(source, dtype)
    elif config.init:
        model = _from_init(config, dtype)
    else:
        values = read_config(Repository(config.model, revision=config.revision), MODELS)[1]
        values = _apply_settings(values, config)
        model = MODELS[values.model_type].from_config(values, dtype=dtype, device="meta")
    if config.lora is not None:
        add_lora(model, config)
    return finish(model, config)


def export_dtype(config: Config, model: CausalLM) -> torch.dtype:
    """Of the weights in run_dir/hf: the one of the checkpoint that the run began with, unless told.

    ValueError if that is no model's.
    """
    if config.export_dtype != "auto":
        return torch_dtype(config.export_dtype)
    try:
        return torch_dtype(model.config.dtype or config.param_dtype)
    except ValueError as error:
        raise ValueError(f"config.json: {error}; export_dtype= says what to export") from None


def described(source: Path, dtype: torch.dtype) -> CausalLM:
    """The model that a run's checkpoint describes, on the meta device."""
    check_folder(source)
    model = _from_config(source / "config.json", dtype, "meta")
    if settings_of(source) is not None:  # the base's weights are elsewhere
        return model
    needed = 2 * sum(p.numel() for p in model.parameters())
    held = sum(path.stat().st_size for path in source.glob("weights-*.safetensors"))
    if needed > held:  # known before it is allocated
        raise ValueError(
            f"{escape(source / 'config.json')} does not fit the checkpoint: a model of its sizes "
            f"takes {needed} bytes at least, and the weights are {held}"
        )
    generation = read_json(source / "generation_config.json")
    stacked = bool(checkpoint.read_metadata(source).get("stacked_experts"))
    origin = replace(model.config.source, stacked_experts=stacked)
    model.config = replace(model.config, source=origin)
    model.generation_config = generation
    return model


def context_of(config: Config, source: Path | None = None) -> int:
    """The tokens that the model can read at once, from its config.json alone."""
    if source is not None:
        read = _config_of(source / "config.json")
    elif config.init:
        read = _config_of(_init(config))
    else:
        read = read_config(Repository(config.model, revision=config.revision), MODELS)[1]
    return read.max_position_embeddings


def has_experts(model: CausalLM) -> bool:
    """Whether any of its layers is a mixture of experts."""
    return any(isinstance(module, SparseMoE) for module in model.modules())


def set_balance(model: CausalLM, coef: float) -> None:
    """The weight of aux_loss in the loss; the exported config.json will say it too."""
    if not has_experts(model):
        raise ValueError(
            f"router_aux_loss_coef={coef}, but {model.config.architecture} has no experts"
        )
    settings: dict[str, Any] = {"output_router_logits": coef > 0, "router_aux_loss_coef": coef}
    model.config = replace(model.config, **settings)


def projections(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """The layers of attention and MLPs that `fp8` is of, by name: no router, no head."""
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, Attention | GatedMLP):
            for own, layer in module.named_children():
                if isinstance(layer, Linear):
                    yield f"{name}.{own}", layer


def in_bfloat16(config: Config, model: CausalLM) -> set[str]:
    """The names of the projections that `fp8_except` names; ValueError where that is none."""
    names = [name for name, _ in projections(model)]
    found: set[str] = set()
    for pattern in config.fp8_except:
        some = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"*.{pattern}")}
        if not some:
            kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ValueError(
                f"fp8_except={quote(pattern)} matches no projection; they are {kinds}, such as "
                f"{names[0]}"
            )
        found |= some
    return found


def check_fp8(config: Config, device: torch.device) -> None:
    """Raises ValueError where there are no products of 8-bit floats. On a CPU their definition
    runs, which is slow."""
    if not config.fp8:
        return
    if (dtype := compute_dtype(config, device)) != torch.bfloat16:
        raise ValueError(f"fp8=true needs dtype=bfloat16, not {str(dtype).removeprefix('torch.')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name, (major, minor) = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
        )
        raise ValueError(f"fp8=true needs a GPU from sm_89 on; {name} is sm_{major}{minor}")


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if device.type == "cuda" else getattr(torch, config.param_dtype)


def _init(config: Config) -> Path:
    path = Path(config.init)
    if not path.is_file():
        raise FileNotFoundError(f"init={path} is not a config.json file")
    return path


def _config_of(path: Path) -> Any:
    """What a config.json says; ValueError with its name and the key for what it must not say."""
    values = read_json(path, nan=True)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ValueError(
            f"{escape(path)}: model_type {quote(kind)} is not one of {', '.join(MODELS)}"
        )
    try:
        return MODELS[kind].config_class.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{escape(path)}: {error}") from error


def _apply_settings(values: Any, config: Config) -> Any:
    """A model's config, with the scores and the tokens that the settings ask for."""
    values = scored(values, config.labels) if config.labels else values
    vocabulary = read_vocabulary(config)
    if vocabulary is None:
        return values
    return replace(values, vocab_size=vocabulary.rows(values.vocab_size))


def _from_init(settings: Config, dtype: torch.dtype) -> CausalLM:
    """The model of `init`, on the meta device."""
    return _from_config(_init(settings), dtype, "meta", settings)


def _from_config(
    path: Path, dtype: torch.dtype, device: str, settings: Config | None = None
) -> CausalLM:
    config = _config_of(path)
    try:
        config = config if settings is None else _apply_settings(config, settings)
        return MODELS[config.model_type].from_config(config, dtype=dtype, device=device)
    except ConfigError as error:
        raise ConfigError(f"{escape(path)}: {error}") from error
