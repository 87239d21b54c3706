"""What went wrong on which rank, in one line."""


def first_cause(error: BaseException) -> str:
    """What the first rank that failed met; torch's CheckpointException has all with tracebacks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error) or type(error).__name__
    rank = min(failures)
    first = failures[rank][0]
    return str(first) if isinstance(first, OSError) else f"rank {rank}: {first!r}"
