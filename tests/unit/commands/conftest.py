"""Commands run in a clean place, in process."""

import os
import sys

import pytest

from accelerate.commands import accelerate_cli


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_", "SLURM_", "OMPI_", "PMI", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def accelerate(monkeypatch, capsys):
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
