"""Importing the package, and asking the command line for help, must not load what they do not need."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "numpy", "safetensors", "huggingface_hub", "yaml", "psutil"]
# Installed by many users, needed by none of our imports; each costs between a tenth of a second and ten.
OPTIONAL = [
    "transformers",
    "deepspeed",
    "datasets",
    "pandas",
    "sklearn",
    "tensorboard",
    "wandb",
    "matplotlib",
    "tensorflow",
]


def loaded_by(program: str, names: list[str]) -> list[str]:
    """Run a program in a fresh interpreter and return which of `names` it has loaded."""
    probe = f"{program}\nimport json, sys\nprint('\\n' + json.dumps([n for n in {names!r} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


STEP = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
"""
# What downstream libraries reach for without a separate import.
PARTS = "import accelerate as a; a.utils.modeling, a.utils.dataclasses, a.hooks, a.accelerator; assert callable(a.utils.tqdm)"


LIGHT = (
    "utils.imports utils.environment utils.constants utils.dataclasses config.enums config.handlers runtime.failure"
)


@pytest.mark.cold
def test_importing_loads_nothing_heavy():
    modules = ["accelerate", *(f"accelerate.{name}" for name in LIGHT.split())]
    assert loaded_by(f"import {', '.join(modules)}", HEAVY + OPTIONAL) == []


def test_a_step_loads_no_optional_library():
    assert loaded_by(STEP, OPTIONAL) == []


def test_parts_are_reached_without_an_import_of_their_own():
    loaded_by(PARTS, [])


HELP = """
import sys
from accelerate.commands.accelerate_cli import commands, main
for words in ([], *([name] for name in commands()), ["config", "default"]):
    sys.argv = ["accelerate", *words, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""


@pytest.mark.cold
def test_help_loads_nothing_heavy():
    assert loaded_by(HELP, [*HEAVY, *OPTIONAL, "difflib"]) == []
