"""Reading a checkpoint: the state of every object is read and compared with the object. No object is changed.

The result is `apply.Contents`: for each object what gives it its state.
"""

import logging
import os
import re
from functools import partial
from typing import Any

import torch

from accelerate.base.constants import SCALER_NAME
from accelerate.checkpoint import apply, layouts, manifest
from accelerate.checkpoint.apply import Contents
from accelerate.checkpoint.state import LOADERS, POSITIONS, Kind, keeps_state
from accelerate.checkpoint.stored import read_whole
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.runtime import durable
from accelerate.runtime.run import Run

logger = logging.getLogger(__name__)

_CUSTOM = re.compile(rf"{manifest.CUSTOM_NAME}_{manifest.NUMBER}\.pkl")


def tensor_device(map_location: str | None, device: torch.device) -> Any:
    """Return the device that tensors are read to: the CPU, from where loading copies, or that of the rank."""
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r} is not supported; pass None, 'cpu' or 'on_device'.")
    return device if map_location == "on_device" else "cpu"


def read(run: Run, contents: Contents, options: dict[str, Any]) -> None:
    """Read all states. A rank that fails continues, because models may be read by collectives, and raises at the end.

    Collective: call on every rank.

    Args:
        run: Has the objects.
        contents: Takes what is read of its folder, which is verified, but for the shards that are read here.
        options: ``map_location``, ``load_kwargs``, and ``model_options`` of the models' `load_state_dict`.
    """
    folder, state_io, problems = contents.folder, run._state_io, list[Exception]()
    file_options = {key: options[key] for key in ("map_location", "load_kwargs")}

    def read_optimizer(index: int, optimizer: Any) -> None:
        if (change := state_io.load_optimizer(run, optimizer, folder, index, **file_options)) is not None:
            contents.changes.append(change)

    steps = [
        partial(_read_others, run, contents, options["load_kwargs"]),
        *[partial(read_optimizer, index, optimizer) for index, optimizer in enumerate(run._optimizers)],
        partial(_read_models, run, contents, options),
    ]
    for step in steps:
        try:
            step()
        except Exception as error:
            problems.append(error)
            if run.num_processes == 1:
                break
    if problems:
        raise problems.pop(0)  # which this frame then does not keep
    beyond = manifest.random_states_file(run.num_processes)
    if run.process_index == 0 and os.path.exists(os.path.join(folder.path, beyond)):
        # Ranks that are new warn themselves.
        logger.warning(
            f"{folder} was saved by more processes than the {run.num_processes} running now (it has {beyond}). Its "
            "weights and positions in the data load, but the ranks draw other random numbers and other samples than before."
        )


def _read_others(run: Run, contents: Contents, load_kwargs: dict[str, Any] | None) -> None:
    for extension_loads in run.extensions.loading:
        extension_loads(contents.folder.path)
    saved = sum(1 for name in contents.folder.files() if _CUSTOM.fullmatch(name))
    if saved != len(contents.common.custom):
        raise RuntimeError(
            f"{contents.folder!r} has the states of {saved} registered objects, but {len(contents.common.custom)} are registered. Register the "
            "same objects in the same order with `accelerator.register_for_checkpointing` before loading."
        )
    read_common(contents, load_kwargs)
    contents.unclaimed = _unclaimed_states(run, contents)


def _read_models(run: Run, contents: Contents, options: dict[str, Any]) -> None:
    """Let the hooks load what they want to load, and read the other models. Models come last, because hooks change them."""
    state_io, places = run._state_io, range(len(run._models))
    # Shards have the numbers of all models, whatever hooks of `save_state` did; full weights of those that they left.
    for number, place in enumerate(_left_by_hooks(run, contents) if run._load_model_state_pre_hook else places):
        index = place if state_io.saves_shards else number
        contents.changes.append(state_io.load_model(run, run._models[place], contents.folder, index, **options))


def _left_by_hooks(run: Run, contents: Contents) -> list[int]:
    """Call the hooks, which remove from a list of models those that they load; return the places of the others."""
    inner = [run._strategy.unwrap_model(model, keep_torch_compile=False) for model in run._models]
    shown = [not run._state_io.owns_state(model) for model in run._models]
    left = [model for model, is_shown in zip(inner, shown, strict=True) if is_shown]
    contents.undo_steps += map(apply.kept_tensors, left)
    for hook in list(run._load_model_state_pre_hook.values()):
        hook(left, os.fspath(contents.folder))
    kept = {id(model) for model in left}
    return [place for place, model in enumerate(inner) if id(model) in kept or not shown[place]]


# -- what every strategy saves -----------------------------------------------------------------------------------------


def read_file(
    folder: durable.Path, file: str, what: str = "", map_location: Any = None, load_kwargs: Any = None
) -> Any:
    """Read safetensors, or torch's format without running code of the file.

    A file that is missing is None if `what`, whose state it is, is empty.

    Not a collective.
    """
    path = os.path.join(folder, file)
    if not os.path.lexists(path):
        if not what:
            return None
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no state for {what}: {file} is missing. Prepare what was saved, in the same "
            "order, or load another folder."
        )
    return read_whole(path, map_location, load_kwargs)


def read_common(contents: Contents, load_kwargs: dict[str, Any] | None = None) -> None:
    """Read the states of what every strategy saves.

    FileNotFoundError names a missing file; ValueError an interrupted epoch whose loader has other data now.

    Not a collective.
    """
    common, folder = contents.common, contents.folder
    read_state = partial(read_file, folder, load_kwargs=load_kwargs)
    file = manifest.random_states_file(common.process_index)
    contents.is_new = (random := read_state(file)) is None
    random = read_state(manifest.random_states_file(0)) if contents.is_new else random
    if not isinstance(random, dict | None):
        raise RuntimeError(f"{folder}/{file} is damaged: it holds a {type(random).__name__}, not a dict of states.")
    contents.random = random
    for obj, file, what in common.shared():
        state = read_state(file, what)
        if state is None and obj is common.scaler:
            logger.warning("%s has no %s: the scale of gradients starts again.", folder, file)
        else:
            contents.changes.append(apply.object_change(obj, state, file))
    # A rank that did not exist when the checkpoint was saved must draw the same epoch as the others.
    random = random or {}
    positions, states = random.pop(POSITIONS, None) or [], random.pop(LOADERS, None) or {}
    contents.saved_loaders, contents.schedule_units = len(positions), random.pop(apply.SCHEDULE_UNITS, None)
    for index, loader in enumerate(common.loaders()):
        state, position = None, None
        if keeps_state(loader):
            file = manifest.dataloader_file(index)
            # Former formats have a file of each rank.
            former = f"rank{common.process_index}_{file}"
            state = states[index] if index in states else read_state(former) or read_state(file)
        if index < len(positions) and isinstance(loader, PreparedLoader):
            position = positions[index]
        if position is not None and loader.continue_after_load:
            resume.check(loader, dict(position), f"Data loader {index} (in the order of prepare)")
        contents.changes.append(apply.loader_change(loader, state, position))


# -- states that no object takes ---------------------------------------------------------------------------------------


def _unclaimed_states(run: Run, contents: Contents) -> list[str]:
    """Return a name for each state in the checkpoint that no prepared object takes.

    Raises:
        RuntimeError: Nothing is prepared or registered, and the checkpoint holds states.
    """
    folder, common = contents.folder, contents.common
    files = folder.files()
    unclaimed = [*_beyond(folder, "model", len(run._models)), *_beyond(folder, "optimizer", len(run._optimizers))]
    number = len(common.schedulers)
    while (file := manifest.scheduler_file(number)) in files:
        unclaimed.append(f"scheduler {number} ({file})")
        number += 1
    if common.scaler is None and SCALER_NAME in files:
        unclaimed.append(f"the gradient scaler ({SCALER_NAME})")
    unclaimed += [
        f"the position of data loader {number}" for number in range(len(common.dataloaders), contents.saved_loaders)
    ]
    objects = run._models, run._optimizers, run._schedulers, run._dataloaders, common.custom
    if unclaimed and not any(objects) and not run._load_model_state_pre_hook:
        raise RuntimeError(
            f"load_state({folder!r}): nothing is prepared or registered, so the checkpoint's states cannot be restored: "
            f"{', '.join(unclaimed)}. Call `accelerator.prepare` before `load_state`."
        )
    return unclaimed


def _beyond(folder: CheckpointFolder, kind: Kind, number: int) -> list[str]:
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
