"""What an Accelerator saves and loads: checkpoints of a run, weights of a model, single objects."""

import copy
import itertools
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate import comm
from accelerate.base._warn import warn_user
from accelerate.base.constants import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from accelerate.base.text import convert_file_size_to_int, get_pretty_name
from accelerate.checkpoint import formats, fsdp
from accelerate.checkpoint import state as states
from accelerate.checkpoint.background import snapshot
from accelerate.checkpoint.manifest import CHECKPOINTS_FOLDER, PARAMETER_NAMES, numbered_folder
from accelerate.checkpoint.model_io import io_of, names_file
from accelerate.checkpoint.ranks import Group
from accelerate.checkpoint.save import Save, SavePlan, plain_names, write_common, writes
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, prune, storage_of
from accelerate.modules import tensor_kinds
from accelerate.modules.offloaded import has_offloaded_params
from accelerate.modules.unwrap import canonical_name, canonical_names, clean_state_dict_for_safetensors
from accelerate.precision import scaling
from accelerate.runtime.torch_private import local_part
from accelerate.strategies import shard
from accelerate.strategies.base import Strategy
from accelerate.training.run import TrainingRun

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
# Without this file PEFT finds no adapter in a folder.
_ADAPTER = "adapter_config.json"


# -- a run's checkpoint --------------------------------------------------------------------------------------------


def save_state(
    accelerator: TrainingRun,
    output_dir: Folder | None,
    safe_serialization: bool,
    blocking: bool | None,
    **model_options: Any,
) -> Path | str:
    """Save everything prepared or registered as one checkpoint, and return where it is, or will be. All ranks call it.

    It is written aside and takes its place when all of it is there. With automatic naming the place is
    ``checkpoints/checkpoint_N`` of the project, and the oldest ones beyond ``total_limit`` are removed afterwards.
    """
    background = accelerator._background
    former = background.wait("save_state()") if background.pending else None
    _warn_of_open_window(accelerator)
    project = accelerator.project_configuration
    path = _path(accelerator, output_dir)
    storage = storage_of(path)
    blocking = not project.async_save if blocking is None else blocking
    state_io = accelerator._state_io
    facts = _facts(accelerator, accelerator._strategy)
    check_target, prune_old = _automatic(accelerator)
    save = Save(storage, Group.of(accelerator, storage), facts, check_target, prune_old)
    if not blocking and not save.ranks.in_background:
        warn_user("save_state(blocking=False) writes at once here: these ranks have no key-value store to meet in.")
        blocking = True
    # What failed on one rank alone, or is known to some ranks only, is raised on all of them now.
    save.begin(former)
    if state_io.saves_shards and not blocking:
        save.shards = comm.side_group(beside=True)
    try:
        _collect(accelerator, save.plan, save.group.each_node, safe_serialization, model_options)
        if not blocking:
            snapshot(save.plan, background.buffers)
    except BaseException as error:  # the other ranks must hear of it, so that they do not wait for this one
        save.problem = error
    if blocking:
        # A save that fails at its very end may have left a checkpoint, which the next one of this name replaces.
        accelerator._unfinished_save = storage.location
        if state_io.saves_shards:
            save.check_collected()  # a rank that has nothing to write would be waited for by those that write together
        save.finish()
        accelerator._unfinished_save = None
        project.iteration += 1
    else:
        project.iteration += 1  # on all ranks, whatever becomes of it on one of them
        try:
            save.check_collected()
        except BaseException:
            background.buffers.release()
            raise
        background.start(lambda: save.finish(writers=1), what=storage.location)
    return _as_given(storage, path)


def _as_given(storage: CheckpointStorage, path: Folder) -> Path | str:
    """Return the path that a caller gave to a storage, relative if it was; a URL as the storage has it."""
    text = os.path.expanduser(os.fspath(path))
    if "://" not in text:
        return Path(text)
    return Path(storage.location) if isinstance(storage, LocalStorage) else storage.location


def _facts(accelerator: TrainingRun, strategy: Strategy) -> dict[str, Any]:
    """Return what a manifest says of the run."""
    mesh = accelerator.torch_device_mesh
    sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return {
        "world_size": accelerator.num_processes,
        "strategy": strategy.name,
        "mesh": sizes,
        "step": accelerator.step,
        "iteration": accelerator.project_configuration.iteration,
    }


def _automatic(
    accelerator: TrainingRun,
) -> tuple[Callable[[CheckpointStorage], Any], Callable[[CheckpointStorage], Any]]:
    """With automatic naming: what is done before a checkpoint is staged, and once it is in its place."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return (lambda storage: None), (lambda storage: None)
    number, limit, loaded = project.iteration, project.total_limit, accelerator._loaded_checkpoint
    unfinished = accelerator._unfinished_save

    def refuse(storage: CheckpointStorage) -> None:
        if storage.location != unfinished and storage.state().loads:
            raise ValueError(
                f"The checkpoint {storage.location!r} exists and would be overwritten. Load it before you go on, "
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


def _collect(
    accelerator: TrainingRun, plan: SavePlan, each_node: bool, safe_serialization: bool, model_options: dict[str, Any]
) -> None:
    """Put everything that this rank saves into a plan."""
    for extension_saves in accelerator.extensions.saving:
        extension_saves(plan)
    strategy, state_io = accelerator._strategy, accelerator._state_io
    schedulers = state_io.checkpointed_schedulers(accelerator)
    # Through the method, because libraries replace it. Hooks of strategies that save shards see no weights.
    whole = [] if state_io.saves_shards else accelerator._models
    states: list[dict[str, Any]] = [plain_names(accelerator.get_state_dict(model)) for model in whole]
    hooks = list(accelerator._save_model_state_pre_hook.values())
    models = accelerator._models if hooks else []
    models = [model if state_io.owns_state(model) else strategy.unwrap_model(model) for model in models]
    for hook in hooks:
        hook(models, states, plan.folder)
    if unused := sorted(model_options.keys() - set(state_io.save_options)):
        warn_user(f"save_state got {unused}, which the strategy {strategy.name!r} does not use.")
    options = {name: value for name, value in model_options.items() if name in state_io.save_options}
    options.update(safe_serialization=safe_serialization, save_on_each_node=each_node)
    if state_io.saves_shards:
        states = [{} for _ in accelerator._models]
    for index, state in enumerate(states):
        state_io.save_model(accelerator, state, plan, index, **options)
    for index, optimizer in enumerate(accelerator._optimizers):
        state_io.save_optimizer(accelerator, optimizer, plan, index, save_on_each_node=each_node)
    known = names_file(accelerator._optimizers, accelerator._models)
    if known is not None and plan.writes_shared:
        plan.add_bytes(PARAMETER_NAMES, known)
    if accelerator.scaler is not None:
        scaling.flush_update(accelerator.scaler)
    write_common(Common.of(accelerator, schedulers), plan, accelerator.step, each_node)


def register_for_checkpointing(accelerator: TrainingRun, *objects: Any) -> None:
    """Let ``save_state`` and ``load_state`` treat further objects. All ranks, in the same order."""
    bad = [
        f"argument {position} ({get_pretty_name(obj)})"
        for position, obj in enumerate(objects)
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict"))
    ]
    if bad:
        raise ValueError(
            "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. Those that do not: "
            + ", ".join(bad)
        )
    accelerator._custom_objects.extend(objects)


def register_hook(hooks: "OrderedDict[int, Callable[..., None]]", hook: Callable[..., None]) -> RemovableHandle:
    """Add a function that is called before models are saved or loaded; return its removable handle."""
    if not callable(hook):
        raise TypeError(f"A hook is called, but got {hook!r} ({type(hook).__name__}).")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


# -- models and objects --------------------------------------------------------------------------------------------


def get_state_dict(
    accelerator: TrainingRun, model: nn.Module, unwrap: bool, offloaded: Callable[[nn.Module], dict[str, Any]]
) -> dict[str, Any]:
    """Return the full state dict of a model; `offloaded` collects that of offloaded weights. All ranks call it."""
    for module in model.modules():
        # Of several hooks of a module, one may keep its weights elsewhere.
        hooked = "_hf_hook" in module.__dict__
        if hooked and (has_offloaded_params(module) or any(w.is_meta for w in module.parameters(recurse=False))):
            return offloaded(model)
    state = accelerator._state_io.model_state(accelerator, model, unwrap=unwrap)
    return plain_names(state) if unwrap and state is not None else state


def _refuse_meta(state: Mapping[str, Any]) -> None:
    if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise RuntimeError(
            f"{len(meta)} weights are on the meta device and have no values, {meta[0]!r} for one. Load them before saving."
        )


def stream_weights(
    accelerator: TrainingRun, model: nn.Module, dtype: torch.dtype | None, limit: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of a model's whole tensors in buckets of at most so many bytes, or of one tensor. All ranks, in step."""
    # A cast must not change packed weights and their scales.
    scales = canonical_names(tensor_kinds.of_model(accelerator._strategy.unwrap_model(model)))
    packed = tuple([name.rpartition(".")[0] for name in scales])
    inner = (*model.parameters(), *model.buffers()) if accelerator._state_io.gathers_new_memory else ()
    own = {local_part(tensor).data_ptr() for tensor in inner}
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, value in accelerator._state_io.whole_tensors(accelerator, model):
        if not isinstance(value, torch.Tensor):  # an extra state of a module
            continue
        _refuse_meta({name: value})
        kept = dtype if dtype and value.is_floating_point() and not name.startswith(packed) else value.dtype
        if bucket and size + value.numel() * kept.itemsize > limit:
            yield bucket
            bucket.clear()  # the caller's variable would hold its memory while the next one is filled
            size = 0
        bucket[name] = value.detach().to(kept, copy=not own or value.data_ptr() in own)
        size += bucket[name].nbytes
    if bucket:
        yield bucket
        bucket.clear()


def save_model(
    accelerator: TrainingRun,
    model: nn.Module,
    save_directory: Folder,
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Save a model's weights alone, in shards if they are large. All ranks call it, one process writes."""
    if os.path.isfile(save_directory):
        raise NotADirectoryError(f"save_directory={os.fspath(save_directory)!r} is a file; pass a folder.")
    convert_file_size_to_int(max_shard_size)  # refused on all ranks, not by the one that writes alone
    state = accelerator.get_state_dict(model)
    _refuse_meta(state or {})
    if not writes(accelerator.project_configuration.save_on_each_node):
        return
    if accelerator._state_io.saves_shards and not accelerator.is_main_process:
        warn_user(
            "save_model with save_on_each_node=True writes on the first node only here: the weights are gathered by the main "
            f"process. Copy {os.fspath(save_directory)!r} from there if other nodes need it."
        )
        return
    if safe_serialization:
        state = clean_state_dict_for_safetensors(state)
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    formats.replace_weights(save_directory, state, pattern, convert_file_size_to_int(max_shard_size))
    readers_first = [os.path.join(save_directory, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)]
    if not safe_serialization and any(map(os.path.exists, readers_first)):
        warn_user(
            f"save_model wrote {WEIGHTS_NAME}, but {os.fspath(save_directory)!r} also has safetensors of an earlier save, which "
            "readers prefer. Remove them, or save with safe_serialization=True."
        )


# -- adapters of PEFT ----------------------------------------------------------------------------------------------


def save_adapter(accelerator: TrainingRun, model: nn.Module, folder: Folder) -> None:
    """Gather a model's adapters, compare them with the shards of each rank, and let rank 0 write them. All ranks."""
    inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
    adapters = getattr(inner, "peft_config", None) or {}
    if not adapters or any(config.is_prompt_learning for config in adapters.values()):
        raise ValueError(
            f"save_adapter got {type(inner).__name__} with the adapters {list(adapters)}, and saves those that PEFT has put into "
            "layers. Add one with peft.get_peft_model before `prepare`; save_model saves whole models, save_pretrained learnt prompts."
        )
    names: list[str] = []
    any(accelerator._state_io.whole_tensors(accelerator, model, names.append))  # which wants none of them
    # PEFT chooses by names, on all ranks, as it may ask units for their states. Rank 0's choice counts, as it may ask the hub.
    marks = {name: torch.tensor([number]) for number, name in enumerate(names)}
    chosen = {adapter: fsdp.adapter_entries(model, marks, adapter) for adapter in adapters}
    files = {adapter: {key: names[int(mark)] for key, mark in marks.items()} for adapter, marks in chosen.items()}
    files = states.from_first_rank(files)
    wanted = {name for file in files.values() for name in file.values()}
    own: dict[str, torch.Tensor] = (
        {} if io_of(model).gives_copies else {canonical_name(name): value for name, value in inner.named_parameters()}
    )
    state, problems = {}, []
    value: torch.Tensor
    for name, value in accelerator._state_io.whole_tensors(accelerator, model, wanted.__contains__):
        problems += shard.misfit(name, value, own.get(name, value))
        if accelerator.is_main_process:
            state[name] = value.to("cpu", copy=True)
    if problems := list(itertools.chain.from_iterable(states.gather_from_all_ranks(problems))):
        raise RuntimeError(f"The adapters were not saved: {'; '.join(problems[:5])}.")

    def write() -> None:
        for adapter, file in files.items() if accelerator.is_main_process else ():
            tensors = {key: state[name] for key, name in file.items()}
            _write_adapter(inner, adapter, tensors, os.path.join(folder, adapter if adapter != "default" else ""))

    states.run_on_all_ranks(write)


def _write_adapter(inner: Any, adapter: str, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """Write an adapter's files; a folder has the former adapter, the new one, or none that PEFT would load. One process."""
    config = copy.copy(inner.peft_config[adapter])
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or inner.__dict__.get("name_or_path")
    if not hasattr(
        inner, "get_base_model"
    ):  # adapters in the place of layers: PEFT loads them into a model that it wraps
        tensors = {f"base_model.model.{name}": value for name, value in tensors.items()}
    with tempfile.TemporaryDirectory() as aside:
        config.save_pretrained(aside)
        text = Path(aside, _ADAPTER).read_bytes()
    path = Path(folder, _ADAPTER)
    if path.exists() and path.read_bytes() != text:  # of another adapter, whose weights go
        path.unlink()
    formats.replace_weights(folder, clean_state_dict_for_safetensors(tensors), "adapter_model{suffix}.safetensors")
    formats.write_bytes(path, text)
