"""``save_state``: what an Accelerator puts into a checkpoint, where it goes, and when older ones are removed; and full state dicts."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate.base._warn import warn_user
from accelerate.base.text import get_pretty_name
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER, PARAMETER_NAMES, numbered_folder
from accelerate.checkpoint.model_io import names_file
from accelerate.checkpoint.ranks import Group
from accelerate.checkpoint.save import Save, SavePlan, add_common, plain_names
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, prune, storage_of
from accelerate.extension import all_specs, imported
from accelerate.modules.offloaded import has_offloaded_params
from accelerate.precision import scaling
from accelerate.training.run import TrainingRun

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


def save_state(
    accelerator: TrainingRun,
    output_dir: Folder | None,
    safe_serialization: bool,
    blocking: bool | None,
    **model_options: Any,
) -> Path | str:
    """Save everything prepared or registered as one checkpoint, and return where it is, or will be.

    The checkpoint is written into a hidden folder, which takes its location when it is complete. With automatic naming the
    location is ``checkpoints/checkpoint_N`` of the project, and the oldest ones beyond ``total_limit`` are removed afterwards.

    Collective: call on every rank.
    """
    project = accelerator.project_configuration
    _warn_of_open_window(accelerator)
    path = _path(accelerator, output_dir)
    storage = storage_of(path)
    blocking = not project.async_save if blocking is None else blocking
    finish = finish_now if blocking else _background_finish()

    group = Group.of(accelerator, storage)
    save = Save(storage, group, _facts(accelerator), *_automatic(accelerator))
    save.begin(accelerator.extensions.former_problem or _problem_of_machines(accelerator, group))
    _collect(accelerator, save, safe_serialization, model_options)
    # A save that fails at its very end may have left a checkpoint, which the next one of this name replaces.
    accelerator._unfinished_save = storage.location
    finish(accelerator, save)
    accelerator._unfinished_save = None
    project.iteration += 1
    return _as_given(storage, path)


def finish_now(accelerator: TrainingRun, save: Save) -> None:
    """Write and publish what was collected.

    Collective: call on every rank.
    """
    if accelerator._state_io.saves_shards:
        save.check_collected()  # a rank that has nothing to write would be waited for by those that write together
    save.finish()


def _background_finish() -> Callable[[TrainingRun, Save], None]:
    """Return the function of an extension that finishes saves in the background."""
    for spec in all_specs():
        if spec.background_save:
            finish: Callable[[TrainingRun, Save], None] = imported(spec.background_save)
            return finish
    raise ValueError(
        "save_state(blocking=False) needs an extension that is not in this installation of accelerate. Save with blocking=True and "
        "without ProjectConfiguration(async_save=True), or install the complete package."
    )


def _as_given(storage: CheckpointStorage, path: Folder) -> Path | str:
    """Return the path that a caller gave to a storage, relative if it was; a URL as the storage has it."""
    text = os.path.expanduser(os.fspath(path))
    if "://" not in text:
        return Path(text)
    return Path(storage.location) if isinstance(storage, LocalStorage) else storage.location


def _facts(accelerator: TrainingRun) -> dict[str, Any]:
    """Return what a manifest says of the run."""
    mesh = accelerator.torch_device_mesh
    sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return {
        "world_size": accelerator.num_processes,
        "strategy": accelerator._strategy.name,
        "mesh": sizes,
        "step": accelerator.step,
        "iteration": accelerator.project_configuration.iteration,
    }


def _automatic(
    accelerator: TrainingRun,
) -> tuple[Callable[[CheckpointStorage], None], Callable[[CheckpointStorage], None]]:
    """Return what automatic naming does before a checkpoint is staged, and once it is published."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return (lambda storage: None), (lambda storage: None)
    number, limit, loaded = project.iteration, project.total_limit, accelerator._loaded_checkpoint
    unfinished = accelerator._unfinished_save

    def refuse(storage: CheckpointStorage) -> None:
        if storage.location != unfinished and storage.state().loads:
            raise ValueError(
                f"The checkpoint {storage.location!r} exists and would be overwritten. Load it before you continue, "
                f"or set accelerator.project_configuration.iteration (now {number}) to a number that is free."
            )

    def rotate(storage: CheckpointStorage) -> None:
        prune(storage.parent(), limit, keep=[storage.location, loaded])

    return refuse, rotate


def _warn_of_open_window(accelerator: TrainingRun) -> None:
    state = accelerator.gradient_state
    if state.sync_gradients:
        return
    if done := accelerator.step % state.num_steps:
        warn_user(
            f"save_state() in the middle of an accumulation step, after {done} of {state.num_steps} micro-batches: their "
            "gradients are not in the checkpoint, so a run resumed from it takes one step on fewer samples. Save where "
            "accelerator.sync_gradients is True."
        )


def _path(accelerator: TrainingRun, output_dir: Folder | None) -> Folder:
    """Return where the checkpoint goes: the folder given, or with automatic naming the next one of the project."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "save_state() got no output_dir. Pass a folder, or let the Accelerator name it: "
                "Accelerator(project_config=ProjectConfiguration(project_dir, automatic_checkpoint_naming=True))."
            )
        return output_dir
    if project.project_dir is None:
        raise ValueError("Automatic checkpoint naming needs a folder: ProjectConfiguration(project_dir=...) is None.")
    path = os.path.join(project.project_dir, CHECKPOINTS_FOLDER, numbered_folder(project.iteration))
    if output_dir is not None:
        warn_user(
            f"save_state(output_dir={os.fspath(output_dir)!r}) is not used, because checkpoints are named automatically: "
            f"{storage_of(path).location!r} is. Set automatic_checkpoint_naming=False to name the folder yourself."
        )
    return path


def _problem_of_machines(accelerator: TrainingRun, group: Group) -> ValueError | None:
    """Return why ranks cannot save to separate disks: they read files of other machines. None but on the first rank of a further machine."""
    elsewhere = group.local_rank == 0 < group.rank
    if not (group.each_node and elsewhere and accelerator._state_io.needs_all_files):
        return None
    return ValueError(
        f"save_on_each_node=True with the strategy {accelerator._strategy.name!r}: each machine would have some of the weights, and no "
        "checkpoint could be loaded. Save to a disk that the machines share, or to an object store."
    )


def _collect(accelerator: TrainingRun, save: Save, safe_serialization: bool, model_options: dict[str, Any]) -> None:
    """Put everything that this rank saves into the plan.

    Collective: call on every rank.
    """
    states = save.run_step(_run_hooks, accelerator, save.plan)
    if accelerator._state_io.gathers:
        save.check_collected()  # the other ranks would wait for one whose hook has failed
    save.run_step(_add_states, accelerator, save.plan, states, safe_serialization, model_options)


def _run_hooks(accelerator: TrainingRun, plan: SavePlan) -> list[dict[str, Any]]:
    """Let extensions and the user's hooks save, and return the weights that the hooks leave, for each model."""
    for extension_saves in accelerator.extensions.saving:
        extension_saves(plan)
    strategy, state_io = accelerator._strategy, accelerator._state_io
    # Through the method, because libraries replace it. Hooks of strategies that save shards see no weights.
    models = [] if state_io.saves_shards else accelerator._models
    states: list[dict[str, Any]] = [plain_names(accelerator.get_state_dict(model)) for model in models]
    if hooks := list(accelerator._save_model_state_pre_hook.values()):
        outer = accelerator._models
        inner = [model if state_io.owns_state(model) else strategy.unwrap_model(model) for model in outer]
        for hook in hooks:
            hook(inner, states, plan.folder)
    return [{} for _ in accelerator._models] if state_io.saves_shards else states


def _add_states(
    accelerator: TrainingRun,
    plan: SavePlan,
    states: list[dict[str, Any]],
    safe_serialization: bool,
    model_options: dict[str, Any],
) -> None:
    """Put everything else that this rank saves into a plan."""
    strategy, state_io = accelerator._strategy, accelerator._state_io
    schedulers = state_io.checkpointed_schedulers(accelerator)
    options = {"safe_serialization": safe_serialization, **model_options}
    if unused := sorted(model_options.keys() - set(state_io.save_options)):
        warn_user(f"save_state got {unused}, which the strategy {strategy.name!r} does not use.")
        for name in unused:
            del options[name]
    for index, state in enumerate(states):
        state_io.save_model(accelerator, state, plan, index, **options)
    for index, optimizer in enumerate(accelerator._optimizers):
        state_io.save_optimizer(accelerator, optimizer, plan, index)
    if plan.writes_shared and state_io.has_all_names:
        names = names_file(accelerator._optimizers, accelerator._models)
        if names is not None:
            plan.add_bytes(PARAMETER_NAMES, names)
    if accelerator.scaler is not None:
        scaling.flush_update(accelerator.scaler)
    add_common(Common.of(accelerator, schedulers), plan, accelerator.step)


def get_state_dict(
    accelerator: TrainingRun, model: nn.Module, unwrap: bool, offloaded: Callable[[nn.Module], dict[str, Any]]
) -> dict[str, Any]:
    """Return the full state dict of a model; `offloaded` collects that of offloaded weights.

    Collective: call on every rank.
    """
    for module in model.modules():
        # Of several hooks of a module, one may keep its weights elsewhere.
        hooked = "_hf_hook" in module.__dict__
        if hooked and (has_offloaded_params(module) or any(w.is_meta for w in module.parameters(recurse=False))):
            return offloaded(model)
    state = accelerator._state_io.model_state(accelerator, model, unwrap=unwrap)
    return plain_names(state) if unwrap and state is not None else state


def register_for_checkpointing(accelerator: TrainingRun, *objects: Any) -> None:
    """Let ``save_state`` and ``load_state`` treat further objects, in the same order on all ranks.

    Collective: call on every rank.
    """
    refused = [
        f"argument {position} ({get_pretty_name(obj)})"
        for position, obj in enumerate(objects)
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
    ]
    if refused:
        raise ValueError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. Those that do not: "
            + ", ".join(refused)
        )
    accelerator._custom_objects.extend(objects)


def register_hook(hooks: "OrderedDict[int, Callable[..., None]]", hook: Callable[..., None]) -> RemovableHandle:
    """Add a function that is called before models are saved or loaded; return its removable handle."""
    if not callable(hook):
        raise TypeError(f"A hook is called, but got {hook!r} ({type(hook).__name__}).")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
