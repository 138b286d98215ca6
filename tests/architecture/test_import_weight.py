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


def test_bare_import_is_light():
    assert loaded_by("import accelerate", HEAVY + OPTIONAL) == []


def test_bare_import_resolves_what_downstream_reaches_for():
    program = (
        "import accelerate\n"
        "accelerate.utils.modeling, accelerate.utils.dataclasses, accelerate.hooks, accelerate.accelerator\n"
        "assert callable(accelerate.utils.tqdm)"
    )
    assert loaded_by(program, []) == []


def test_accelerator_loads_no_optional_library():
    assert loaded_by("from accelerate import Accelerator", OPTIONAL) == []


def test_a_prepared_step_loads_no_optional_library():
    program = (
        "import torch\nfrom accelerate import Accelerator\n"
        "a = Accelerator(cpu=True)\nm = torch.nn.Linear(2, 1)\n"
        "m, o = a.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1))\n"
        "a.backward(m(torch.ones(1, 2)).sum())\no.step()"
    )
    assert loaded_by(program, OPTIONAL) == []


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["config", "--help"]], ids=" ".join)
def test_help_loads_no_torch(arguments):
    program = (
        "import sys\nfrom accelerate.commands.accelerate_cli import main\n"
        f"sys.argv = ['accelerate', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert loaded_by(program, ["torch", "numpy", *OPTIONAL]) == []
