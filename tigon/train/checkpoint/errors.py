"""What went wrong on which rank, in one line."""

import torch.distributed as dist


def first_cause(error: BaseException) -> str:
    """What this rank met, or else the first one that failed, which is then named: who reports the
    error puts the number of this one in front. torch's CheckpointException has all of them, with
    tracebacks."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error) or type(error).__name__
    own = dist.get_rank() if dist.is_initialized() else 0
    rank = own if own in failures else min(failures)
    cause = failures[rank][0]
    text = str(cause) if isinstance(cause, OSError) else repr(cause)
    return text if rank == own else f"rank {rank}: {text}"
