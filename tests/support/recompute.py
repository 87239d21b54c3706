"""From which size on outputs are noted, to be computed again in backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tigon.kernels import recompute


@contextmanager
def recompute_above(min_bytes: float) -> Iterator[None]:
    """Notes outputs of at least `min_bytes`; infinity notes none."""
    with patch.object(recompute, "MIN_BYTES", min_bytes):
        yield
