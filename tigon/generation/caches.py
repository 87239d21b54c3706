"""Which cache can hold a text, and whether one model can propose to another."""

from torch.distributed.tensor import DTensor

from tigon.generation.protocols import Model
from tigon.generation.settings import Caches, Settings

# Vocabularies of one tokenizer differ where they were filled up, to a multiple of FILL, and by
# at most FILLED rows: 151,936 and 152,064 in Qwen2.5
FILL, FILLED = 64, 512


def is_sharded(model: Model) -> bool:
    """Whether FSDP gathers the parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def choose_cache(model: Model, assistant: Model | None, settings: Settings, total: int) -> Caches:
    """The cache for up to `total` tokens: a static one on a GPU wherever it is exact."""
    asked, use_cache = settings.cache_implementation, settings.use_cache
    if assistant is not None:
        # Rows that have all their tokens keep proposing until the others have theirs
        total += settings.num_assistant_tokens
        _check_assistant(model, assistant, asked, total, use_cache)
        asked = asked or "static"
    if not use_cache and asked is not None:
        raise ValueError(f"use_cache=False and cache_implementation={asked!r}: give one of them")
    if not use_cache or asked == "dynamic":
        return "dynamic"
    obstacle = _obstacle(model, total)
    if obstacle is None:
        return asked or ("static" if model.device.type == "cuda" else "dynamic")
    if asked is not None:
        raise ValueError(f"cache_implementation={asked!r}: {obstacle}; take 'dynamic'")
    return "dynamic"


def _check_assistant(
    model: Model, assistant: Model, asked: Caches | None, total: int, use_cache: bool
) -> None:
    """Whether one can propose to the other, for texts of up to `total` tokens with proposals."""
    if model.together:
        raise ValueError(
            "assistant_model does not work with a model loaded with mesh=: leave it out"
        )
    if not callable(getattr(assistant, "static_cache", None)):
        raise TypeError(
            f"assistant_model is a {type(assistant).__name__}, not a model that "
            "tigon.from_pretrained loads"
        )
    if not use_cache or asked == "dynamic":
        raise ValueError(
            "assistant_model needs a cache that can go back: cache_implementation='static' or "
            "'quantized'"
        )
    theirs, ours = assistant.config.vocab_size, model.config.vocab_size
    larger = max(theirs, ours)
    if theirs != ours and (larger % FILL or larger - min(theirs, ours) > FILLED):
        raise ValueError(
            f"assistant_model has a vocabulary of {theirs} tokens, but the model one of {ours}: "
            "only a model with the same tokenizer can propose tokens"
        )
    if assistant.device != model.device:
        raise ValueError(
            f"assistant_model is on {assistant.device}, but the model on {model.device}"
        )
    for who, one in (("assistant_model", assistant), ("the model beside assistant_model", model)):
        obstacle = _obstacle(one, total)
        if obstacle is not None:
            raise ValueError(
                f"{who}: {obstacle}; proposals, of which a text may get num_assistant_tokens more "
                "than it keeps, need a static cache: ask for fewer tokens, or do without them"
            )


def _obstacle(model: Model, total: int) -> str | None:
    """Why a static cache would not hold a text of up to `total` tokens exactly, if so."""
    if is_sharded(model):
        return "FSDP gathers parameters step by step"
    rope = model.turning_rope
    if rope is None or total <= rope.turn:
        return None
    kind = rope.rope_type
    return f"{kind} RoPE rotates all keys anew when a text of up to {total} passes {rope.turn}"
