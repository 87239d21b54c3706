"""Mutated files of every kind that we read: each loads or is one clean error.

`python -m tests.fuzz --cases 100000 --jobs 2` is the long run; test_fuzz.py runs some cases of
each. A target is added with its module in `__main__.py`.
"""
