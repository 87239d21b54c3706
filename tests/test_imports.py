"""The arrows between packages: imports run down only, at the top of the file, without cycles.

Those for annotations alone, under TYPE_CHECKING, count as any other.
"""

import ast
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Who may import whom; what an arrow leads to may be imported too
ARROWS: dict[str, set[str]] = {
    "utils": set(),
    "version": set(),
    "kernels": {"utils"},
    "hub": {"utils"},
    "tokenizer": {"hub"},
    "settings": {"tokenizer"},
    "weights": {"hub"},
    "distributed": {"kernels"},
    "layers": {"distributed"},
    "generation": {"layers"},
    "models": {"generation", "settings", "weights"},
    "parallel": {"models"},
    "data": {"settings", "weights"},
    "report": {"settings"},
    "train": {"data", "parallel", "report", "version"},
    "plan": {"train"},
    "auto_layout": {"plan"},
    "eval": {"data", "models"},
    "integrations": {"eval", "train"},
    "serve": {"models", "tokenizer"},
    "cli": {"eval", "integrations", "plan", "serve", "train"},
    "__main__": {"cli"},
}
# These load at run time what is below them: torch takes seconds, which neither --help needs nor the
# processes that tokenise
LAZY = {"tigon", "tigon.cli.main", "tigon.tokenizer.tokenizer"}
# The files of layers and models that exchange tensors between ranks; the others are told nothing of
# ranks, since tigon.parallel puts other modules in their place
EXCHANGING = {
    "tigon.layers",  # names ContextShard
    "tigon.layers.context",
    "tigon.layers.embedding",
    "tigon.layers.lm_head",
    "tigon.layers.lora",
    "tigon.layers.moe",
    "tigon.models.base",
}
# Imports what a user names
BY_NAME = {"tigon.train.callbacks"}
# Takes a second and 25 MB, which models of one process do without
SLOW = {
    ("tigon.parallel.fsdp", "torch.distributed.fsdp"),
    ("tigon.kernels.precompile", "torch._subclasses"),
}
# The planner imports the trainer, which imports it for parallel=auto alone
ABOVE = {"tigon.train.auto_layout": "auto_layout"}
# Integrations need packages that an installation may lack
LATE = {
    ("tigon.train.build", "tigon.train.auto_layout"),
    ("tigon.train.benchmarks", "tigon.integrations.ranks"),
    ("tigon.train.benchmarks", "tigon.integrations.tasks"),
    ("tigon.cli.commands", "tigon.integrations.tasks"),
}
# What is built on an extra, and imported where it is asked for
BUILT_ON_EXTRAS = {"integrations", "serve"}
# Extras; imported where they are used, with an error that says what to install
OPTIONAL = {
    "datasets",
    "filelock",
    "flash_attn",
    "gguf",
    "lm_eval",
    "matplotlib",
    "multiprocess",
    "pyarrow",
    "starlette",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
    "uvicorn",
    "wandb",
}
IMPORT_NAMES = {"pyyaml": "yaml"}


@dataclass(frozen=True)
class Import:
    module: str  # who imports
    path: Path
    line: int
    target: str  # the module imported
    local: bool  # inside a function

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}: {self.module} imports {self.target}"


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted((root / "tigon").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for line, target, local in parsed(name, package, path.read_text(), frozenset(known)):
        yield Import(name, path, line, target, local)


@cache  # the trees that tests make differ from this one in one file
def parsed(
    name: str, package: str, text: str, known: frozenset[str]
) -> list[tuple[int, str, bool]]:
    """Line, target and whether it is inside a function, of each import."""

    def visit(node: ast.AST, local: bool) -> Iterator[tuple[int, str, bool]]:
        for target in targets(node):
            yield getattr(node, "lineno", 0), target, local
        local = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, local)

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(above) if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base
        elif isinstance(node, ast.Call) and name not in LAZY | BY_NAME:
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__"):
                yield f"{called}()"

    return list(visit(ast.parse(text), False))


def package(module: str) -> str:
    return ABOVE.get(module) or (module.split(".")[1] if "." in module else module)


def below(name: str) -> set[str]:
    return ARROWS[name].union(*(below(other) for other in ARROWS[name]))


def dependencies(root: Path) -> set[str]:
    """Import names of what an installation without extras brings."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    names = {d.split(";")[0].split(">")[0].split("=")[0].strip() for d in project["dependencies"]}
    return {IMPORT_NAMES.get(name, name) for name in names}


def violations(root: Path) -> list[str]:
    known = modules(root)
    found = [i for name, path in known.items() for i in imports(name, path, known)]
    required = dependencies(root)
    wrong = []
    graph: dict[str, set[str]] = {}
    for i in found:
        top = i.target.split(".")[0]
        if top == "tigon":
            graph.setdefault(i.module, set()).add(i.target)
            wrong += [f"{i.where}, {fault}" for fault in faults(i)]
        elif top in OPTIONAL or i.target in OPTIONAL:
            if not i.local and package(i.module) not in BUILT_ON_EXTRAS:
                wrong.append(f"{i.where}, which is optional, at the top of the file")
        elif top.endswith("()"):
            wrong.append(f"{i.where}, which hides an import")
        elif i.local and (i.module, i.target) not in SLOW:
            wrong.append(f"{i.where}, inside a function")
        elif top not in required | sys.stdlib_module_names:
            wrong.append(f"{i.where}, no dependency")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"cycle: {' <- '.join(error.args[1])}")
    return wrong


def faults(i: Import) -> Iterator[str]:
    source, target = package(i.module), package(i.target)
    if i.local and (i.module, i.target) in LATE:
        return
    if i.local:
        yield "inside a function"
    if source in ("tigon", target):  # tigon itself is above everything
        return
    if target == "tigon":
        yield "which is above everything"
    elif source not in ARROWS or target not in ARROWS:
        yield f"and ARROWS has no row for {source if source not in ARROWS else target}"
    elif target not in below(source):
        yield "against the arrows"
    elif target == "distributed" and source in ("layers", "models") and i.module not in EXCHANGING:
        yield "which is for ranks"


def test_arrows() -> None:
    assert violations(ROOT) == []


def test_every_module_is_read() -> None:
    known = modules(ROOT)
    assert {package(name) for name in known} - {"tigon"} == set(ARROWS)
    found = {(i.module, i.target) for name in known for i in imports(name, known[name], known)}
    assert {
        ("tigon.models.pretrained.load", "tigon.weights"),
        ("tigon.models.causal_lm", "tigon.models.pretrained.load"),
        ("tigon.tokenizer.tokenizer", "tigon.hub"),
        ("tigon.layers.norm", "tigon.kernels.norm.rms_norm"),
        ("tigon.eval.parity", "transformers"),
    } <= found


BREACHES = {
    "kernels/rope/rope.py": ("from tigon.layers import KVCache", "against the arrows"),
    "kernels/mlp/gated_act.py": ("from ...layers.mlp import GatedMLP", "against the arrows"),
    "hub.py": ("import tigon", "which is above everything"),
    "layers/mlp.py": ("if True:\n    from tigon import models", "against the arrows"),
    "models/decoder.py": ("from tigon.distributed.collectives import Ranks", "for ranks"),
    "layers/attention.py": ("import tigon.distributed.all_reduce", "for ranks"),
    "models/llama.py": ("def f():\n    from tigon.layers import MLP", "inside a function"),
    "layers/rope.py": (
        "from importlib import import_module\nimport_module('x')",
        "hides an import",
    ),
    "layers/norm.py": ("import transformers", "which is optional, at the top of the file"),
    "layers/linear.py": ("import requests", "no dependency"),
    "layers/kv_state.py": ("from tigon.layers.attention import Attention", "cycle: "),
    "weights/header.py": (
        "import typing\nif typing.TYPE_CHECKING:\n    from tigon.models import CausalLM",
        "against the arrows",
    ),
    "tools.py": ("from tigon.layers import KVCache", "ARROWS has no row for tools"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "tigon", root / "tigon")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.mark.parametrize("file", BREACHES)
def test_breaches_are_found(file: str, tree: Path) -> None:
    line, message = BREACHES[file]
    path = tree / "tigon" / file
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    found = violations(tree)
    path.unlink() if before is None else path.write_text(before)
    assert any(message in text for text in found), found
