"""Loading a checkpoint: the files of each object are read, and the object gets its state back.

`Contents` is what was read. A load changes nothing before all of it has been read, and takes back what it did when an
object refuses its state. `checkpoint.layouts` knows the layouts of sharded strategies.
"""

import contextlib
import copy
import inspect
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from accelerate.checkpoint import formats, manifest, schedules, torch_files
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest, damaged
from accelerate.checkpoint.model_io import inner_optimizer
from accelerate.checkpoint.state import LOADERS, POSITIONS, Common, keeps_state
from accelerate.data import resume
from accelerate.data.loader import PreparedLoader
from accelerate.modules import tensor_kinds
from accelerate.runtime import durable, generators

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]

# From this many bytes on, files are mapped.
LARGE = 4 << 20


# -- reading -------------------------------------------------------------------------------------------------------


def tensor_device(map_location: str | None, device: torch.device) -> Any:
    """Return the device that tensors are read to: the CPU, from where loading copies, or that of the rank."""
    if map_location not in (None, "cpu", "on_device"):
        raise TypeError(f"map_location={map_location!r} is not supported; pass None, 'cpu' or 'on_device'.")
    return device if map_location == "on_device" else "cpu"


def read_file(
    folder: Path, file: str, what: str = "", map_location: Any = None, load_kwargs: Any = None, mapped: bool = False
) -> Any:
    """Read safetensors, or torch's format without running code of the file. Any rank, alone.

    A file that is missing is None if `what`, whose state it is, is empty. `mapped` allows memory that is the file's.
    """
    path, device = os.path.join(folder, file), str(map_location or "cpu")
    if not os.path.lexists(path):
        if not what:
            return None
        raise FileNotFoundError(
            f"{os.fspath(folder)!r} has no state for {what}: {file} is missing. Prepare what was saved, in the same "
            "order, or load another folder."
        )
    durable.require_file(path)
    if path.endswith(".safetensors"):
        tensors = mapped_file(path)
        return tensors if device == "cpu" else {name: tensor.to(device) for name, tensor in tensors.items()}
    if mapped and device == "cpu" and not load_kwargs:
        return mapped_file(path)
    try:
        return torch_files.load(path, device, **(load_kwargs or {}))
    except Exception as error:
        _raise_unreadable(path, error)


def read_optimizer(folder: Path, index: int = 0, **options: Any) -> Any:
    """Read the state of optimizer number `index`; the memory of its tensors may be the file's. Any rank, alone."""
    return read_file(folder, manifest.optimizer_file(index), f"optimizer {index}", mapped=True, **options)


def mapped_file(path: str) -> Any:
    """Return what a file of tensors holds; the memory of large ones is the file's, read when it is touched, not written back.

    UnpicklingError if it holds what is not plain data, of which no code ran; DamagedCheckpoint if it is damaged.
    """
    from safetensors import safe_open  # here: every import of the package passes this module

    durable.require_file(path)
    try:
        # A process dies of a mapping whose file becomes shorter.
        maps = os.path.getsize(path) > LARGE
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
            return found if maps else {name: value.clone() for name, value in found.items()}
        try:
            return torch_files.load(path, "cpu", mmap=maps)
        except (NotImplementedError, RuntimeError):  # no plain memory, or a file from before torch 1.6
            return torch_files.load(path, "cpu")
    except Exception as error:
        _raise_unreadable(path, error)


def _raise_unreadable(path: str, error: Exception) -> NoReturn:
    """Name the file in the error of a library that cannot read it."""
    if isinstance(error, pickle.UnpicklingError):
        raise pickle.UnpicklingError(
            f"{path} could not be read: {error}\nIf it holds objects of your own and you trust its author, pass "
            "load_kwargs={'weights_only': False} to load_state; that runs code from the file."
        ) from error
    if path in str(error):
        raise error
    raise DamagedCheckpoint(f"{path} could not be read, so it is damaged: {error!r}") from error


def refuse_misfit(origin: str, model: str, problems: Sequence[str], more: str = "") -> None:
    """Raise RuntimeError if weights do not fit a model: `problems` has a line for each difference."""
    if problems:
        lines = "\n  ".join(manifest.first_of(problems))
        advice = f"Build the model as it was when the checkpoint was saved{more}."
        raise RuntimeError(f"The weights in {origin} do not fit {model}; nothing was loaded.\n  {lines}\n{advice}")


def loads_by_name(model: Any) -> bool:
    """Say whether loading takes exactly the names of the state dict, and cannot fail once they and the shapes fit.

    Hooks and overrides may rename on the way, and they and what takes an extra state may refuse it.
    """
    if not isinstance(model, nn.Module):
        return getattr(model, "loads_by_name", False)  # of a strategy, which has asked
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


# -- what is read is what was written --------------------------------------------------------------------------------------


# Files, all of each or, for those that map to some, the ranges of bytes in them.
Ranges = Iterable[str] | Mapping[str, Iterable[tuple[int, int]] | None]


class CheckpointFolder(str):
    """A checkpoint's folder, with its manifest: what a rank reads of a file is hashed before, each piece once.

    Attributes:
        listing: the manifest.
        reader: which one it is of the ranks that read the same files from one disk, and of how many.
        bring: makes sure that files are in the folder, as `CheckpointStorage.bring` does.
        wrong: what `differences` has returned so far.
    """

    def __new__(cls, folder: str, *about: Any) -> "CheckpointFolder":
        """Return the path."""
        return super().__new__(cls, folder)

    def __init__(
        self,
        folder: str,
        listing: Manifest,
        reader: tuple[int, int] = (0, 1),
        bring: Callable[[dict[str, int]], None] = lambda sizes: None,
    ) -> None:
        self.listing, self.reader, self.bring = listing, reader, bring
        self.wrong: list[str] = []
        self._hashed: set[tuple[str, int]] = set()
        self._entries: dict[str, FileEntry] = {}

    def entries(self, names: Iterable[str]) -> list[FileEntry]:
        """Return the full entries of files, of those that are listed; the part of a rank is read once."""
        files = self.listing.files
        names = [name for name in names if name in files]
        if ranks := {files[name].rank for name in names if name not in self._entries}:
            parts = [name for name in map(manifest.part_file, ranks) if name in files]
            self.bring({name: files[name].size for name in parts})
            theirs = [name for name, entry in files.items() if entry.rank in ranks]
            self._entries.update(self.listing.detailed(self, theirs))
        return [self._entries[name] for name in names]

    def check(self, wanted: Ranges, below: str = "", shared: bool = False) -> None:
        """Raise DamagedCheckpoint with what `differences` returns."""
        if lines := self.differences(wanted, below, shared):
            raise damaged(self, lines)

    def differences(self, wanted: Ranges, below: str = "", shared: bool = False) -> list[str]:
        """Hash the pieces of files, `below` a folder inside, that are wanted; return a line for each file that is not what was written.

        What was hashed before is left out; of what is `shared`, all ranks at one disk want the same, and each hashes a part.
        """
        reader, readers = self.reader if shared else (0, 1)
        try:
            ranges = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
            prefix = below and f"{below}/"
            pieces = self._not_hashed({f"{prefix}{name}": some for name, some in ranges.items()})
            own: dict[str, list[int]] = {}
            # Files that have no digests of pieces are hashed as a whole: the largest first, by turns.
            for _, _, name, number in sorted(pieces)[reader::readers]:
                own.setdefault(name, []).append(number)
            if own:
                self.bring({name: self._entries[name].size for name in own})
        except DamagedCheckpoint as error:
            lines = [str(error)]
        else:
            lines = self._changed(own) if own else []
        self.wrong += lines
        return lines

    def _not_hashed(self, wanted: Mapping[str, Iterable[tuple[int, int]] | None]) -> list[tuple[bool, int, str, int]]:
        """Return the pieces of listed files that hold some ranges and that none has hashed, and note that they are hashed.

        Each has its file and its number behind what `differences` sorts by.
        """
        pieces = []
        self.entries(wanted)
        for name, ranges in wanted.items():
            if (entry := self._entries.get(name)) is None:
                continue
            numbers: Iterable[int] = range(-(-entry.size // durable.CHUNK)) if entry.digests else (0,)
            if entry.digests and ranges is not None:
                spans = [range(start // durable.CHUNK, -(-stop // durable.CHUNK)) for start, stop in ranges]
                numbers = set().union(*spans)
            new = {(name, number) for number in numbers} - self._hashed
            self._hashed |= new
            pieces += [(bool(entry.digests), -entry.size, *piece) for piece in new]
        return pieces

    def _changed(self, pieces: Mapping[str, Sequence[int]]) -> list[str]:
        """Hash pieces of files, and return a line for each file that is not what was written."""
        lines, threads = [], durable.threads()
        for name, numbers in pieces.items():
            entry, path = self._entries[name], os.path.join(self, *name.split("/"))
            try:
                if (size := durable.require_file(path)) != entry.size:
                    lines.append(manifest.difference(name, entry.size, size))
                elif not entry.digests:
                    found = durable.digests(path, range(0, size, durable.CHUNK), size, threads)
                    lines += manifest.changed(name, entry, durable.combined(found))
                else:
                    found = durable.digests(path, [number * durable.CHUNK for number in numbers], size, threads)
                    written = [entry.digests[32 * number : 32 * number + 32] for number in numbers]
                    lines += [
                        f"{name} has changed: the checksum of its piece {number} is {digest.hex()}, but {known} was written"
                        for number, digest, known in zip(numbers, found, written, strict=True)
                        if digest.hex() != known
                    ][:1]
            except OSError as error:
                lines.append(f"{name} could not be read: {error}")
        return lines


def with_manifest(folder: Path) -> CheckpointFolder:
    """Return a folder that compares what is read with its manifest, an empty one if it has none. Any rank, alone."""
    if isinstance(folder, CheckpointFolder):
        return folder
    has_one = os.path.isfile(os.path.join(folder, manifest.NAME))
    return CheckpointFolder(os.fspath(folder), Manifest.read(folder) if has_one else Manifest({}))


# -- loaders --------------------------------------------------------------------------------------------------------


def _restore_loader(loader: Any, state: Any | None, position: dict[str, Any] | None) -> None:
    """Put a loader into the epoch it was in, with the same order of samples.

    A loader that was being iterated continues after the batches behind it, unless ``continue_after_load`` is off. A
    loop that was left early, as evaluation loops are, begins anew; ``skip_first_batches`` may leave out its batches.
    """
    if position is None and isinstance(loader, PreparedLoader):
        extent = "only where it stood in it" if state is not None else "nor where it stood in it (skip_first_batches)"
        logger.info("The checkpoint does not have the epoch of a loader, %s. Call set_epoch on the loader.", extent)
    if state is not None and (position is None or loader.continue_after_load):
        loader.load_state_dict(state if position is None else {**state, resume.KEY: dict(position)})
    elif position is not None:
        resume.restore(loader, dict(position), continuing=loader.continue_after_load)


# -- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deferred:
    """A state with the tensors of the object that takes it; once every rank has given it, `finish` reads over them."""

    state: Any
    finish: Callable[[], None]


@dataclass
class Contents:
    """What was read of a checkpoint, each state with the object it belongs to.

    `begin` gives their state to all that may refuse it, and remembers how to undo that. The ranks agree that each of
    them has come so far. Then `complete` does what cannot fail once names and shapes are compared, or all `undo`.

    Attributes:
        optimizers: with their states, and the names of the files, as `objects`.
        dataloaders: with the states of those that are stateful, and their positions.
        saved_loaders: how many loaders have a position in the checkpoint.
        unclaimed: names of the states that no prepared object takes.
        schedule_units: what `schedules.units` returned in the run that saved, None where it was not saved.
        changed_schedules: a line for each schedule whose rate may not be the uninterrupted run's; from `complete` on.
        random: random states and step count of this rank, or None.
        is_new: this rank has none; ``random`` has those of the first rank, if any, from which its own are derived.
        remaining: what `complete` calls; a reader adds what reads over the tensors that are there.
    """

    folder: str
    common: Common
    models: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    optimizers: list[tuple[Any, Any, str]] = field(default_factory=list)
    objects: list[tuple[Any, Any, str]] = field(default_factory=list)
    dataloaders: list[tuple[Any, Any, dict[str, Any] | None]] = field(default_factory=list)
    saved_loaders: int = 0
    unclaimed: list[str] = field(default_factory=list)
    schedule_units: list[int] | None = None
    changed_schedules: list[str] = field(default_factory=list)
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
                    self._undoing.append(partial(obj.load_state_dict, formats.deep_copied(obj.state_dict())))
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
                    self.remaining.append(partial(_load_by_name, model, state, load_model_kwargs))
                else:
                    self.keep(model)
                    # Its own code may keep what it gets.
                    model.load_state_dict(in_memory(state), **load_model_kwargs)
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
        try:
            while self.remaining:
                self.remaining.pop(0)()
        except OSError as error:
            raise DamagedCheckpoint(
                f"{self.folder} changed while it was loaded: {error}. Some of the state is the checkpoint's, and some is what it was before. "
                "Load again, and replace files by a rename."
            ) from error
        self.changed_schedules = schedules.restore(self.common, self.folder, self.schedule_units)
        states, rank, device = dict(self.random or {}), self.common.process_index, self.common.device
        file = manifest.random_states_file(rank)
        attributes = {"step": states.pop("step")} if "step" in states else {}
        if self.random is None:
            logger.warning(f"{self.folder} has no {file}: rank {rank} keeps its random states, draws other numbers.")
        elif self.is_new:
            generators.derive(states, rank, device, f"{self.folder} has no {file}")
        else:
            generators.restore(states, device, f"{self.folder}/{file}")
        return attributes

    def keep(self, model: Any) -> None:
        """Remember the values of a module's parameters and buffers, which `undo` gives back."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._undoing.append(partial(tensor.copy_, tensor.detach().clone()))

    def _load_optimizer(self, optimizer: Any, state: Any) -> None:
        inner = inner_optimizer(optimizer)
        state = tensor_kinds.rebuilt(inner, state)
        if uses_torch_load(inner):
            inside = [
                value for values in state["state"].values() if isinstance(values, Mapping) for value in values.values()
            ]
            read = {value.untyped_storage().data_ptr() for value in inside if type(value) is torch.Tensor}
            tensors = {parameter: dict(values) for parameter, values in inner.state.items()}
            self.remaining.append(partial(_take_over, inner, read, tensors))
            # Loading the former state again would give its tensors the dtypes of the parameters.
            former = {"state": inner.state, "param_groups": inner.param_groups}
            self._undoing.append(partial(inner.__setstate__, former))
        else:  # its own code, or that of a hook, may keep what it gets, and change the tensors that it has
            state = in_memory(state)
            self._undoing.append(partial(inner.load_state_dict, formats.deep_copied(inner.state_dict())))
        inner.load_state_dict(state)


def uses_torch_load(optimizer: Any) -> bool:
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
            f"{type(model).__name__}.load_state_dict does not take {sorted(options)}; nothing was loaded: {error}."
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


@torch.no_grad()
def _load_by_name(model: Any, state: dict[str, Any], options: dict[str, Any]) -> None:
    """Do what `load_state_dict` does where that is to copy values by name; OSError, where it ends the process, if a file became shorter."""
    own: dict[str, torch.Tensor] = {}
    if isinstance(model, nn.Module) and "load_state_dict" not in vars(model):
        every = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        for name, tensor in every:
            own[name] = tensor.detach()
    pairs = [(own[name], value) for name, value in state.items() if name in own]
    plain = not options.get("assign") and len(pairs) == len(state)
    if plain and all(type(target) is type(value) is torch.Tensor for target, value in pairs):
        copy_over(pairs)
    else:
        model.load_state_dict(in_memory(state) if options.get("assign") else state, **options)


def _take_over(optimizer: Any, read: set[int], former: dict[Any, dict[str, Any]]) -> None:
    """Give an optimizer memory of its own for what was read, by addresses: that of the tensors it had, where shape, dtype, device and strides are equal."""
    places, pairs = [], []
    for parameter, state in optimizer.state.items():
        replaced = former.pop(parameter, {})
        for name, value in state.items():
            # What was read lies in the host's memory; some devices have no addresses.
            on_host = type(value) is torch.Tensor and value.device.type == "cpu"
            if not on_host or value.untyped_storage().data_ptr() not in read:
                continue
            memory = replaced.pop(name, None)
            if type(memory) is not torch.Tensor or (
                (memory.shape, memory.dtype, memory.device, memory.stride())
                != (value.shape, value.dtype, value.device, value.stride())
            ):
                memory = torch.empty_like(value)
            places.append((state, name, memory))
            pairs.append((memory, value))
    copy_over(pairs)
    for state, name, memory in places:  # which is filled now
        state[name] = memory


def in_memory(state: Any) -> Any:
    """Return a state with plain tensors of its own memory, where those of `mapped_file` are the file's."""
    return formats.rebuilt(state, lambda value: own_copy(value) if type(value) in _PLAIN_TENSORS else value)


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


def copy_over(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy over each first tensor the second, whose memory may be a mapped file's; OSError if the file cannot be read any more."""
    copies = []
    for target, value in pairs:
        # Host memory from its first byte to its last: of a strided view, a file may have more.
        in_host = type(value) in _PLAIN_TENSORS and value.device.type == "cpu" and value.layout is torch.strided
        in_host = in_host and not (value.is_conj() or value.is_neg())
        if not in_host or not (
            value.is_contiguous() or torch.empty_like(value, device="meta").stride() == value.stride()
        ):
            target.copy_(value)
        # Where the strides are equal, one has gaps only if the other has.
        elif (
            type(target) in _PLAIN_TENSORS
            and (target.shape, target.dtype, target.stride()) == (value.shape, value.dtype, value.stride())
            and target.device.type == "cpu"
            and not (target.is_conj() or target.is_neg())
        ):
            copies.append((target.data_ptr(), value.data_ptr(), value.nbytes))
        else:
            target.copy_(own_copy(value))
    durable.copy_mapped(copies)


def own_copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy with memory of its own; OSError as `copy_over`."""
    memory = torch.empty_like(value)
    copy_over([(memory, value)])
    return memory


def read_common(common: Common, folder: str, load_kwargs: dict[str, Any] | None = None) -> Contents:
    """Read the states of what every strategy saves. Any rank, alone.

    FileNotFoundError names a missing file; ValueError an interrupted epoch whose loader has other data now.
    """
    read = partial(read_file, folder, load_kwargs=load_kwargs)
    own = manifest.random_states_file(common.process_index)
    is_new = (random := read(own)) is None
    random = read(manifest.random_states_file(0)) if is_new else random
    if not isinstance(random, dict | None):
        raise RuntimeError(f"{folder}/{own} is damaged: it holds a {type(random).__name__}, not a dict of states.")
    contents = Contents(folder, common, random=random, is_new=is_new)
    for obj, file, what in common.shared():
        state = read(file, what)
        if state is None and obj is common.scaler:
            logger.warning("%s has no %s: the scale of gradients starts anew.", folder, file)
        else:
            contents.objects.append((obj, state, file))
    # A rank that was not there when the checkpoint was saved must draw the same epoch as the others.
    random = random or {}
    positions, states = random.pop(POSITIONS, None) or [], random.pop(LOADERS, None) or {}
    contents.saved_loaders, contents.schedule_units = len(positions), random.pop(schedules.KEY, None)
    for index, loader in enumerate(common.loaders()):
        state, position = None, None
        if keeps_state(loader):
            file = manifest.dataloader_file(index)
            # Former formats have a file of each rank.
            state = states[index] if index in states else read(f"rank{common.process_index}_{file}") or read(file)
        if index < len(positions) and isinstance(loader, PreparedLoader):
            position = positions[index]
        if position is not None and loader.continue_after_load:
            resume.check(loader, dict(position), f"Data loader {index} (in the order of prepare)")
        contents.dataloaders.append((loader, state, position))
    return contents
