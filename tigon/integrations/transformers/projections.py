"""A native model's modules under transformers' names, so that others may wrap or replace them.

Queries, keys and values, gate and up, and the projections of linear attention are modules of their
own, whose weights have memory of their own. The native layer that computed them as one product is
left outside of the tree of modules and calls them: as one, or one by one where anybody has wrapped,
replaced or hooked one of them.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tigon.integrations.transformers.stream import is_hooked
from tigon.kernels.linear.packed import packed_linear
from tigon.kernels.mlp.gated_act import Activation, gated_act
from tigon.layers import Experts, FusedLinear, GatedLinear, GatedMLP, LMHead, RowOrder
from tigon.layers.linear import is_unpatched
from tigon.models.base import LanguageModel
from tigon.models.pretrained.names import CheckpointNames, layout, module_buffers
from tigon.models.pretrained.quantization import quantized_layers


def split_projections(native: LanguageModel, reference: nn.Module) -> None:
    """Gives the model's modules and parameters the names, shapes and order of `reference`.

    `reference`: transformers' model of the same config, which may be on the meta device. The native
    model computes as before, and so do its methods. Without effect on a model that is split.

    Raises ValueError for a model that is sharded, has adapters or quantized weights, or whose
    parameters are not those of the reference.
    """
    if any(isinstance(module, OutputEmbeddings) for module in native.modules()):
        return
    _check(native, reference)
    names = native.checkpoint_names
    for path, module in list(native.named_modules()):
        if isinstance(module, FusedLinear):
            _split(native, path, module, names.packed)
    for path, module in reversed(list(native.named_modules())):
        if path:
            _move(native, path, module, names)
    _set_class(native.lm_head, OutputEmbeddings)
    _follow(native, reference)
    if (difference := _find_difference(native, reference)) is not None:
        raise ValueError(f"{type(native).__name__} and {_describe(reference)} differ: {difference}")


def _describe(module: nn.Module) -> str:
    """Names the class of one of transformers' models in a message."""
    return f"transformers' {type(module).__name__}"


def _check(native: LanguageModel, reference: nn.Module) -> None:
    """Raises ValueError for a model that cannot be split."""
    name = type(native).__name__
    if native.adapters:
        raise ValueError(f"{name} has the adapters {native.adapter_names}: merge or delete them")
    if native.shard_specs:
        raise ValueError(f"{name} is sharded: only a whole model has transformers' modules")
    for path, _, weight in quantized_layers(native):
        raise ValueError(f"{path} is quantized ({weight.kind}): load the model with quantize=None")
    if native.checkpoint_names.decoder != "model.":
        raise ValueError(
            f"{name} is a part of {_describe(reference)}, which Tigon has no model for"
        )
    slices = layout(native, native.checkpoint_names, True).values()
    stored = {part.name for parts in slices for part in parts}
    for missing in (n for n, _ in reference.named_parameters() if n not in stored):
        raise ValueError(f"{_describe(reference)} has {missing}, which {name} has not")


def _find_difference(native: nn.Module, reference: nn.Module) -> str | None:
    """Describes the first parameter that differs in name, place or shape; None: none does."""
    ours, theirs = (
        [f"{name} {[*p.shape]}" for name, p in model.named_parameters()]
        for model in (native, reference)
    )
    for own, other in zip_longest(ours, theirs, fillvalue="nothing"):
        if own != other:
            return f"{own} here, {other} there"
    return None


# Projections that one native layer computes


class SplitLinear(FusedLinear):
    """A fused projection that others compute: the modules `names` of `owner`.

    It is not in the tree of modules and has no parameters.
    """

    owner: nn.Module
    names: tuple[str, ...]

    @property
    def training(self) -> bool:
        """Whether the owner is in training mode, which nobody sets here."""
        return self.owner.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    @property
    def modules_of_parts(self) -> list[nn.Module]:
        """The modules that compute the parts, in the order of rows."""
        return [getattr(self.owner, name) for name in self.names]

    def computed_unseen(self) -> bool:
        """Whether nobody else sees the tensor that this returns."""
        modules = self.modules_of_parts
        return len(modules) > 1 or any(self.orders) or is_unpatched(modules[0], nn.Linear)

    def product(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns all parts [..., out_features] of x [..., in_features], in the native order."""
        modules = self.modules_of_parts
        if not any(self.orders) and all(is_unpatched(module, nn.Linear) for module in modules):
            layers = cast(list[nn.Linear], modules)
            return packed_linear(x, [m.weight for m in layers], [m.bias for m in layers])
        parts = zip((module(x) for module in modules), self.orders, strict=True)
        sections = [section for y, order in parts for section in _sections(y, order)]
        return sections[0] if len(sections) == 1 else torch.cat(sections, -1)


class SplitGatedLinear(SplitLinear, GatedLinear):
    """A gated projection whose gate and up others compute."""

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Returns act(gate) * up [..., size]."""
        product = self.product(x, dropout_keys)
        return gated_act(product, self.act, overwrite=self.computed_unseen())


class WholeGatedMLP(GatedMLP):
    """A gated MLP whose gate and up are one linear layer to others, too, as in Phi-3."""

    act: Activation

    def forward(self, x: Tensor, *dropout_args: Tensor) -> Tensor:
        unseen = is_unpatched(self.gate_up_proj, FusedLinear)
        gate_up = self.gate_up_proj(x, *dropout_args)
        return self.down_proj(gated_act(gate_up, self.act, overwrite=unseen), *dropout_args)


def _sections(y: Tensor, order: RowOrder | None) -> Iterator[Tensor]:
    """Yields the sections of a part [..., rows] in the native order from one in transformers'."""
    if order is None:
        yield y
        return
    sections = y.unflatten(-1, (order.groups, -1)).split(order.sizes, -1)
    for index in order.sections:
        yield sections[index].flatten(-2)


def _split(
    model: nn.Module, path: str, fused: FusedLinear, packed: Mapping[str, tuple[str, ...]]
) -> None:
    """Puts modules of a fused projection's parts in its place; one that checkpoints store whole
    remains, but without an activation."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if name not in packed:
        if isinstance(fused, GatedLinear):
            parent.__dict__["act"] = fused.act
            _set_class(parent, WholeGatedMLP)
            _set_class(fused, FusedLinear)
        return
    names, first = packed[name][: len(fused.parts)], 0
    for part, size, order in zip(names, fused.parts, fused.orders, strict=True):
        parent.add_module(part, _take_rows(fused, first, size, order))
        first += size
    for kind in ("weight", "bias"):
        fused.register_parameter(kind, None)
    _set_class(fused, SplitGatedLinear if isinstance(fused, GatedLinear) else SplitLinear)
    fused.__dict__ |= {"owner": parent, "names": names}  # the owner is no module of this one
    _hide(parent, name)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Makes the module one of another class; its parameters and hooks stay."""
    module.__class__ = kind


def _hide(parent: nn.Module, name: str) -> None:
    """Takes a module out of the tree; it stays an attribute."""
    parent.__dict__[name] = parent._modules.pop(name)


def _take_rows(fused: FusedLinear, first: int, size: int, order: RowOrder | None) -> nn.Linear:
    """Makes torch's own layer, which some of PEFT's methods insist on, of some rows of a fused one,
    in the order that checkpoints have."""
    with torch.device("meta"):
        layer = nn.Linear(fused.in_features, size, bias=fused.bias is not None)
    layer.train(fused.training)
    for kind, p in fused.named_parameters(recurse=False):
        rows = p.detach()[first : first + size]
        if order is None:
            rows = rows.clone()
        else:
            runs = sorted(order.runs())
            rows = torch.cat([rows[target : target + n] for _, target, n in runs])
        setattr(layer, kind, nn.Parameter(rows, p.requires_grad))
    return layer


# Names


class AliasedDict(dict[str, Any]):
    """Modules or parameters of a module, of which native names stand for some.

    `places`: native name -> the dict that has it, and its name there. What is set or deleted
    under either name is that one; iteration has it only in its place.
    """

    places: dict[str, tuple[dict[str, Any], str]]

    def __new__(cls, *args: Any) -> Self:  # pickle sets items before attributes
        self = super().__new__(cls)
        self.places = {}
        return self

    def _place(self, name: Any) -> tuple[dict[str, Any], str]:
        """Returns the dict that has the name's value, and the name there."""
        return self.places.get(name, (self, name))

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(*self._place(name))

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(*self._place(name))

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(*self._place(name), value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(*self._place(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of either name, or the default without one."""
        return dict.get(*self._place(name), default)


def _rename(owner: nn.Module, kind: str, name: str, target: nn.Module, other: str) -> None:
    """Moves what `owner` has in its dict `kind` to that of another module, or to another name."""
    if not isinstance(owner.__dict__[kind], AliasedDict):
        owner.__dict__[kind] = AliasedDict(owner.__dict__[kind])
    children = owner.__dict__[kind]
    child = children.pop(name)
    places = target.__dict__[kind]  # the owner's new one, if it is the owner
    places[other] = child
    if vars(target).get(other, child) is None:  # a module that the family lacks would hide it
        del vars(target)[other]
    children.places[name] = places, other


def _move(model: nn.Module, path: str, module: nn.Module, names: CheckpointNames) -> None:
    """Puts a module where transformers has it, or its parameters or buffers alone if transformers
    has them in the module around it. What remains without anything is no longer in the tree."""
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    for name in module_buffers(module):
        place, _, other = names.stored_name(f"{path}.{name}").rpartition(".")
        if place == names.stored_name(parent_path):
            _rename(module, "_buffers", name, parent, other)
    if not module._modules and isinstance(module._modules, AliasedDict):
        _hide(parent, leaf)
        return
    tensors = [*module._parameters, *module_buffers(module)]
    stored = names.head if path == "lm_head" else names.stored_name(".".join((path, *tensors[:1])))
    stored = stored.rpartition(".")[0] if tensors else stored
    if tensors and stored == names.stored_name(parent_path):
        for name in list(module._parameters):
            _rename(module, "_parameters", name, parent, name)
        _hide(parent, leaf)
        return
    target_path, _, target_leaf = stored.rpartition(".")
    if (ancestor := parent_path) and names.stored_name(ancestor) != target_path:
        ancestor = ancestor.rpartition(".")[0]
    if (ancestor, target_leaf) != (parent_path, leaf):
        _rename(parent, "_modules", leaf, model.get_submodule(ancestor), target_leaf)


def _follow(native: nn.Module, reference: nn.Module) -> None:
    """Orders modules and parameters as the reference does, and tells how its experts are stored."""
    for path, module in native.named_modules():
        try:
            theirs = reference.get_submodule(path)
        except AttributeError:  # one that only the native model has, such as a table of RoPE
            continue
        for kind in ("_modules", "_parameters"):
            children = module.__dict__[kind]
            own = dict(children.items())
            children.clear()
            children.update({n: own.pop(n) for n in theirs.__dict__[kind] if n in own} | own)
        if isinstance(module, Experts):  # PEFT asks for it
            module.__dict__["is_transposed"] = getattr(theirs, "is_transposed", False)


# The head


class OutputEmbeddings(LMHead, nn.Linear):  # type: ignore[misc]
    """The head as transformers has it: called with states [..., C] alone it returns logits
    [..., V], neither scaled nor capped."""

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """C."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """V."""
        return self.weight.shape[0]

    @property
    def takes_criteria(self) -> bool:
        """Whether the forward pass is this class's, not one that others have set, and no hook of
        theirs sees what it returns."""
        return "forward" not in vars(self) and not is_hooked(self)

    def forward(self, hidden: Tensor | None, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Returns logits, or with criteria or options the native head's output."""
        if hidden is None or args or options:
            return super().forward(hidden, *args, **options)
        return self.raw_logits(hidden)
