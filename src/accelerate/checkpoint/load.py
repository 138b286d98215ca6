"""What a checkpoint has of each object: its file is written and read here, and the object gets its state back.

`Contents` is what was read. A load changes nothing before all of it has been read, and takes back what it did when an
object refuses its state. `checkpoint.layouts` knows the layouts of sharded strategies.
"""

import contextlib
import copy
import inspect
import logging
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint import formats, manifest
from accelerate.checkpoint.save import SavePlan, copied
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.modules.unwrap import (
    clean_state_dict_for_safetensors,
    extract_model_from_parallel,
    match_names,
    same_tensors,
    shared_tensor_names,
)
from accelerate.process import PartialState
from accelerate.utils import other
from accelerate.utils.constants import SCALER_NAME

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]

# Where a rank's file keeps the positions of its loaders. Other readers of the file look only for keys they know.
POSITIONS = "dataloader_positions"


# -- writing -------------------------------------------------------------------------------------------------------


def writes(save_on_each_node: bool = False) -> bool:
    """Say whether this process writes the shared files, of the run or of its node."""
    state = PartialState()
    return state.is_local_main_process if save_on_each_node else state.is_main_process


@contextlib.contextmanager
def planned(folder: Path, save_on_each_node: bool = False) -> Iterator[SavePlan]:
    """Give the plan that takes files: the caller's, or one for a plain folder, written when the block ends."""
    if isinstance(folder, SavePlan):
        yield folder
    else:
        plan = SavePlan(os.fspath(folder), writes_shared=writes(save_on_each_node))
        yield plan
        plan.write()


def plain_names(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict, and the versions of modules in it, without what torch.compile puts into names."""

    def plain(name: str) -> str:
        return f"{name}.".replace("_orig_mod.", "").removesuffix(".")

    state = OrderedDict((plain(name), value) for name, value in state_dict.items())
    if hasattr(state_dict, "_metadata"):
        # The entry of a compiled wrapper itself gives way to that of the module inside, which follows it.
        state._metadata = OrderedDict((plain(name), version) for name, version in state_dict._metadata.items())
    return state


def write_model(
    state_dict: Mapping[str, Any],
    folder: Path,
    index: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
) -> None:
    """Write the state dict of model number `index`. All ranks call it, one process writes.

    Raises:
        ValueError: safetensors cannot hold a value of the state dict; the message names it.
    """
    file = manifest.model_file(index, safe_serialization)
    with planned(folder, save_on_each_node) as plan:
        if not plan.writes_shared:
            return
        if safe_serialization:
            state = clean_state_dict_for_safetensors(state_dict)
            plan.add_tensors(file, state, metadata={"format": "pt"}, aliases=same_tensors(state_dict))
        else:
            plan.add_object(file, state_dict)
    if plan is not folder:
        # Of an earlier save in the other format; a reader would not know which of the two is newer.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, manifest.model_file(index, not safe_serialization)))


def write_optimizer(state: Any, folder: Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of optimizer number `index`. All ranks call it, one process writes."""
    with planned(folder, save_on_each_node) as plan:
        if plan.writes_shared:
            plan.add_object(manifest.optimizer_file(index), state)


# -- reading -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Name the file in the error of a library that cannot read it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"{path} could not be read: {error}\nIf it holds objects of your own and you trust its author, pass "
            "load_kwargs={'weights_only': False} to load_state; that runs code from the file."
        ) from error
    except Exception as error:
        if path in str(error):
            raise
        raise RuntimeError(f"{path} could not be read, so it is damaged: {type(error).__name__}: {error}") from error


def tensor_device(map_location: str | None, device: torch.device) -> Any:
    """Return the device that tensors are read to: the CPU, from where loading copies, or that of the rank."""
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r} is not supported; pass None, 'cpu' or 'on_device'.")
    return device if map_location == "on_device" else "cpu"


def read_file(
    folder: Path, file: str, what: str = "", map_location: Any = None, load_kwargs: Any = None, mapped: bool = False
) -> Any:
    """Read safetensors, or torch's format without running code of the file. Any rank, alone.

    Args:
        folder: The checkpoint's folder.
        file: The file in it.
        what: Whose state it is; where that is empty, a file that is not there is None.
        map_location: Where tensors go; the CPU by default.
        load_kwargs: Passed to ``torch.load``.
        mapped: The memory of tensors on the CPU may be the file's; see `formats.mapped`.
    """
    path, device = os.path.join(folder, file), str(map_location or "cpu")
    if not os.path.exists(path):
        if not what:
            return None
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no state for {what}: {file} is missing. Prepare what was saved, in the same "
            "order, or load another folder."
        )
    with _reported(path):
        if path.endswith(".safetensors"):
            return {name: tensor.to(device) for name, tensor in formats.mapped(path).items()}
        if mapped and device == "cpu" and not load_kwargs:
            return formats.mapped(path)
        return other.load(path, map_location=device, **(load_kwargs or {}))


def read_optimizer(
    folder: Path, index: int = 0, map_location: Any = None, load_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Read the state of optimizer number `index`; the memory of its tensors may be the file's. Any rank, alone."""
    return read_file(
        folder, manifest.optimizer_file(index), f"optimizer {index}", map_location, load_kwargs, mapped=True
    )


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
    safe, pickled = manifest.model_file(index), manifest.model_file(index, safe_serialization=False)
    for file in (safe, pickled):
        weights = read_file(folder, file, "", map_location, load_kwargs, mapped=True)
        if weights is not None:
            return fit_to_model(model, weights, os.path.join(folder, file), strict)
    raise FileNotFoundError(
        f"Model {index} ({type(model).__name__}) has no weights: {os.fspath(folder)!r} has neither {safe} nor {pickled}. "
        "Prepare the models that were saved, in the same order, or load another folder."
    )


def fit_to_model(model: nn.Module, found: Mapping[str, Any], origin: str, strict: bool = True) -> dict[str, Any]:
    """Return weights of `origin` under the names of a model, which stays as it is; refuse other names and shapes."""
    own = model.state_dict()
    pairs = match_names(own, found)
    state = {pairs.get(name, name): value for name, value in found.items()}
    for group in shared_tensor_names(own):
        saved = next((name for name in group if name in state), None)
        for name in group:
            if saved is not None and name not in state and own[name].shape == state[saved].shape:
                state[name] = state[saved]
    missing, unexpected = [], []
    if strict and loads_by_name(model):
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
    differing = [
        f"{name} has {tuple(value.shape)} in the file and {tuple(own[name].shape)} in the model"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and isinstance(own.get(name), torch.Tensor)
        and not isinstance(own[name], nn.parameter.UninitializedTensorMixin)
        and value.shape != own[name].shape
    ]
    if differing or missing or unexpected:
        lists = {"other shapes": differing, "missing in the file": missing, "unexpected in the file": unexpected}
        problems = [_listed(title, entries) for title, entries in lists.items() if entries]
        problems.append("Build the model as it was when the checkpoint was saved.")
        if missing or unexpected:
            problems[-1] += " `load_state(..., strict=False)` accepts missing and unexpected names."
        raise RuntimeError(
            f"The weights in {origin} do not fit {type(model).__name__}; nothing was loaded.\n  "
            + "\n  ".join(problems)
        )
    return state


def _listed(title: str, entries: list[str]) -> str:
    more = f" and {len(entries) - 10} more" if len(entries) > 10 else ""
    return f"{title}: {', '.join(entries[:10])}{more}"


def loads_by_name(model: Any) -> bool:
    """Say whether loading looks for exactly the names of the state dict, and cannot fail once they and the shapes fit.

    Hooks and overrides may rename on the way, and they and what takes an extra state may refuse it.
    """
    model = getattr(model, "checked_model", model)  # of what a strategy takes a state with
    return isinstance(model, nn.Module) and not any(
        not all(map(_is_torchs, module._load_state_dict_pre_hooks.values()))
        or not all(map(_is_torchs, module._load_state_dict_post_hooks.values()))
        or type(module).load_state_dict is not nn.Module.load_state_dict
        or type(module).set_extra_state is not nn.Module.set_extra_state
        or not type(module)._load_from_state_dict.__module__.startswith("torch.nn.")
        for module in model.modules()
    )


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of torch's own, as FSDP registers them."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.")


def _read_own(folder: str, process_index: int) -> dict[str, Any] | None:
    """What a rank keeps for itself; its generators from the file without pickle where there is one."""
    file = manifest.random_states_file(process_index)
    states = read_file(folder, file)
    if not isinstance(states, dict | None):
        raise RuntimeError(f"{folder}/{file} is damaged: it holds a {type(states).__name__}, not a dict of states.")
    path = os.path.join(folder, manifest.generators_file(process_index))
    if not os.path.exists(path):
        return states
    from safetensors import safe_open

    with _reported(path), safe_open(path, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return {**(states or {}), **resume.decode_generators(tensors, opened.metadata() or {})}


# -- loaders --------------------------------------------------------------------------------------------------------


def keeps_state(loader: Any) -> bool:
    """Say whether a loader is stateful, as torchdata's are."""
    return resume.is_stateful(loader.base_dataloader if isinstance(loader, PreparedLoader) else loader)


def _restore_loader(loader: Any, state: Any | None, position: dict[str, Any] | None) -> None:
    """Put a loader into the epoch it was in, with the same order of samples.

    A loader that was being iterated continues after the batches behind it, unless ``continue_after_load`` is off. A
    loop that was left early, as evaluation loops are, begins anew; ``skip_first_batches`` may leave out its batches.
    """
    if position is None and isinstance(loader, PreparedLoader):
        extent = "only where it stood in it" if state is not None else "nor where it stood in it (skip_first_batches)"
        logger.info(
            "The checkpoint does not have the epoch of a data loader, %s. Call set_epoch on the loader.", extent
        )
    if state is not None and (position is None or loader.continue_after_load):
        loader.load_state_dict(state if position is None else {**state, resume.KEY: dict(position)})
    elif position is not None:
        resume.restore(loader, dict(position), continuing=loader.continue_after_load)


# -- the whole ------------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """What was read of a checkpoint, each state with the object it belongs to.

    `begin` gives their state to all that may refuse it, and remembers how to undo that. The ranks agree that each of
    them has come so far. Then `complete` does what cannot fail once names and shapes are compared, or all `undo`.

    Attributes:
        folder: Where it was read from, for messages.
        common: The objects that every strategy saves alike, and the rank.
        models: Modules and their state dicts.
        optimizers: Optimizers, their states, and the names of the files.
        objects: Other objects with ``load_state_dict``, their states, and the names of the files.
        dataloaders: Loaders, the states of those that are stateful, and their positions.
        random: Random states and step count of this rank, or None.
        is_new: This rank has none; ``random`` has those of the first rank, if any, from which its own are derived.
        remaining: What `complete` calls; a reader adds what reads over the tensors that are there.
    """

    folder: str
    common: "Common"
    models: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    optimizers: list[tuple[Any, Any, str]] = field(default_factory=list)
    objects: list[tuple[Any, Any, str]] = field(default_factory=list)
    dataloaders: list[tuple[Any, Any, dict[str, Any] | None]] = field(default_factory=list)
    random: dict[str, Any] | None = None
    is_new: bool = False
    _undoing: list[Callable[[], Any]] = field(default_factory=list)
    remaining: list[Callable[[], Any]] = field(default_factory=list)

    def begin(self, **load_model_kwargs: Any) -> None:
        """Give all objects their state whose own code might refuse it; undo that if one does. Any rank, alone."""
        try:
            for model, state in self.models:
                _check_options(model, state, load_model_kwargs)
            for obj, state, file in self.objects:
                with _naming(obj, os.path.join(self.folder, file)):
                    self._undoing.append(partial(obj.load_state_dict, copied(obj.state_dict())))
                    obj.load_state_dict(state)
            for optimizer, state, file in self.optimizers:
                with _naming(optimizer, os.path.join(self.folder, file)):
                    self._load_optimizer(optimizer, state)
            for loader, state, position in self.dataloaders:
                if isinstance(loader, PreparedLoader):
                    self._undoing.append(resume.kept(loader))
                if keeps_state(loader):
                    self._undoing.append(partial(loader.load_state_dict, copy.deepcopy(loader.state_dict())))
                _restore_loader(loader, state, position)
            for model, state in self.models:
                if loads_by_name(model):
                    own = formats.in_memory(state) if load_model_kwargs.get("assign") else state
                    self.remaining.append(partial(model.load_state_dict, own, **load_model_kwargs))
                else:
                    self.keep(model)
                    # Its own code may keep what it gets.
                    model.load_state_dict(formats.in_memory(state), **load_model_kwargs)
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def undo(self) -> None:
        """Give back what the objects had before. Any rank, alone."""
        self.remaining.clear()
        while self._undoing:
            try:
                self._undoing.pop()()
            except Exception as error:  # the others are still to be undone
                logger.error("A former state could not be given back: %s: %s", type(error).__name__, error)

    def complete(self) -> dict[str, Any]:
        """Restore the rest: plain modules, memory of optimizers, generators; return what the Accelerator takes over."""
        self._undoing.clear()
        while self.remaining:
            self.remaining.pop(0)()
        states, rank, device = dict(self.random or {}), self.common.process_index, self.common.device
        file = manifest.random_states_file(rank)
        attributes = {"step": states.pop("step")} if "step" in states else {}
        if self.random is None:
            logger.warning(
                f"{self.folder} has no {file}: rank {rank} keeps its random states and draws other numbers than an "
                "uninterrupted run. The checkpoint was saved by fewer processes, or not by all."
            )
        elif self.is_new:
            resume.derive_generators(states, rank, device, f"{self.folder} has no {file}")
        else:
            resume.restore_generators(states, device, f"{self.folder}/{file}")
        return attributes

    def keep(self, model: Any) -> None:
        """Remember the values of a module's parameters and buffers, which `undo` gives back."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._undoing.append(partial(tensor.copy_, tensor.detach().clone()))

    def _load_optimizer(self, optimizer: Any, state: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if keeps_values(inner):
            tensors = {parameter: dict(values) for parameter, values in inner.state.items()}
            self.remaining.append(partial(_take_over, inner, formats.storages(state), tensors))
            # Loading the former state again would give its tensors the dtypes of the parameters.
            former = {"state": inner.state, "param_groups": inner.param_groups}
            self._undoing.append(partial(inner.__setstate__, former))
        else:  # its own code, or that of a hook, may keep what it gets, and change the tensors that it has
            state = formats.in_memory(state)
            self._undoing.append(partial(optimizer.load_state_dict, copied(optimizer.state_dict())))
        optimizer.load_state_dict(state)


def keeps_values(optimizer: Any) -> bool:
    """Say whether loading puts tensors into an optimizer as they are: torch's own code does it, and no hook."""
    return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not (
        optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    )


def _check_options(model: Any, state: Any, options: dict[str, Any]) -> None:
    """Refuse what a model's `load_state_dict` would refuse, before anything has changed."""
    try:
        inspect.signature(model.load_state_dict).bind(state, **options)
    except TypeError as error:
        raise TypeError(
            f"load_state got {sorted(options)} for {type(model).__name__}.load_state_dict, which does not take "
            f"that: {error}. Nothing was loaded."
        ) from None


@contextlib.contextmanager
def _naming(obj: Any, path: str) -> Iterator[None]:
    """Let an error name the object whose state it is, and the file."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        if type(error).__module__ != "builtins":  # a program may wait for an error of its own
            raise
        kind = ValueError if type(error) is ValueError else RuntimeError
        raise kind(
            f"{type(obj).__name__} refuses its state in {path!r}; nothing was loaded. {type(error).__name__}: {error}"
        ) from error


def _take_over(optimizer: Any, mapped: set[int], former: dict[Any, dict[str, Any]]) -> None:
    """Give an optimizer memory of its own for what is a file's: that of the tensors it had, where they are alike."""
    for parameter, state in optimizer.state.items():
        replaced = former.pop(parameter, {})
        for name, value in state.items():
            if type(value) is torch.Tensor and value.untyped_storage().data_ptr() in mapped:
                before = replaced.pop(name, None)
                state[name] = before.copy_(value) if _kind(before) == _kind(value) else value.clone()


def _kind(tensor: Any) -> Any:
    """What two tensors have in common when one can take the place of the other."""
    return type(tensor) is torch.Tensor and (tensor.shape, tensor.dtype, tensor.device, tensor.stride())


@dataclass(frozen=True)
class Common:
    """The objects that every strategy saves alike, all but models and optimizers, in order; and the rank whose they are.

    Attributes:
        schedulers: The learning rate schedulers.
        dataloaders: Prepared loaders.
        custom: Registered objects.
        scaler: The gradient scaler, or None.
        process_index: This rank.
        device: Its device.
    """

    schedulers: Sequence[Any]
    dataloaders: Sequence[Any]
    custom: Sequence[Any]
    scaler: Any | None
    process_index: int
    device: torch.device

    @classmethod
    def of(cls, accelerator: "Accelerator", schedulers: Sequence[Any]) -> "Common":
        """Return those of an Accelerator, with the schedulers that its strategy saves."""
        loaders, custom, scaler = accelerator._dataloaders, accelerator._custom_objects, accelerator.scaler
        return cls(schedulers, loaders, custom, scaler, accelerator.process_index, accelerator.device)

    def _shared(self) -> list[tuple[Any, str, str]]:
        """Return the objects whose state one rank writes, their files, and what an error calls one that has none."""
        found = [(obj, manifest.custom_file(n), f"registered object {n}") for n, obj in enumerate(self.custom)]
        found += [(obj, manifest.scheduler_file(n), f"scheduler {n}") for n, obj in enumerate(self.schedulers)]
        return found if self.scaler is None else [*found, (self.scaler, SCALER_NAME, "")]

    def _loaders(self) -> list[Any]:
        """Return the loaders, those inside torch_xla's in place of these."""
        inner = [vars(loader).get("dataloader") for loader in self.dataloaders]
        pairs = zip(inner, self.dataloaders, strict=True)
        return [one if isinstance(one, PreparedLoader) else loader for one, loader in pairs]

    def write(self, folder: Path, step: int, save_on_each_node: bool = False) -> None:
        """Write their states. All ranks call it: one writes what is shared, and each its own.

        Args:
            folder: The checkpoint's folder, or a plan for it.
            step: The step count.
            save_on_each_node: Each node has a folder of its own.
        """
        shared = {file: obj.state_dict() for obj, file, _ in self._shared()}
        loaders = self._loaders()
        # Ranks stand at different places of their data.
        positions = [resume.capture(loader) if isinstance(loader, PreparedLoader) else None for loader in loaders]
        with planned(folder, save_on_each_node) as plan:
            for file, state in shared.items() if plan.writes_shared else ():
                plan.add_object(file, state)
            # The writer of shared files leaves its states under the plain names, the only ones that others read.
            rank = None if plan.writes_shared else self.process_index
            for index, loader in enumerate(loaders):
                if keeps_state(loader):
                    state = {name: value for name, value in loader.state_dict().items() if name != resume.KEY}
                    plan.add_object(manifest.dataloader_file(index, rank), state)
            generators = resume.collect_generators(self.device)
            if plan is folder:
                # Beside the file that upstream reads. It also shows that a manifest belongs to the folder.
                tensors, metadata = resume.encode_generators(generators)
                plan.add_tensors(manifest.generators_file(self.process_index), tensors, metadata=metadata)
            own = {"step": step, **generators, POSITIONS: positions}
            plan.add_object(manifest.random_states_file(self.process_index), own)

    def read(self, folder: str, load_kwargs: dict[str, Any] | None = None) -> Contents:
        """Read their states. Any rank, alone.

        Args:
            folder: The checkpoint's folder.
            load_kwargs: Passed to ``torch.load``.

        Raises:
            FileNotFoundError: The folder lacks a file; the message names it.
            ValueError: An interrupted epoch cannot go on with its loader, because that has other data.
        """
        own = _read_own(folder, self.process_index)
        random = own if own is not None else _read_own(folder, 0)
        contents = Contents(folder, self, random=random, is_new=own is None)
        read = partial(read_file, folder, load_kwargs=load_kwargs)
        for obj, file, what in self._shared():
            state = read(file, what)
            if state is None and obj is self.scaler:
                logger.warning(
                    f"{folder} has no {file}: it was saved without a gradient scaler, and the scale starts anew."
                )
            else:
                contents.objects.append((obj, state, file))
        # A rank that was not there when the checkpoint was saved must draw the same epoch as the others.
        positions = (random or {}).pop(POSITIONS, None) or []
        for index, loader in enumerate(self._loaders()):
            state, position = None, None
            if keeps_state(loader):
                state = read(manifest.dataloader_file(index, self.process_index))
                state = read(manifest.dataloader_file(index)) if state is None else state
            if index < len(positions) and isinstance(loader, PreparedLoader):
                position = positions[index]
            if position is not None and loader.continue_after_load:
                resume.check(loader, dict(position), f"Data loader {index} (in the order of prepare)")
            contents.dataloaders.append((loader, state, position))
        return contents
