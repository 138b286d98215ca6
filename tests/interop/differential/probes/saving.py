"""Saving models and objects: shards, names, content."""

import pathlib
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from interop.differential.core import attempt, probe
from interop.differential.probes.checkpoints import PUBLIC, files, model


@probe(PUBLIC, folder=["a/b/c", "file", "", None], what=["model", "none", "state"])
def model_places(folder: Any, what: str) -> Iterator[tuple[str, Any]]:
    accelerator = Accelerator(cpu=True)
    pathlib.Path("file").write_text("x")
    given = {"model": model(), "none": None, "state": model().state_dict()}[what]
    yield "returned", attempt(accelerator.save_model, given, folder)
    yield "files", files()
