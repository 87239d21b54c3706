"""Triton's interpreter without work that it repeats: several times as fast, with the same results.

It replaces the functions of triton.language at each kernel's call and each call of a device
function, makes the same types and shapes again at each operation, and looks by a dozen operations
for an overflow of each sum of integers, of which it then says nothing.

Two casts are torch's, as a GPU rounds: to 8-bit floats, where the interpreter rounds ties away from
zero, drops the carry of a mantissa that is rounded up to a power of two, and makes numbers of NaN
(triton#11897); and to bfloat16, where it truncates.
"""

from builtins import tuple as fixed  # triton.language has a tuple of its own
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

# None in versions of Triton that have others
_replace: Any = getattr(interpreter, "_patch_lang", None)
_np_dtype: Any = getattr(interpreter, "_get_np_dtype", None)
_convert_float = interpreter._convert_float
_unwrap = core._unwrap_if_constexpr
_new_block = core.block_type.__init__
_new_tensor = core.tensor.__init__
_promoted = semantic.TritonSemantic.computation_type_impl
_semantic = semantic.TritonSemantic(interpreter.interpreter_builder)

_replaced: dict[int, Any] = {}  # for functions of which modules, by their globals
_np_dtypes: dict[str, Any] = {}  # by names of types, as all that follow
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_promotions: dict[tuple[str, bool, str, bool, bool], Any] = {}
PLAIN = (int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type)
NEVER_CONSTEXPR = frozenset(PLAIN)


def _replace_once(fn: Any) -> Any:
    """For good: nothing but kernels calls what is replaced, and all of them are interpreted."""
    key = id(fn.__globals__)
    if key not in _replaced:
        _replaced[key] = _replace(fn)
        _replaced[key]._changes.clear()  # so that nothing is put back
    return _replaced[key]


def _bind(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of triton.language as kernels call it."""
    function = getattr(member, "__wrapped__", member)  # without the check of `_semantic`

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, called)


def _known_np_dtype(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(dtype)
    return _np_dtypes[name]


def _unwrap_quickly(x: Any) -> Any:
    kind = type(x)
    if kind is core.constexpr:
        return x.value
    return x if kind in NEVER_CONSTEXPR else _unwrap(x)


def _known_block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape.values if type(shape) is core.tuple else shape
    key = element_ty.name, fixed([_unwrap_quickly(size) for size in sizes])
    if key not in _blocks:
        _new_block(self, element_ty, shape)
        _blocks[key] = {name: vars(self)[name] for name in vars(self) if name != "element_ty"}
    else:
        self.element_ty = element_ty
        vars(self).update(_blocks[key])


def _with_known_shape(self: Any, handle: Any, type: Any) -> None:
    sizes = fixed(type.shape.values) if type.is_block() else ()
    if sizes not in _shapes:
        _new_tensor(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _shapes[sizes]


def _known_promotion(
    self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
) -> Any:
    key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
    if key not in _promotions:
        _promotions[key] = _promoted(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return _promotions[key]


def _equal_types(self: Any, other: Any) -> bool:
    other = _unwrap_quickly(other)
    return self is other or (isinstance(other, core.dtype) and self.name == other.name)


def _rounded_by_torch(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    to_nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
    if (source, target) == (tl.bfloat16, tl.float32):
        return data.astype(np.uint32) << 16
    if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv) or not to_nearest:
        return _convert_float(data, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    if target == tl.bfloat16:
        return numbers.bfloat16().view(torch.uint16).numpy().reshape(data.shape)
    limited = numbers.clamp(-448, 448)  # as on a GPU, where torch 2.11 makes NaN of more
    return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)


def install() -> None:
    interpreter._convert_float = _rounded_by_torch
    if _replace is None or _np_dtype is None:
        return
    interpreter._patch_lang = _replace_once
    interpreter._patch_attr = _bind
    interpreter._get_np_dtype = _known_np_dtype
    core._unwrap_if_constexpr = _unwrap_quickly
    core.block_type.__init__ = _known_block
    core.tensor.__init__ = _with_known_shape
    core.dtype.__eq__ = _equal_types
    semantic.TritonSemantic.computation_type_impl = _known_promotion
    builder = interpreter.interpreter_builder  # which never tells of an overflow that it has found
    builder.options = replace(builder.options, sanitize_overflow=False)
