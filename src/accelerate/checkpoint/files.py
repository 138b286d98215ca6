"""Reading and writing the files of a checkpoint folder, one function per kind of object.

Every rank calls the write functions, and one process writes each file: the main one, or the main one of each node with
``save_on_each_node``. Given a `SavePlan` in place of a folder they put the file into it, to be written later. The read functions change nothing in memory: what they return is applied by the caller, after
everything has been read.
"""

import contextlib
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import formats, names, rng
from accelerate.checkpoint.plan import SavePlan
from accelerate.modules.named import match_names
from accelerate.modules.tensors import clean_state_dict_for_safetensors, shared_tensor_names
from accelerate.modules.unwrap import extract_model_from_parallel
from accelerate.process import PartialState
from accelerate.utils.other import load, save, written_whole

Path = str | os.PathLike[str]


def writes(save_on_each_node: bool = False) -> bool:
    """Say whether this process is the one that writes the shared files.

    Args:
        save_on_each_node: Each node has a folder of its own.
    """
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


# -- models --------------------------------------------------------------------------------------------------------


def plain_names(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict without what torch.compile puts into names, so that it loads compiled or not.

    Args:
        state_dict: A model's state dict; the versions of its modules (``_metadata``) go along.
    """
    plain = OrderedDict((name.replace("_orig_mod.", ""), value) for name, value in state_dict.items())
    if hasattr(state_dict, "_metadata"):
        # The entry of a compiled wrapper itself gives way to that of the module inside, which follows it.
        names = (
            (f"{name}.".replace("_orig_mod.", "").removesuffix("."), of) for name, of in state_dict._metadata.items()
        )
        plain._metadata = OrderedDict(names)
    return plain


def write_model(
    state_dict: Mapping[str, Any],
    folder: Path,
    index: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write a model's weights. All ranks call it, one process writes.

    Args:
        state_dict: The model's state dict.
        folder: The checkpoint's folder.
        index: Which of the models it is, from 0.
        safe_serialization: Write safetensors instead of torch's pickle format.
        save_on_each_node: Each node has a folder of its own.

    Raises:
        ValueError: safetensors cannot hold a value of the state dict; the message names it.
    """
    if not writes(save_on_each_node):
        return
    state = clean_state_dict_for_safetensors(state_dict) if safe_serialization else state_dict
    file = names.model_file(index, safe_serialization)
    if isinstance(folder, SavePlan):
        if safe_serialization:
            folder.add_tensors(file, state, metadata={"format": "pt"}, aliases=_aliases(state_dict, state))
        else:
            folder.add_object(file, state)
        return
    path = os.path.join(folder, file)
    save(state, path, save_on_each_node=save_on_each_node, safe_serialization=safe_serialization)
    # Of an earlier save in the other format; a reader would not know which of the two is newer.
    _remove(os.path.join(folder, names.model_file(index, not safe_serialization)))


def _aliases(state_dict: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, str]:
    """Names of tied weights that are not in the file, and the name under which each one is."""
    found = {}
    for group in shared_tensor_names(state_dict):
        kept = next((name for name in group if name in written), None)
        found.update({name: kept for name in group if name not in written and kept is not None})
    return found


def _put(obj: Any, folder: Path, file: str, save_on_each_node: bool) -> None:
    """Write an object that all ranks share, in torch's format."""
    if not isinstance(folder, SavePlan):
        save(obj, os.path.join(folder, file), save_on_each_node=save_on_each_node)
    elif writes(save_on_each_node):
        folder.add_object(file, obj)


def put_own(obj: Any, folder: Path, file: str) -> None:
    """Write an object of this rank alone, in torch's format. Any rank, alone.

    Args:
        obj: What `torch.save` takes.
        folder: The checkpoint's folder.
        file: A name that no other rank uses.
    """
    if isinstance(folder, SavePlan):
        folder.add_object(file, obj)
        return
    with written_whole(os.path.join(folder, file)) as temporary:
        torch.save(obj, temporary)


def read_model(
    model: nn.Module,
    folder: Path,
    index: int = 0,
    map_location: Any = None,
    strict: bool = True,
    load_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a model's weights under the names that the model has, checked against it. Any rank, alone.

    Names match whatever wrappers wrote them (a leading ``module.``, the parts that torch.compile puts in), and tied
    weights that the file has once are filled in. ``state_dict`` of the model is called once.

    Args:
        model: The model, wrapped or not; it is not changed. The names returned are those of the module inside.
        folder: The checkpoint's folder.
        index: Which of the models it is, from 0.
        map_location: Where tensors go; the CPU by default, and loading copies them from there.
        strict: Raise when a name is missing or unexpected.
        load_kwargs: Passed to ``torch.load`` for files in torch's format.

    Returns:
        A state dict for ``load_state_dict`` of the module inside; the memory of its tensors may be the file's.

    Raises:
        FileNotFoundError: The folder has no weights for this model.
        RuntimeError: Names or shapes differ; the message lists them.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    safe = os.path.join(folder, names.model_file(index))
    if os.path.exists(safe):
        path, found = safe, _read_tensors(folder, names.model_file(index), map_location, load_kwargs)
    else:
        path = os.path.join(folder, names.model_file(index, safe_serialization=False))
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{os.fspath(folder)!r} has no weights for model {index} ({type(model).__name__}): neither "
                f"{os.path.basename(safe)} nor {os.path.basename(path)} is there. Prepare the models that were saved, in "
                "the same order, or load another folder."
            )
        found = _read_tensors(folder, os.path.basename(path), map_location, load_kwargs)
    return fit_to_model(model, found, path, strict)


def fit_to_model(model: nn.Module, found: Mapping[str, Any], origin: str, strict: bool = True) -> dict[str, Any]:
    """Return weights under the names of a model, after comparing names and shapes with it. The model stays unchanged.

    Args:
        model: The model that will load them.
        found: Names and tensors.
        origin: Where they come from, for messages.
        strict: Raise when a name is missing or unexpected.

    Raises:
        RuntimeError: Names or shapes differ; the message lists them.
    """
    own = model.state_dict()
    pairs = match_names(own, found)
    state = {pairs.get(name, name): value for name, value in found.items()}
    for group in shared_tensor_names(own):
        saved = [name for name in group if name in state]
        for name in group:
            if saved and name not in state and own[name].shape == state[saved[0]].shape:
                state[name] = state[saved[0]]
    problems = _shape_problems(own, state)
    hint = "Build the model as it was when the checkpoint was saved."
    if strict and loads_by_name(model):
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        if missing or unexpected:
            hint += " `load_state(..., strict=False)` accepts missing and unexpected names."
        problems += _listed("missing in the file", missing) + _listed("unexpected in the file", unexpected)
    if problems:
        raise RuntimeError(
            f"The weights in {origin} do not fit {type(model).__name__}; nothing was loaded.\n  "
            + "\n  ".join([*problems, hint])
        )
    return state


def _shape_problems(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    differing = [
        f"{name} has {tuple(value.shape)} in the file and {tuple(own[name].shape)} in the model"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and not isinstance(own[name], nn.parameter.UninitializedTensorMixin)
        and value.shape != own[name].shape
    ]
    return _listed("other shapes", differing)


def loads_by_name(model: Any) -> bool:
    """Say whether loading looks for exactly the names of the state dict, and cannot fail once they and the shapes are right.

    Hooks and overrides may rename on the way, and they and what takes an extra state may refuse it.

    Args:
        model: The module inside all wrappers, or what a strategy takes a state with.
    """
    if not isinstance(model, nn.Module):
        return False
    for module in model.modules():
        own = type(module)
        if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
            return False
        if (
            own.load_state_dict is not nn.Module.load_state_dict
            or own.set_extra_state is not nn.Module.set_extra_state
        ):
            return False
        loader = own._load_from_state_dict
        if loader is not nn.Module._load_from_state_dict and not loader.__module__.startswith("torch.nn."):
            return False
    return True


def _listed(title: str, entries: list[str], limit: int = 10) -> list[str]:
    if not entries:
        return []
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return [f"{title}: {', '.join(entries[:limit])}{more}"]


# -- everything in torch's format ----------------------------------------------------------------------------------


def read_torch(path: str, map_location: Any = None, load_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Read a file in torch's format without running code from it. Any rank, alone.

    Args:
        path: The file.
        map_location: Where tensors go; the CPU by default.
        load_kwargs: Passed to ``torch.load``.

    Raises:
        UnpicklingError: The file holds objects that are not plain data; the message says how to accept them.
    """
    with _reported(path):
        return load(path, map_location=map_location if map_location is not None else "cpu", **(load_kwargs or {}))


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Let the error of a library tell which file it could not read."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{path} could not be read: {error}\nIf it holds objects of your own and you trust whoever wrote it, pass "
            "load_kwargs={'weights_only': False} to load_state; that runs code from the file."
        ) from error
    except Exception as error:
        if path in str(error):
            raise
        raise RuntimeError(f"{path} could not be read, so it is damaged: {type(error).__name__}: {error}") from error


def _read_tensors(
    folder: Path, file: str, map_location: Any = None, load_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Read a file of tensors; onto the CPU nothing is copied, see `formats.mapped`."""
    path = os.path.join(folder, file)
    if str(map_location or "cpu") == "cpu" and not load_kwargs:
        with _reported(path):
            return formats.mapped(path)
    if not file.endswith(".safetensors"):
        return read_torch(path, map_location, load_kwargs)
    from safetensors.torch import load_file

    with _reported(path):
        return load_file(path, device=str(map_location or "cpu"))


def _read_required(folder: Path, file: str, what: str, **options: Any) -> Any:
    path = os.path.join(folder, file)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no state for {what}: {file} is missing. Prepare what was saved, in the same "
            "order, or load another folder."
        )
    return _read_tensors(folder, file, **options)


def write_optimizer(state: Any, folder: Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write an optimizer's state. All ranks call it, one process writes.

    Args:
        state: The optimizer's state dict.
        folder: The checkpoint's folder.
        index: Which of the optimizers it is, from 0.
        save_on_each_node: Each node has a folder of its own.
    """
    _put(state, folder, names.optimizer_file(index), save_on_each_node)


def read_optimizer(
    folder: Path, index: int = 0, map_location: Any = None, load_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Read an optimizer's state. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        index: Which of the optimizers it is, from 0.
        map_location: Where tensors go; the CPU by default.
        load_kwargs: Passed to ``torch.load``.

    Raises:
        FileNotFoundError: The folder has no state for this optimizer.
    """
    return _read_required(
        folder,
        names.optimizer_file(index),
        f"optimizer {index}",
        map_location=map_location,
        load_kwargs=load_kwargs,
    )


def write_scheduler(scheduler: Any, folder: Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write a scheduler's state. All ranks call it, one process writes.

    Args:
        scheduler: An object with ``state_dict``.
        folder: The checkpoint's folder.
        index: Which of the schedulers it is, from 0.
        save_on_each_node: Each node has a folder of its own.
    """
    _put(scheduler.state_dict(), folder, names.scheduler_file(index), save_on_each_node)


def read_scheduler(folder: Path, index: int = 0, load_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Read a scheduler's state. Any rank, alone.

    Raises:
        FileNotFoundError: The folder has no state for this scheduler.
    """
    return _read_required(folder, names.scheduler_file(index), f"scheduler {index}", load_kwargs=load_kwargs)


def write_scaler(scaler: Any, folder: Path, save_on_each_node: bool = False) -> None:
    """Write the gradient scaler's state. All ranks call it, one process writes."""
    _put(scaler.state_dict(), folder, names.scaler_file(), save_on_each_node)


def read_scaler(folder: Path) -> Any | None:
    """Read the gradient scaler's state, or None when it was saved without one. Any rank, alone."""
    path = os.path.join(folder, names.scaler_file())
    return read_torch(path) if os.path.exists(path) else None


def write_custom(obj: Any, folder: Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object that was registered for checkpointing. All ranks call it, one process writes.

    Args:
        obj: An object with ``state_dict``.
        folder: The checkpoint's folder.
        index: Which of the objects it is, from 0.
        save_on_each_node: Each node has a folder of its own.
    """
    _put(obj.state_dict(), folder, names.custom_file(index), save_on_each_node)


def read_custom(folder: Path, index: int = 0, load_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Read the state of an object that was registered for checkpointing. Any rank, alone.

    Raises:
        FileNotFoundError: The folder has no state for this object.
    """
    return _read_required(folder, names.custom_file(index), f"registered object {index}", load_kwargs=load_kwargs)


def custom_count(folder: Path) -> int:
    """Return how many registered objects a checkpoint has the state of."""
    pattern = re.compile(re.escape(names.CUSTOM_NAME) + r"_\d+\.pkl")
    return sum(bool(pattern.fullmatch(entry)) for entry in os.listdir(folder))


def write_random_states(states: dict[str, Any], folder: Path, process_index: int) -> None:
    """Write what each rank keeps for itself: random states, step count, positions of loaders. Every rank writes its own.

    Args:
        states: What to write.
        folder: The checkpoint's folder.
        process_index: This rank.
    """
    put_own(states, folder, names.random_states_file(process_index))


def write_generators(states: Mapping[str, Any], plan: SavePlan, process_index: int) -> None:
    """Write the states of a rank's random generators without pickle. Every rank writes its own.

    Args:
        states: From `rng.collect`.
        plan: Takes the file.
        process_index: This rank.
    """
    tensors, metadata = rng.encode(states)
    plan.add_tensors(names.generators_file(process_index), tensors, metadata=metadata)


def read_generators(folder: Path, process_index: int) -> dict[str, Any] | None:
    """Read what ``write_generators`` wrote for this rank, or None when there is nothing for it. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        process_index: This rank.
    """
    path = os.path.join(folder, names.generators_file(process_index))
    if not os.path.exists(path):
        return None
    from safetensors import safe_open

    with _reported(path), safe_open(path, framework="pt") as file:
        return rng.decode({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118 (not a dict)


def read_random_states(folder: Path, process_index: int) -> dict[str, Any] | None:
    """Read what ``write_random_states`` wrote for this rank, or None when there is nothing for it. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        process_index: This rank.
    """
    path = os.path.join(folder, names.random_states_file(process_index))
    if not os.path.exists(path):
        return None
    states = read_torch(path)
    if not isinstance(states, dict):
        raise RuntimeError(f"{path} is damaged: it holds a {type(states).__name__}, not a dict of states.")
    return states
