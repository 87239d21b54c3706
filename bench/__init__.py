"""Benchmarks beside other libraries: `python -m bench kernels`, in a checkout, is bench/kernels.py.

CONTRIBUTING.md says how to run them and how to add one.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Run by its path, bench/kernels.py would pass for the package of that name
if sys.path and sys.path[0] and Path(sys.path[0]).resolve() == HERE:
    command = [sys.executable, "-m", "bench", Path(sys.argv[0]).stem, *sys.argv[1:]]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
