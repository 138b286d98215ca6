"""Giving objects their states: first the objects that may refuse theirs, then, when no rank has refused, all that cannot fail.

A `Change` gives one object its state. `begin` applies the changes that may be refused, and remembers what undoes them. The ranks agree that
none was refused. Then `complete` applies the rest, or every rank calls `undo`.

Most states are in new memory by then. Shards in plain host memory are not, because it has no room for a second copy: `complete` reads them
from the disk into the objects, and drops the undo steps first. So it may fail, with OSError as DamagedCheckpoint, and leave some objects
with the checkpoint's state.
"""

import inspect
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import manifest, plain_data
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.model_io import inner_optimizer
from accelerate.checkpoint.state import Common, keeps_state
from accelerate.checkpoint.stored import Plan
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.modules import tensor_kinds
from accelerate.runtime import generators
from accelerate.scheduler import AcceleratedScheduler

logger = logging.getLogger(__name__)

Undo = Callable[[], Any]


@dataclass(frozen=True)
class Change:
    """Gives one object its state, which has been read.

    Attributes:
        apply: Gives it.
        keep: Returns what gives back the former state; None if `apply` cannot be refused, because names and shapes were compared.
        owner: The object, and the file of its state, for errors.
        fill: Plans that read the rest over the object's own tensors, once no rank has refused.
    """

    apply: Callable[[], Any]
    keep: Callable[[], Undo] | None = None
    owner: tuple[Any, str] | None = None
    fill: Sequence[Plan] = ()


@dataclass
class Contents:
    """What was read of a checkpoint.

    Attributes:
        changes: Give objects their states.
        saved_loaders: How many loaders have a position in the checkpoint.
        unclaimed: Names of the states that no prepared object takes.
        schedule_units: What `schedule_units` returned in the run that saved; None where it was not saved.
        random: Random states and step count of this rank, or None.
        is_new: This rank has none; ``random`` has those of the first rank, if any, from which its own are derived.
        changed_schedules: A line for each schedule whose rate may differ from the uninterrupted run; from `complete` on.
        undo_steps: Undo what has been applied, by changes and by hooks of the user that load models.
        attributes: What the Accelerator takes over; from `complete` on.
    """

    folder: CheckpointFolder
    common: Common
    changes: list[Change] = field(default_factory=list)
    saved_loaders: int = 0
    unclaimed: list[str] = field(default_factory=list)
    schedule_units: list[int] | None = None
    random: dict[str, Any] | None = None
    is_new: bool = False
    changed_schedules: list[str] = field(default_factory=list)
    undo_steps: list[Undo] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Apply the changes that may be refused; the caller undoes them if one is.

        Collective: call on every rank.
        """
        for change in self.changes:
            if change.keep is None:
                continue
            self.undo_steps.append(change.keep())
            try:
                change.apply()
            except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
                # A program may catch the error class that its object raises.
                if change.owner is None or type(error).__module__ != "builtins":
                    raise
                obj, file = change.owner
                kind = ValueError if type(error) is ValueError else RuntimeError
                raise kind(
                    f"{type(obj).__name__} refuses its state in {os.path.join(self.folder, file)!r}; nothing was loaded. "
                    f"{type(error).__name__}: {error}"
                ) from error

    @torch.no_grad()
    def undo(self) -> None:
        """Give back what the objects had before; nothing, once all is complete. Not a collective."""
        while self.undo_steps:
            try:
                self.undo_steps.pop()()
            except Exception as error:  # the others are still to be undone
                logger.error("A former state could not be given back: %s: %s", type(error).__name__, error)

    def complete(self) -> "Contents":
        """Apply all other changes, and restore schedules and generators; nothing can be undone from here on.

        Collective: call on every rank.

        Raises:
            DamagedCheckpoint: A file could not be read any more; some objects have their new state.
        """
        self.undo_steps.clear()
        try:
            for change in self.changes:
                # First, because a model may give copies as its state, which `apply` then puts into it.
                for read_tensors in change.fill:
                    read_tensors()
                if change.keep is None:
                    change.apply()
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.folder} changed while it was loaded: {error}. Some of the state is the checkpoint's, and some is what it was before. "
                "Load again, and replace files by a rename."
            ) from error
        self.changed_schedules = _restore_schedules(self.common, self.folder, self.schedule_units)
        states, rank, device = dict(self.random or {}), self.common.process_index, self.common.device
        file = manifest.random_states_file(rank)
        self.attributes = {"step": states.pop("step")} if "step" in states else {}
        if self.random is None:
            logger.warning(f"{self.folder} has no {file}: rank {rank} keeps its random states, draws other numbers.")
        elif self.is_new:
            generators.derive(states, rank, device, f"{self.folder} has no {file}")
        else:
            generators.restore(states, device, f"{self.folder}/{file}")
        return self


# -- the change of each kind of object ---------------------------------------------------------------------------------


def object_change(obj: Any, state: Any, file: str) -> Change:
    """Return what gives an object its state by `load_state_dict`."""
    return Change(partial(obj.load_state_dict, state), partial(_kept_state, obj), (obj, file))


def _kept_state(obj: Any) -> Undo:
    return partial(obj.load_state_dict, plain_data.deep_copied(obj.state_dict()))


def optimizer_change(optimizer: Any, state: Any, file: str, fill: Sequence[Plan] = ()) -> Change:
    """Return what gives an optimizer its state, whose tensors it may keep; plans `fill` those that it has already."""

    def apply() -> None:
        inner.load_state_dict(dict(tensor_kinds.rebuilt(inner, state)))

    def keep() -> Undo:
        if not uses_torch_load(inner):  # its own code, or that of a hook, may change the tensors that it has
            return _kept_state(inner)
        # Torch's code replaces the tensors. Loading the former state again would give them the dtypes of the parameters.
        return partial(inner.__setstate__, {"state": inner.state, "param_groups": inner.param_groups})

    inner = inner_optimizer(optimizer)
    return Change(apply, keep, (optimizer, file), fill)


def uses_torch_load(optimizer: Any) -> bool:
    """Return whether loading puts tensors into an optimizer as they are: torch's own code does it, and no hook."""
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not (
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    )


def loader_change(loader: Any, state: Any | None, position: dict[str, Any] | None) -> Change:
    """Return what puts a loader into the epoch it was in, with the same order of samples.

    A loader that was being iterated continues after the batches that it had yielded, unless ``continue_after_load`` is off. A
    loop that was left early, as evaluation loops are, begins again; ``skip_first_batches`` may skip its batches.
    """

    def apply() -> None:
        if position is None and isinstance(loader, PreparedLoader):
            extent = (
                "only where it stood in it" if state is not None else "nor where it stood in it (skip_first_batches)"
            )
            logger.info(
                "The checkpoint does not have the epoch of a loader, %s. Call set_epoch on the loader.", extent
            )
        if state is not None and (position is None or loader.continue_after_load):
            loader.load_state_dict(state if position is None else {**state, resume.KEY: dict(position)})
        elif position is not None:
            resume.restore(loader, dict(position), continuing=loader.continue_after_load)

    def keep() -> Undo:
        steps = [resume.kept(loader)] if isinstance(loader, PreparedLoader) else []
        if keeps_state(loader):
            steps.append(_kept_state(loader))
        return lambda: [step() for step in reversed(steps)]

    return Change(apply, keep)


def model_change(model: Any, state: dict[str, Any], options: dict[str, Any]) -> Change:
    """Return what gives a module its state by `load_state_dict`, which takes the `options`; TypeError if it does not."""
    try:
        inspect.signature(model.load_state_dict).bind(state, **options)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__}.load_state_dict does not take {sorted(options)}; nothing was loaded: {error}."
        ) from None
    keep = None if loads_by_name(model) else partial(kept_tensors, model)
    return Change(partial(model.load_state_dict, state, **options), keep)


@torch.no_grad()
def kept_tensors(model: nn.Module) -> Undo:
    """Return what gives the parameters and buffers of a module their values back."""
    copies = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    return lambda: [tensor.copy_(copy) for tensor, copy in copies]


def loads_by_name(model: nn.Module) -> bool:
    """Return whether loading takes exactly the names of the state dict, and cannot fail once they and the shapes fit.

    Hooks and overrides may rename on the way, and they and what takes an extra state may refuse it.
    """
    return not any(
        type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        or not all(map(_is_torchs, module._load_state_dict_pre_hooks.values()))
        or not all(map(_is_torchs, module._load_state_dict_post_hooks.values()))
        for module in model.modules()
    )


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of torch's own, as FSDP registers them."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.")


# -- schedules that are restored on another number of data-parallel replicas than they were saved on ----------------------

# Where a rank's file keeps its `schedule_units`.
SCHEDULE_UNITS = "schedule_units"


def schedule_units(common: Common) -> list[int]:
    """Return the steps of each scheduler for one optimizer step, which `Contents.complete` needs in another run. Not a collective."""
    return [getattr(scheduler, "advance", 1) for scheduler in common.schedulers]


def _restore_schedules(common: Common, folder: CheckpointFolder, saved: Sequence[int] | None) -> list[str]:
    """Let restored schedules advance as in the run that saved its `schedule_units`; return a line for each whose rate may differ."""
    problems = []
    for number, scheduler in enumerate(common.schedulers):
        if isinstance(scheduler, AcceleratedScheduler):
            steps = saved[number] if saved is not None and number < len(saved) else _saved_ranks(folder, scheduler)
            problem = scheduler.continue_from(steps)
            problems += [f"scheduler {number}: {problem}"] if problem else []
    return problems


def _saved_ranks(folder: CheckpointFolder, scheduler: AcceleratedScheduler) -> int | None:
    """Return how often a schedule advanced in a checkpoint without this record: once for each process, as upstream counts."""
    listing = folder.listing
    if scheduler.split_batches or not scheduler.step_with_optimizer or listing.mesh:
        return None
    if listing.files:  # a machine's own folder has the files of its ranks only
        return listing.world_size
    return sum(1 for name in os.listdir(folder) if re.fullmatch(r"random_states_\d+\.pkl", name)) or None
