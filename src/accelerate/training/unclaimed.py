"""Find states of a checkpoint that no prepared object takes."""

import os
from collections.abc import Collection

from accelerate.base.constants import SCALER_NAME
from accelerate.checkpoint import layouts, manifest
from accelerate.checkpoint.load import CheckpointFolder, Contents
from accelerate.checkpoint.state import Kind
from accelerate.training.run import TrainingRun


def unclaimed_states(accelerator: TrainingRun, contents: Contents) -> list[str]:
    """Return a name for each state in the checkpoint that no prepared object takes.

    Raises:
        RuntimeError: Nothing is prepared or registered, and the checkpoint holds states.
    """
    folder, common = contents.folder, contents.common
    listed = folder.listing.files if isinstance(folder, CheckpointFolder) else ()
    files: Collection[str] = listed or os.listdir(folder)
    unclaimed = [
        *_beyond(folder, "model", len(accelerator._models)),
        *_beyond(folder, "optimizer", len(accelerator._optimizers)),
    ]
    number = len(common.schedulers)
    while (file := manifest.scheduler_file(number)) in files:
        unclaimed.append(f"scheduler {number} ({file})")
        number += 1
    if common.scaler is None and SCALER_NAME in files:
        unclaimed.append(f"the gradient scaler ({SCALER_NAME})")
    taken = range(len(common.dataloaders), contents.saved_loaders)
    unclaimed += [f"the position of data loader {number}" for number in taken]
    has_objects = any(
        (
            accelerator._models,
            accelerator._optimizers,
            accelerator._schedulers,
            accelerator._dataloaders,
            common.custom,
        )
    )
    if unclaimed and not has_objects and not accelerator._load_model_state_pre_hook:
        raise RuntimeError(
            f"load_state({str(folder)!r}): nothing is prepared or registered, so the checkpoint's states cannot be restored: "
            f"{', '.join(unclaimed)}. Call `accelerator.prepare` before `load_state`."
        )
    return unclaimed


def _beyond(folder: str, kind: Kind, number: int) -> list[str]:
    """Return a name for each saved model or optimizer from `number` on."""
    names: list[str] = []
    while True:
        try:
            found = layouts.find(folder, kind, number)
        except ValueError:  # files of single ranks, which only their own version reads
            return [*names, f"{kind} {number}"]
        if found is None:
            return names
        names.append(f"{kind} {number} ({found.name})")
        number += 1
