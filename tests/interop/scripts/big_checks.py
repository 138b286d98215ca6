"""Running many checks in one process, since importing the libraries costs more than most of them."""

import hashlib
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch


def digest(tensors):
    """Return a short text that differs when a bit, a shape, a dtype or a name does."""
    named = tensors.items() if isinstance(tensors, Mapping) else ((str(i), t) for i, t in enumerate(tensors))
    total = hashlib.sha256()
    for name, tensor in named:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + raw)
    return total.hexdigest()[:16]


def run(checks, quick):
    """Run the quick checks, those named on the command line, or `all`, each in a separate folder, and print what came of them.

    ``program FOLDER [CHECK ...]`` prints ``{"checks": {name: {"facts", "error"}}}``: what the check returned,
    and the traceback if it failed.
    """
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    names = list(checks) if chosen == ["all"] else chosen or list(quick)
    outcomes = {}
    for name in names:
        facts, error = None, None
        place = folder / name
        place.mkdir(parents=True)
        try:
            facts = checks[name](place)
        except Exception:  # the other checks are still worth knowing
            error = traceback.format_exc()[-6000:]
        outcomes[name] = {"facts": facts, "error": error}
    print(json.dumps({"checks": outcomes}), flush=True)
