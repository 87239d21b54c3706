"""Commands of tigon in the process of a test."""

from collections.abc import Callable

import pytest

from tigon.cli import main


@pytest.fixture
def tigon(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that succeeds; what it prints."""

    def run(*arguments: object) -> str:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert (status, err) == (0, "")
        return out

    return run
