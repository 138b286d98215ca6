"""Commands run in a clean place, in process."""

import sys

import pytest

from accelerate.commands import accelerate_cli


@pytest.fixture(autouse=True)
def clean(place):
    """Every test of a command runs in a separate place."""


@pytest.fixture
def accelerate(place, monkeypatch, capsys):
    """Run the console script; returns exit status, output and errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["accelerate", *words])
        status = 0
        try:
            accelerate_cli.main()
        except SystemExit as exit:
            status = exit.code or 0
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def refused(accelerate):
    """Run what is refused: with status 2, nothing on stdout, and one line on stderr, which is returned."""

    def run(*words):
        status, out, err = accelerate(*map(str, words))
        assert (status, out, len(err.splitlines())) == (2, "", 1) and err.startswith("accelerate "), err
        assert ": error: " in err
        return err

    return run
