"""What an Accelerator saves and loads: checkpoints of a run, weights of a model, single objects."""

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate.backends.base import Backend
from accelerate.backends.registry import resolve
from accelerate.checkpoint import files, names, rotation
from accelerate.checkpoint.contents import Contents, read_common
from accelerate.checkpoint.meeting import Meeting, default_store
from accelerate.checkpointing import resolve_map_location, save_accelerator_state
from accelerate.modules.tensors import clean_state_dict_for_safetensors
from accelerate.optimizer import settle_scaler
from accelerate.training.prepared import warn_caller
from accelerate.utils import other
from accelerate.utils.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.utils.modeling import (
    convert_file_size_to_int,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


# -- a run's checkpoint --------------------------------------------------------------------------------------------


def save_state(
    accelerator: "Accelerator",
    output_dir: Folder | None = None,
    safe_serialization: bool = True,
    **save_model_func_kwargs: Any,
) -> Path:
    """Save everything prepared or registered into a folder. All ranks call it; when it returns, the folder is complete.

    With automatic naming the folder is ``checkpoints/checkpoint_N`` of the project, and the oldest ones beyond
    ``total_limit`` are removed after it is complete.

    Args:
        accelerator: The Accelerator.
        output_dir: The folder; not used with automatic naming.
        safe_serialization: Save models as safetensors instead of torch's pickle format.
        **save_model_func_kwargs: Passed to the strategy's own saving of models.

    Returns:
        The folder.

    Raises:
        ValueError: There is no folder to save to, or the automatically named one exists.
        RuntimeError: Another rank failed to save.
    """
    _warn_of_open_window(accelerator)
    project = accelerator.project_configuration
    automatic = project.automatic_checkpoint_naming
    folder = _next_folder(accelerator, output_dir) if automatic else _given_folder(output_dir)
    meeting = Meeting(folder, accelerator.process_index, accelerator.num_processes, default_store())
    problem = None
    try:
        _write(accelerator, folder, safe_serialization, save_model_func_kwargs)
    except Exception as error:  # the other ranks must hear of it, so that they do not wait for this one
        problem = error
    meeting.end(problem, publish=lambda: _publish(accelerator, folder))
    project.iteration += 1
    if automatic:
        if files.writes(project.save_on_each_node):
            rotation.prune(os.path.dirname(folder), project.total_limit, keep=folder)
        accelerator.wait_for_everyone()
    return Path(folder)


def _warn_of_open_window(accelerator: "Accelerator") -> None:
    state = accelerator.gradient_state
    done = accelerator.step % state.num_steps
    if state.num_steps > 1 and done and not state.sync_gradients:
        warn_caller(
            f"save_state() in the middle of an accumulation window, after {done} of {state.num_steps} micro-batches: their "
            "gradients are not in the checkpoint, so a run resumed from it takes one step on fewer samples. Save where "
            "accelerator.sync_gradients is True."
        )


def _given_folder(output_dir: Folder | None) -> Folder:
    if output_dir is None:
        raise ValueError(
            "save_state() got no output_dir. Pass a folder, or let the Accelerator name it: "
            "Accelerator(project_config=ProjectConfiguration(project_dir, automatic_checkpoint_naming=True))."
        )
    return output_dir


def _next_folder(accelerator: "Accelerator", output_dir: Folder | None) -> str:
    project = accelerator.project_configuration
    if project.project_dir is None:
        raise ValueError("Automatic checkpoint naming needs a folder: ProjectConfiguration(project_dir=...) is None.")
    folder = os.path.join(names.checkpoints_folder(project.project_dir), names.numbered_folder(project.iteration))
    if output_dir is not None:
        warn_caller(
            f"save_state(output_dir={os.fspath(output_dir)!r}) is not used, because checkpoints are named automatically: "
            f"{folder!r} is. Set automatic_checkpoint_naming=False to name the folder yourself."
        )
    if os.path.exists(folder) and rotation.is_complete(folder):
        raise ValueError(
            f"The checkpoint {folder!r} exists and would be overwritten. Load it before you go on, "
            f"or set accelerator.project_configuration.iteration (now {project.iteration}) to a number that is free."
        )
    # The main process makes the folder next, and by then every rank must have looked for it.
    accelerator.wait_for_everyone()
    return folder


def _write(
    accelerator: "Accelerator", folder: Folder, safe_serialization: bool, model_options: dict[str, Any]
) -> None:
    backend = resolve(accelerator.state)
    each_node = accelerator.project_configuration.save_on_each_node
    schedulers = backend.checkpointed_schedulers(accelerator)
    os.makedirs(folder, exist_ok=True)
    # Each rank marks the folder before it writes to it: the writer of the shared files need not be the first to come.
    _marker(accelerator, folder).touch()
    if files.writes(each_node):
        _remove_surplus(accelerator, folder, len(schedulers))
    # Through the method, because libraries replace it.
    states = [files.plain_names(accelerator.get_state_dict(model)) for model in accelerator._models]
    models = [backend.unwrap_model(model) for model in accelerator._models]
    for hook in list(accelerator._save_model_state_pre_hook.values()):
        hook(models, states, folder)
    options = _used_options(backend, "save_model", model_options)
    for index, state in enumerate(states):
        backend.save_model(
            accelerator,
            state,
            folder,
            index,
            safe_serialization=safe_serialization,
            save_on_each_node=each_node,
            **options,
        )
    for index, optimizer in enumerate(accelerator._optimizers):
        backend.save_optimizer(accelerator, optimizer, folder, index, save_on_each_node=each_node)
    if accelerator.scaler is not None:
        settle_scaler(accelerator.scaler)
    save_accelerator_state(
        folder,
        [],
        [],
        schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler,
        each_node,
        safe_serialization,
    )
    for index, obj in enumerate(accelerator._custom_objects):
        files.write_custom(obj, folder, index, each_node)


def _remove_surplus(accelerator: "Accelerator", folder: Folder, schedulers: int) -> None:
    """Remove what a former checkpoint in this folder has and the new one will not overwrite."""
    counts = {
        SAFE_MODEL_NAME: len(accelerator._models),
        MODEL_NAME: len(accelerator._models),
        OPTIMIZER_NAME: len(accelerator._optimizers),
        SCHEDULER_NAME: schedulers,
        RNG_STATE_NAME: accelerator.num_processes,
        names.CUSTOM_NAME: len(accelerator._custom_objects),
    }
    files.remove_surplus(folder, counts)


def _used_options(backend: Backend, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a strategy's own method uses; the base method uses none, and says so."""
    if options and getattr(type(backend), method) is getattr(Backend, method):
        warn_caller(f"save_state got {sorted(options)}, which the strategy {backend.name!r} does not use.")
        return {}
    return options


def _marker(accelerator: "Accelerator", folder: Folder) -> Path:
    writer = files.writes(accelerator.project_configuration.save_on_each_node)
    return Path(folder, names.marker_file(None if writer else accelerator.process_index))


def _publish(accelerator: "Accelerator", folder: Folder) -> None:
    if files.writes(accelerator.project_configuration.save_on_each_node):
        # All ranks are done. Their marks go first: until the last one goes, the folder does not look complete.
        for marker in sorted(Path(folder).glob(f"{names.INCOMPLETE_MARKER}_*")):
            marker.unlink(missing_ok=True)
    _marker(accelerator, folder).unlink(missing_ok=True)


def load_state(
    accelerator: "Accelerator",
    input_dir: Folder | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> None:
    """Load what ``save_state`` saved into everything prepared or registered. All ranks call it.

    The whole checkpoint is read and compared with the objects before any of them is changed.

    Args:
        accelerator: The Accelerator, with the same objects prepared and registered in the same order.
        input_dir: The folder; by default the newest complete one, with automatic naming.
        load_kwargs: Passed to ``torch.load``; ``{"weights_only": False}`` for states that hold objects of your own.
        **load_model_func_kwargs: ``map_location`` (``"cpu"`` or ``"on_device"``), and arguments of the models'
            ``load_state_dict``, such as ``strict``.

    Raises:
        ValueError: The folder does not exist, or holds a checkpoint whose saving did not come to its end.
        FileNotFoundError: The folder lacks a file, or there is no checkpoint yet.
        RuntimeError: The checkpoint does not fit the objects; the message lists the differences.
    """
    folder = _existing_folder(accelerator, input_dir)
    location = resolve_map_location(load_model_func_kwargs.pop("map_location", None))
    contents = _read(accelerator, folder, location, load_kwargs, load_model_func_kwargs)
    for name, value in contents.apply(**load_model_func_kwargs).items():
        setattr(accelerator, name, value)
    _continue_numbering(accelerator, folder)


def _existing_folder(accelerator: "Accelerator", input_dir: Folder | None) -> str:
    project = accelerator.project_configuration
    if input_dir is not None:
        folder = os.path.expanduser(os.fspath(input_dir))
        if not os.path.isdir(folder):
            raise ValueError(f"load_state({folder!r}): there is no such folder.")
        if not rotation.is_complete(folder):
            raise ValueError(
                f"load_state({folder!r}): the saving of this checkpoint did not come to its end. Load another one; to "
                f"take what is there all the same, remove the files {names.INCOMPLETE_MARKER + '*'!r} from it."
            )
        return folder
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ValueError(
            "load_state() got no input_dir, and checkpoints are not named automatically. Pass the folder to load."
        )
    return rotation.latest_complete(names.checkpoints_folder(project.project_dir))


def _read(
    accelerator: "Accelerator",
    folder: str,
    location: Any,
    load_kwargs: dict[str, Any] | None,
    model_options: dict[str, Any],
) -> Contents:
    backend = resolve(accelerator.state)
    custom = accelerator._custom_objects
    if (saved := files.custom_count(folder)) != len(custom):
        raise RuntimeError(
            f"{folder!r} has the states of {saved} registered objects, but {len(custom)} are registered. Register the "
            "same objects in the same order with `accelerator.register_for_checkpointing` before loading."
        )
    inner = [backend.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    left = list(inner)
    for hook in list(accelerator._load_model_state_pre_hook.values()):
        hook(left, folder)
    # A hook takes out of the list what it loaded itself.
    kept = {id(model) for model in left}
    pairs = [(outer, model) for outer, model in zip(accelerator._models, inner, strict=True) if id(model) in kept]
    models = []
    for index, (outer, model) in enumerate(pairs):
        state = backend.load_model(
            accelerator,
            outer,
            folder,
            index,
            map_location=location,
            load_kwargs=load_kwargs,
            strict=model_options.get("strict", True),
        )
        if state is not None:  # None: the strategy has put the weights where they belong
            models.append((model, state))
    optimizers = []
    for index, optimizer in enumerate(accelerator._optimizers):
        state = backend.load_optimizer(
            accelerator, optimizer, folder, index, map_location=location, load_kwargs=load_kwargs
        )
        if state is not None:
            optimizers.append((optimizer, state))
    contents = read_common(
        folder,
        backend.checkpointed_schedulers(accelerator),
        accelerator._dataloaders,
        custom,
        accelerator.scaler,
        accelerator.process_index,
        load_kwargs,
    )
    contents.models, contents.optimizers = models, optimizers
    _warn_of_fewer_processes(accelerator, folder)
    return contents


def _warn_of_fewer_processes(accelerator: "Accelerator", folder: str) -> None:
    """Ranks that are new say so themselves; for those that are gone the main process does."""
    beyond = names.random_states_file(accelerator.num_processes)
    if accelerator.is_main_process and os.path.exists(os.path.join(folder, beyond)):
        logger.warning(
            "%s was saved by more processes than the %d running now (it has %s). Its weights and positions in the data "
            "load, but the ranks draw other random numbers and other samples than they would have.",
            folder,
            accelerator.num_processes,
            beyond,
        )


def _continue_numbering(accelerator: "Accelerator", folder: str) -> None:
    """Let the next automatic name follow the checkpoint that was loaded."""
    project = accelerator.project_configuration
    number = names.number_of(folder)
    if not project.automatic_checkpoint_naming or project.project_dir is None or number is None:
        return
    here = names.checkpoints_folder(project.project_dir)
    if os.path.realpath(os.path.dirname(os.path.abspath(folder))) == os.path.realpath(here):
        # After going back to an older one, the newer ones keep their numbers, and what comes next is the newest.
        complete = [known for known, path in rotation.numbered_checkpoints(here) if rotation.is_complete(path)]
        project.iteration = max(complete, default=number) + 1


def register_for_checkpointing(accelerator: "Accelerator", *objects: Any) -> None:
    """Let ``save_state`` and ``load_state`` treat further objects. All ranks, in the same order.

    Args:
        accelerator: The Accelerator.
        *objects: Objects with ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: Some have not; the message lists them.
    """
    bad = [
        f"argument {position} ({other.get_pretty_name(obj)})"
        for position, obj in enumerate(objects)
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
    ]
    if bad:
        raise ValueError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. Those that do not: "
            + ", ".join(bad)
        )
    accelerator._custom_objects.extend(objects)


def register_save_state_pre_hook(accelerator: "Accelerator", hook: Callable[..., None]) -> RemovableHandle:
    """Call a function before each ``save_state`` writes the models.

    Args:
        accelerator: The Accelerator.
        hook: Receives ``(models, weights, output_dir)``; what it takes out of ``weights`` is not saved.

    Returns:
        A handle whose ``remove()`` unregisters the function.
    """
    return _register(accelerator._save_model_state_pre_hook, hook)


def register_load_state_pre_hook(accelerator: "Accelerator", hook: Callable[..., None]) -> RemovableHandle:
    """Call a function before each ``load_state`` loads the models.

    Args:
        accelerator: The Accelerator.
        hook: Receives ``(models, input_dir)``; what it takes out of ``models`` is not loaded.

    Returns:
        A handle whose ``remove()`` unregisters the function.
    """
    return _register(accelerator._load_model_state_pre_hook, hook)


def _register(hooks: "OrderedDict[int, Callable[..., None]]", hook: Callable[..., None]) -> RemovableHandle:
    if not callable(hook):
        raise TypeError(f"A hook is called, but got {hook!r} ({type(hook).__name__}).")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


# -- models and objects --------------------------------------------------------------------------------------------


def save(accelerator: "Accelerator", obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Save an object to a file on one process. All ranks may call it.

    Args:
        accelerator: The Accelerator; its ``save_on_each_node`` decides who writes.
        obj: What to save.
        f: A path, or a binary file.
        safe_serialization: Write safetensors; ``obj`` is then a dict of names and tensors.
    """
    other.save(
        obj,
        f,
        save_on_each_node=accelerator.project_configuration.save_on_each_node,
        safe_serialization=safe_serialization,
    )


def get_state_dict(
    accelerator: "Accelerator",
    model: nn.Module,
    unwrap: bool = True,
    offloaded: Callable[[nn.Module], dict[str, Any]] = get_state_dict_offloaded_model,
) -> dict[str, Any]:
    """Return the full state dict of a model. All ranks call it.

    Args:
        accelerator: The Accelerator.
        model: A model, prepared or not.
        unwrap: Return the names of the user's model rather than those of its wrappers.
        offloaded: Collects the state of a model whose weights are offloaded.
    """
    if any(has_offloaded_params(module) or _is_hollow(module) for module in model.modules()):
        return offloaded(model)
    state = resolve(accelerator.state).model_state(accelerator, model, unwrap=unwrap)
    return files.plain_names(state) if unwrap else state


def _is_hollow(module: nn.Module) -> bool:
    """Whether a hook among several of a module keeps its weights elsewhere."""
    return "_hf_hook" in module.__dict__ and any(weight.is_meta for weight in module.parameters(recurse=False))


def save_model(
    accelerator: "Accelerator",
    model: nn.Module,
    save_directory: Folder,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Save a model's weights alone, in shards if they are large. All ranks call it, one process writes.

    Args:
        accelerator: The Accelerator.
        model: A model, prepared or not.
        save_directory: The folder. It is made when it is missing.
        max_shard_size: Largest size of a file: bytes, or text such as ``"5GB"``.
        safe_serialization: Write safetensors instead of torch's pickle format.

    Raises:
        NotADirectoryError: ``save_directory`` is a file.
        RuntimeError: Some weights are on the meta device, so there is nothing to save.

    Source:
        https://huggingface.co/docs/huggingface_hub/package_reference/serialization
    """
    if os.path.isfile(save_directory):
        raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file; pass a folder.")
    state = accelerator.get_state_dict(model)
    if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise RuntimeError(
            f"{len(meta)} weights are on the meta device and have no values, {meta[0]!r} for one. Load them before saving."
        )
    each_node = accelerator.project_configuration.save_on_each_node
    if files.writes(each_node):
        _write_shards(state, save_directory, max_shard_size, safe_serialization, each_node)


def _write_shards(
    state: dict[str, Any], folder: Folder, max_shard_size: int | str, safe: bool, save_on_each_node: bool
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    os.makedirs(folder, exist_ok=True)
    if safe:
        state = clean_state_dict_for_safetensors(state)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    index_name = SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME
    limit = convert_file_size_to_int(max_shard_size)
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size=limit)
    for file, entries in split.filename_to_tensors.items():
        shard = {name: state[name] for name in entries}
        other.save(shard, os.path.join(folder, file), save_on_each_node, safe_serialization=safe)
    written = set(split.filename_to_tensors)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        with other.written_whole(os.path.join(folder, index_name)) as temporary:
            Path(temporary).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        written.add(index_name)
    # Of an earlier save with another number of shards: a reader would mix them with the new ones.
    stem, _, extension = pattern.partition("{suffix}")
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(extension)}")
    for entry in os.listdir(folder):
        if entry not in written and (ours.fullmatch(entry) or entry == index_name):
            os.remove(os.path.join(folder, entry))
