"""Which tensors of a checkpoint each parameter is made of; told from shapes and headers alone."""

from collections.abc import Collection, Mapping

from torch import Tensor

from tigon.utils.json import escape
from tigon.weights.checkpoint import Checkpoint
from tigon.weights.decoded import Decoded
from tigon.weights.header import TensorInfo
from tigon.weights.layout import Layout, Part, fills

NAMED = 10  # tensors, at most, of each kind that do not fit

Matched = dict[str, list[tuple[Part, TensorInfo | Decoded]]]  # by the parameter's name
Misfits = dict[str, list[str]]  # what is wrong -> the tensors of which it is


def match(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
    into: str = "the model",
) -> Matched:
    """The tensors that every parameter is made of, as `load_into` needs them.

    The parameters may be on the meta device. ValueError unless all fit.
    """
    matched, misfits = compare(parameters, layout, checkpoint, source_of=source_of, ignored=ignored)
    if misfits:
        listed = (f"\n  {listing(fault, names, NAMED)}" for fault, names in misfits.items())
        raise ValueError(
            f"the checkpoint {escape(checkpoint.name)} does not fit {into}:{''.join(listed)}"
        )
    return matched


def compare(
    parameters: Mapping[str, Tensor],
    layout: Layout,
    checkpoint: Checkpoint,
    *,
    source_of: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
) -> tuple[Matched, Misfits]:
    """As `match`, but says what does not fit in place of raising it."""
    source_of = source_of or {}
    missing: list[str] = []
    wrong: list[str] = []
    matched: Matched = {}
    for parameter_name, parameter in parameters.items():
        parts = layout[parameter_name]
        if not fills(parts, parameter):
            wrong.append(f"{parameter_name} is {list(parameter.shape)}, not filled by {parts}")
            continue
        matched[parameter_name] = []
        for part in parts:
            source = source_of.get(part.name, part.name)
            info = checkpoint.tensors.get(source)
            if info is None:
                missing.append(source)
            elif info.shape != part.shape:
                wrong.append(f"{source} is {list(info.shape)}, not {list(part.shape)}")
            elif info.dtype.is_floating_point != parameter.dtype.is_floating_point:
                wrong.append(f"{source} is {info.dtype}, not {parameter.dtype}")
            else:
                matched[parameter_name].append((part, info))
    used = {source_of.get(part.name, part.name) for parts in layout.values() for part in parts}
    found = {
        "missing": missing,
        "unexpected": sorted(checkpoint.tensors.keys() - used - set(ignored)),
        "of another shape or kind": wrong,
    }
    return matched, {fault: names for fault, names in found.items() if names}


def listing(fault: str, names: list[str], most: int) -> str:
    """A line of a message about one kind of misfits."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} {fault}: {', '.join(escape(name, 300) for name in names[:most])}{more}"
