"""Run scripts, one after the other, on all ranks of one launch: several.py SCRIPT ... [WORD ...].

A check is a function of a script whose name begins with `check_`, with what the script says in `USUAL`, or with one of the words.
"""

import gc
import importlib
import sys
import time

import torch
from harness import ASKED, CPU, say

from accelerate.state import PartialState

if __name__ == "__main__":
    scripts = [word for word in sys.argv[1:] if word.endswith(".py")]
    words = tuple(sys.argv[1 + len(scripts) :])
    if ASKED:
        PartialState(cpu=CPU, **ASKED)
    gc.freeze()  # collections are many, and pass over what imports have left
    for script in scripts:
        start, module = time.monotonic(), importlib.import_module(script.removesuffix(".py"))
        begins = words or getattr(module, "USUAL", ("check_",))
        own = {
            name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        checks = [value for name, value in own.items() if name.startswith(begins)]
        assert checks, f"no check of {script} begins with {begins}"
        for check in checks:
            torch.manual_seed(0)
            check()
            say(f"ok {check.__name__}")
        say(f"done {script} in {time.monotonic() - start:.1f} s")
