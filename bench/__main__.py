"""`python -m bench` lists the benchmarks; `python -m bench NAME --help` says what one measures."""

import ast
import sys
from importlib import import_module

from bench import HERE, harness

COMMANDS = ("plan", "several_gpus")  # with a command line of their own


def titles() -> dict[str, str]:
    """The first line of each benchmark's docstring, by its name, without importing one."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        for name, text in texts.items()
        if "\nBENCH = Bench(" in text or name in COMMANDS
    }


if __name__ == "__main__":
    known = titles()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        print("\n".join(f"{name:20}{title}" for name, title in known.items()))
        sys.exit(len(sys.argv) > 1)
    name = sys.argv.pop(1)
    module = import_module(f"bench.{name}")
    if name in COMMANDS:
        module.main()
    else:
        harness.main(module.BENCH)
