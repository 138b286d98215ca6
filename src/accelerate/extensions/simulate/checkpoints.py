"""Checkpoints of a simulated run: this rank's files are planned and measured, and nothing is published or read."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import formats
from accelerate.checkpoint.choose import Search, refused
from accelerate.checkpoint.save import THREADS, Save, SavePlan
from accelerate.checkpoint.storage import LocalStorage
from accelerate.extensions.simulate import simulated
from accelerate.runtime import torch_private
from accelerate.training.run import TrainingRun

_NOTE = "save_state wrote nothing, and load_state read nothing: tensors keep the values that they have."


@dataclass(slots=True)
class MeasuredSave(Save):
    """Goes through the steps of a save without other ranks, and remembers the sizes of files in their place."""

    _scratch: tempfile.TemporaryDirectory[str] = field(init=False)

    def begin(self, former: BaseException | None = None) -> None:
        """Make the plan for a folder that only hooks write into, which goes away."""
        if former is not None:
            raise former
        self.check_target(self.storage)
        formats.refuse_unreadable(self.storage.location)
        self._scratch = tempfile.TemporaryDirectory(prefix="accelerate-simulated-", ignore_cleanup_errors=True)
        first = (self.group.local_rank if self.group.each_node else self.group.rank) == 0
        self.plan = SavePlan(self._scratch.name, self.group.rank, first)

    def check_collected(self) -> None:
        """Raise what went wrong in collecting the state."""
        if self.problem is not None:
            self._scratch.cleanup()
            raise self.problem

    def finish(self, threads: int = THREADS) -> None:
        """Remember what would have been written."""
        self.check_collected()
        files = _sizes(self.plan)
        for folder, _, names in os.walk(self._scratch.name):
            paths = [os.path.join(folder, name) for name in names]
            files |= {os.path.relpath(path, self._scratch.name): os.path.getsize(path) for path in paths}
        self._scratch.cleanup()
        run = simulated.current()
        run.saves.append(simulated.Written(self.storage.location, files))
        run.notes[_NOTE] = None


def _sizes(plan: SavePlan) -> dict[str, int]:
    """Return the approximate bytes of each file; for a folder of shards all of this rank, of which replicas write a part each."""
    leaves = {name: torch_private.pytree.tree_leaves(value) for name, value in plan.contents().items()}
    return {name: sum(map(_bytes_of, values)) for name, values in leaves.items()}


def _bytes_of(value: Any) -> int:
    local = torch_private.local_part(value)
    return local.nbytes if isinstance(local, torch.Tensor) else len(value) if isinstance(value, bytes) else 0


def read(accelerator: TrainingRun, search: Search, options: Any, missing_ok: bool) -> Path | str | None:
    """Find what would be loaded, also among what would have been saved; nothing changes."""
    run, location = simulated.current(), search.storage.location
    saved = [save.location for save in run.saves]
    saved = [path for path in saved if path == location or (search.latest and os.path.dirname(path) == location)]
    answer = {"location": saved[-1], "following": None} if saved else search.answer()
    if (refusal := refused(answer)) is not None:
        if missing_ok and answer["nothing"]:
            return None
        raise refusal
    run.loads.append(answer["location"])
    run.notes[_NOTE] = None
    if answer["following"] is not None:
        accelerator.project_configuration.iteration = answer["following"]
    return Path(answer["location"]) if isinstance(search.storage, LocalStorage) else answer["location"]
