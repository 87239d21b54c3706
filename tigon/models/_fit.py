"""What a checkpoint lacks for a model, told from its headers."""

from tigon.json_file import escaped
from tigon.models._layout import layout, locate
from tigon.models._model import LanguageModel
from tigon.weights import Checkpoint


def misfits(model: LanguageModel, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Tensors that `load_weights` would raise for, by what is wrong; the model may be on meta."""
    present = checkpoint.tensors
    parts_of = layout(model, model.checkpoint_names, model.checkpoint_names.stacked_in(present))
    needed = {part.name: part for parts in parts_of.values() for part in parts}
    source_of, ignored = locate(needed.keys(), present.keys())
    sources = {source_of.get(name, name): part for name, part in needed.items()}
    wrong = [
        f"{name} is {list(present[name].shape)}, not {list(part.shape)}"
        for name, part in sources.items()
        if name in present and present[name].shape != part.shape
    ]
    wrong += [
        f"{name} is {present[name].dtype}"
        for name in sources
        if name in present and not present[name].dtype.is_floating_point
    ]
    found = {
        "missing": sorted(sources.keys() - present.keys()),
        "unexpected": sorted(present.keys() - sources.keys() - ignored),
        "of another shape or kind": wrong,
    }
    # Names of others are for people to read, on terminals
    return {fault: [escaped(n, 300) for n in names] for fault, names in found.items() if names}
