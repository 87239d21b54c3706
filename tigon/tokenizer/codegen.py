"""The code that jinja makes of a chat template, with what each part of it costs."""

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef

from tigon.tokenizer.budget import DEEPEST, NODE, TooMuch

MOST_SYMBOLS = 2**20  # names times blocks: jinja copies the names for each block
MOST_COMPARED = 32  # values, in one chain of comparisons
_CHEAP = (nodes.Const, nodes.Compare, nodes.Test, nodes.Not)


def check_tree(tree: nodes.Template) -> None:
    """Raises TooMuch for what takes long to compile, though its text is short."""
    names: set[str] = set()
    blocks = depth = 0
    level: list[nodes.Node] = [tree]
    while level:
        depth += 1
        names.update(node.name for node in level if isinstance(node, nodes.Name))
        blocks += sum(isinstance(node, nodes.Stmt) for node in level)
        if depth > DEEPEST:
            raise TooMuch(f"its expressions are nested deeper than {DEEPEST} levels")
        level = [child for node in level for child in node.iter_child_nodes()]
    if len(names) * blocks > MOST_SYMBOLS:
        raise TooMuch(f"it has {len(names)} names in {blocks} blocks and statements")


class Generator(CodeGenerator):
    """Writes calls of the environment in place of operations whose cost has no bound."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes: dict[int, int] = {}  # of nodes, by id
        self._defaults = 0  # size of those of the macro whose body comes next

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        # Statements of an if are paid for with those around it
        if not frame.soft_frame:
            size, self._defaults = 1 + self._defaults + sum(map(self._size, nodes)), 0
            self.writeline(f"environment.left -= {NODE * size}")
            self.writeline("if environment.left < 0: environment.exhausted()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # is computed for items that have no block
            paid = nodes.EnvironmentAttribute(f"paid({NODE * self._size(node.test)})")
            node.test = nodes.And(paid, node.test)
        super().visit_For(node, frame)

    def macro_body(
        self, node: nodes.Macro | nodes.CallBlock, frame: Frame
    ) -> tuple[Frame, MacroRef]:
        self._defaults = sum(map(self._size, node.defaults))
        return super().macro_body(node, frame)

    def visit_Block(self, node: nodes.Block, frame: Frame) -> None:
        if node.scoped:  # each would be given all names
            self._refuse(node, frame)
        super().visit_Block(node, frame)

    def _size(self, node: nodes.Node) -> int:
        size = self._sizes.get(id(node))
        if size is None:
            size = 1 + sum(map(self._size, node.iter_child_nodes()))
            if isinstance(node, nodes.Dict):  # keys may collide
                size += len(node.items) ** 2 // 16
            self._sizes[id(node)] = size
        return size

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Nothing else is computed before the template runs
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _call(self, name: str, frame: Frame, *arguments: nodes.Node | None) -> None:
        self.write(f"environment.{name}(")
        for i, argument in enumerate(arguments):
            self.write(", " if i else "")
            if argument is None:
                self.write("None")
            else:
                self.visit(argument, frame)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        if _is_number(node.left) or _is_number(node.right):
            super().visit_Add(node, frame)  # to add these takes forever to make a large one
            return
        parts: list[nodes.Node] = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            parts.append(node.right)
        self._call("add", frame, node.left, *reversed(parts))

    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:
        if _is_number(node.left) or _is_number(node.right):
            super().visit_Sub(node, frame)
        else:
            self._call("subtract", frame, node.left, node.right)

    def visit_Mul(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("multiply", frame, node.left, node.right)

    def visit_Pow(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("power", frame, node.left, node.right)

    def visit_Mod(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("modulo", frame, node.left, node.right)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.ExtensionAttribute):  # our own block
            self.visit(node.node, frame)
            self.write("(caller)")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._call("join_texts", frame, *node.nodes)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if len(node.ops) > MOST_COMPARED:
            self.fail(f"it compares more than {MOST_COMPARED} values at once", node.lineno)
        operands = [node.expr, *(part.expr for part in node.ops)]
        names = [part.op for part in node.ops]
        if all(map(_cheap, operands, operands[1:], names)):
            super().visit_Compare(node, frame)
        elif names in (["in"], ["notin"]):
            self.write("(not " if names == ["notin"] else "(")
            self._call("contains", frame, *operands)
            self.write(")")
        else:
            self.write("environment.compare(")
            self.visit(node.expr, frame)
            for part in node.ops:
                self.write(f", {part.op!r}, ")
                self.visit(part.expr, frame)
            self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._call("cut", frame, node.node, node.arg.start, node.arg.stop, node.arg.step)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._held(node, node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._held(node, [] if node.ctx == "store" else node.items, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        constant = all(
            isinstance(n, nodes.Const) for pair in node.items for n in pair.iter_child_nodes()
        )
        self.write("{" if constant else "environment.hold({")
        for pair in node.items:
            if isinstance(pair.key, nodes.Const):
                self.visit(pair.key, frame)
            else:
                self._call("key", frame, pair.key)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}" if constant else "})")

    def _held(self, node: nodes.Node, items: Iterable[nodes.Node], frame: Frame) -> None:
        write = getattr(CodeGenerator, f"visit_{type(node).__name__}")
        constant = all(isinstance(item, nodes.Const) for item in items)
        self.write("" if constant else "environment.hold(")
        write(self, node, frame)
        self.write("" if constant else ")")

    def visit_NSRef(self, node: nodes.NSRef, frame: Frame) -> None:
        if node.attr.startswith("_"):
            self.fail("a namespace has no private attributes", node.lineno)
        super().visit_NSRef(node, frame)

    def _refuse(self, node: nodes.Node, frame: Frame) -> None:
        self.fail(
            f"{type(node).__name__} is not available: a chat template is one file, as plain text",
            node.lineno,
        )

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
    visit_ScopedEvalContextModifier = visit_EvalContextModifier = _refuse


def _cheap(left: nodes.Node, right: nodes.Node, name: str) -> bool:
    """Whether comparing costs no more than the template's own text."""
    if name in ("in", "notin"):
        literal = isinstance(right, nodes.List | nodes.Tuple)
        return literal and all(isinstance(item, nodes.Const) for item in right.items)  # type: ignore[attr-defined]
    return isinstance(left, _CHEAP) or isinstance(right, _CHEAP)


def _is_number(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int | float)
