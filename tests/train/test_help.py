"""`tigon train --help` prints a file, made from the settings; `python -m tests.train.test_help`
writes it."""

from pathlib import Path

import pytest

import tigon.train
from tigon.cli import main
from tigon.train.usage import help_text

HELP = Path(tigon.train.__file__).with_name("help.txt")


def test_the_file_has_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert HELP.read_text() == help_text(), "run python -m tests.train.test_help"
    assert main(["train", "--help"]) == 0
    told = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train"])
    tigon.train.main(["--help"])
    assert capsys.readouterr().out == told


if __name__ == "__main__":
    HELP.write_text(help_text())
