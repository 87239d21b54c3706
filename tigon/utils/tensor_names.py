"""Names of tensors that checkpoints have beside those of the text model.

This imports no torch, which takes seconds.
"""

# Beginnings of names, after an optional "model."
OTHER_MODALITIES = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "vision_adapter.",
    "vision_projection.",
    "vision_embedder.",
    "embed_vision.",
    "embed_audio.",
    "audio_tower.",
    "visual.",
)
# Buffers that old versions of transformers saved
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)


def is_other_modality(name: str) -> bool:
    """Whether a tensor is for images or sound."""
    return name.removeprefix("model.").startswith(OTHER_MODALITIES)


def is_ignored(name: str) -> bool:
    """Whether a tensor belongs to another modality, or is a buffer computed here."""
    return name.endswith(IGNORED_ENDINGS) or is_other_modality(name)
