"""Mutated files of others: each loads or is one clean error.

`python -m tests.fuzz --cases 100000` is the long run; test_fuzz.py runs some cases of each target.
"""
