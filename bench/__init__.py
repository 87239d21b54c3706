"""Benchmarks beside other libraries: `python -m bench kernels`, in a checkout, is bench/kernels.py.

CONTRIBUTING.md says how to run them and how to add one.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
