"""How the programs of downstream libraries are started, and how their figures are read."""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
# The peer's wheel, unpacked by `make`: a program that finds it first on its path runs on it.
PEER = ROOT / ".cache" / "peer" / "1.15.0"
NO_PEER = "the peer's wheel is not there; `make test` fetches it"
LIMIT_S = 400


def need(*libraries):
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; `make test-interop` installs it")


def need_peer():
    if not PEER.exists():
        pytest.skip(NO_PEER)


def starter(processes, ours):
    """Return the command that starts a program on so many processes; the program follows."""
    python = sys.executable
    if processes == 1:
        return [python]
    if ours:
        options = ["--cpu", "--num_processes", str(processes)]
        return [python, "-m", "accelerate.commands.accelerate_cli", "launch", *options]
    # The peer's launcher starts one process on the CPU; torchrun starts as many as it is told.
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def finished(command, code=0, cwd=None, **variables):
    """Run a command offline, on the CPU and with one thread, and make sure of its exit code."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    if importlib.util.find_spec("transformers") is not None and Version(version("transformers")) < Version("4.57"):
        settings["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # or it cannot read its own generators with a newer torch
    environment = {**os.environ, **settings, **variables}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def on_peer(variables=None):
    """Return environment variables with which a program runs on the peer's package."""
    paths = [*filter(None, [(variables or {}).get("PYTHONPATH")]), str(PEER)]
    return {**(variables or {}), "PYTHONPATH": os.pathsep.join(paths)}


def last_figures(done):
    """Return the figures that a program has printed last, and what it wrote to stderr."""
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return {**json.loads(lines[-1]), "stderr": done.stderr}


def figures(script, folder, processes, ours, *arguments, **variables):
    """Run a script on this package or on the peer's, and return the figures it prints."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*starter(processes, ours), str(SCRIPTS / script), str(folder), *arguments]
    return last_figures(finished(command, **(variables if ours else on_peer(variables))))
