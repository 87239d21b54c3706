"""Which ways the `if`s of kernels went while they were compiled: code that no form takes was not.

An `if` of what is known then (`is None`, constants, dtypes) is compiled one way at a time.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton.language as tl
from triton.compiler.code_generator import CodeGenerator

import tigon.kernels

# Of a test in a @triton.jit function: module, function, line and column in it; and whether it held
Way = tuple[str, str, int, int, bool]
taken: set[Way] = set()
LAUNCHED = "_kernel"  # how the names of kernels end; the others are functions that kernels call


def watch() -> None:
    """From now on compiling notes each way in `taken`."""
    visit = CodeGenerator.visit

    def watched(self: CodeGenerator, node: Any) -> Any:
        if isinstance(node, ast.If | ast.IfExp):
            node.test.decides = True
        result = visit(self, node)
        if getattr(node, "decides", False):
            place = self.jit_fn.__module__, self.jit_fn.__name__, node.lineno, node.col_offset
            on_device = isinstance(result, tl.tensor)  # both ways are compiled
            ways = (True, False) if on_device else (bool(getattr(result, "value", result)),)
            taken.update((*place, way) for way in ways)
        return result

    CodeGenerator.visit = watched


def missing(taken: set[Way], launched: set[str]) -> dict[str, str]:
    """By its place what is in no form: a kernel, or a way of an `if`."""
    found = {}
    for path, function in _jit_functions():
        name = f"{path.stem}.{function.name}"
        if function.name.endswith(LAUNCHED) and name not in launched:
            found[name] = "is in no form"
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.If | ast.IfExp):
                continue
            line, column = node.test.lineno - function.lineno + 1, node.test.col_offset
            place = _module_name(path), function.name, line, column
            ways = [str(way) for way in (True, False) if (*place, way) not in taken]
            if ways:
                test = ast.unparse(node.test)
                found[f"{name}, line {node.test.lineno}"] = f"{test}: never {' or '.join(ways)}"
    return found


def _module_name(path: Path) -> str:
    parts = path.relative_to(Path(tigon.__file__).parent).with_suffix("").parts
    return ".".join(("tigon", *parts))


def _jit_functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in sorted(Path(tigon.kernels.__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield path, node
