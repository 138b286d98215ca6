"""Names that 1.15.0's modules hold, also those that they import from one another, are importable from the same modules."""

import json
import pathlib
import subprocess
import sys

RECORD = pathlib.Path(__file__).with_name("record") / "namespace-1.15.0.json"
# Cursor keys and escape sequences of a menu that is not ours.
EXEMPT = "accelerate.commands.menu"

PROGRAM = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
missing = {}
for module, names in json.load(open(sys.argv[1])).items():
    if module.startswith(sys.argv[2]):
        continue
    held = importlib.import_module(module)
    if gaps := [name for name in names if not hasattr(held, name)]:
        missing[module] = gaps
print(json.dumps(missing))
"""


def run(program: str, *words: str) -> str:
    """Run a program in a fresh interpreter and return its last line."""
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_every_recorded_name_is_importable():
    assert json.loads(run(PROGRAM, str(RECORD), EXEMPT)) == {}


LOOKUPS = """
import importlib
import accelerate.utils.operations as home
import accelerate.accelerator, accelerate.hooks, accelerate.utils.tqdm
before = {name: set(vars(module)) | set(dir(module)) for name, module in list(importlib.sys.modules.items())
          if name in ("accelerate.accelerator", "accelerate.hooks", "accelerate.utils.tqdm")}
assert accelerate.accelerator.gather is home.gather
home.gather = "replaced"
assert accelerate.accelerator.gather == "replaced"
from accelerate.hooks import send_to_device
from accelerate.utils.tqdm import PartialState
for name, names in before.items():
    module = importlib.sys.modules[name]
    assert set(vars(module)) | set(dir(module)) == names, name
try:
    accelerate.hooks.no_such_name
except AttributeError as error:
    print(error)
"""


def test_names_are_looked_up_in_their_homes_at_each_use():
    assert run(LOOKUPS) == "module 'accelerate.hooks' has no attribute 'no_such_name'"
