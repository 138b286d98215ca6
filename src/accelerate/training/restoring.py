"""Loading a run's checkpoint: found, verified, read and compared in full, and only then put into the objects."""

import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.checkpoint import manifest
from accelerate.checkpoint.barrier import Group, SaveBarrier, default_store
from accelerate.checkpoint.load import Contents, read_common, tensor_device
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest, damaged
from accelerate.checkpoint.optimizers import Deferred
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, newest_first, storage_of
from accelerate.runtime import durable
from accelerate.training.prepared import Facade

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]

# How often a load starts over because another save has taken the place of the checkpoint that it was reading.
_ATTEMPTS = 100


def load_state(
    accelerator: Facade,
    input_dir: Folder | None,
    load_kwargs: dict[str, Any] | None,
    latest: bool,
    missing_ok: bool,
    **model_options: Any,
) -> Path | str | None:
    """Load what ``save_state`` saved into everything prepared or registered. All ranks call it.

    The checkpoint is verified, read in full and compared with the objects before any of them is changed. If one of
    them refuses its state all the same, on any rank, all are given back what they had. Where another save takes its
    place meanwhile, all ranks start over with that one, so that they never mix two.
    """
    background = accelerator._background
    former = background.settle("load_state()") if background.pending else None
    location = tensor_device(model_options.pop("map_location", None), accelerator.device)
    options = {"map_location": location, "load_kwargs": load_kwargs}
    latest = latest or input_dir is None
    storage = _storage(accelerator, input_dir)
    group = Group.of(accelerator, storage)
    barrier = SaveBarrier("load_state", storage.location, group, default_store())
    barrier.begin()
    barrier.exchange(None, former)  # what failed in the background on one rank alone is raised on all of them now
    for attempt in itertools.count(1):
        try:
            chosen, contents = _one_read(accelerator, barrier, group, storage, latest, options, model_options)
        except _Refused as refused:  # every rank raises it, so no rank waits for another's
            barrier.leave()
            refusal, nothing = refused.args
            # One that cannot be read is no reason to begin anew, and to save over it.
            if missing_ok and nothing:
                logger.info("%s Nothing was loaded.", refusal)
                return None
            raise refusal from None
        if chosen is not None and contents is not None:
            break
        logger.info("%r: another save took its place while it was read; starting over.", storage.location)
        if attempt == _ATTEMPTS:
            barrier.leave()
            raise RuntimeError(
                f"load_state({storage.location!r}): another save took its place {attempt} times while it was read; nothing was "
                "loaded. Save there less often, or load a copy."
            )
        time.sleep(attempt / 1000)
    try:
        _complete(accelerator, barrier, contents, model_options)
    finally:
        chosen.storage.release()
    accelerator._loaded_checkpoint = chosen.storage.location
    if chosen.following is not None:
        accelerator.project_configuration.iteration = chosen.following
    return Path(chosen.storage.location) if isinstance(chosen.storage, LocalStorage) else chosen.storage.location


@dataclass
class _Chosen:
    """A verified checkpoint, the same on all ranks.

    Attributes:
        folder: this rank's local folder of it, and its manifest when it was verified, None without one.
        following: the next automatic number.
    """

    storage: CheckpointStorage
    folder: str
    manifest: Manifest | None
    following: int | None = None

    def replaced(self) -> bool:
        """Say whether another save has taken its place, or it was removed, since it was verified. Any rank, alone."""
        try:
            return Manifest.read(self.folder) != self.manifest
        except (OSError, DamagedCheckpoint):
            return self.manifest is not None


def _one_read(
    accelerator: Facade,
    barrier: SaveBarrier,
    group: Group,
    storage: CheckpointStorage,
    latest: bool,
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> tuple[_Chosen | None, Contents | None]:
    """Choose a checkpoint and read it; Nones where another save took its place meanwhile. All ranks."""
    chosen, contents, problem = None, None, None
    try:
        chosen = _choose(accelerator, barrier, group, storage, latest)
        if chosen is None:
            return None, None
        contents = _read(accelerator, chosen.folder, options, model_options)
    except _Refused:
        raise
    except BaseException as error:  # the other ranks would wait for a rank that leaves now
        problem = error
    # Before any rank gives its objects anything: they may have collectives of their own.
    replaced = isinstance(problem, Exception | None) and chosen is not None and chosen.replaced()
    try:
        if not any(barrier.exchange(replaced, None if replaced else problem)):
            return chosen, contents
    except BaseException:
        _give_up(chosen, contents)
        raise
    _give_up(chosen, contents)
    return None, None


def _give_up(chosen: _Chosen | None, contents: Contents | None) -> None:
    if contents is not None:
        contents.undo()
    if chosen is not None:
        chosen.storage.release()


def _complete(accelerator: Facade, barrier: SaveBarrier, contents: Contents, model_options: dict[str, Any]) -> None:
    """Give the objects their states if none refuses its own on any rank, else give back what they had."""
    problem = None
    try:
        contents.begin(**model_options)
    except BaseException as error:
        problem = error
    try:
        barrier.exchange(None, problem)
    except BaseException:
        contents.undo()
        raise
    try:
        for name, value in contents.complete().items():
            setattr(accelerator, name, value)
    except BaseException as error:  # no rank may go on while another has other states
        problem = error
    barrier.exchange(None, problem)
    barrier.leave()


class _Refused(Exception):
    """A problem that all ranks have found together, and whether it is that there is no checkpoint, whole or not."""


def _storage(accelerator: Facade, input_dir: Folder | None) -> CheckpointStorage:
    project = accelerator.project_configuration
    if input_dir is not None:
        return storage_of(input_dir)
    if project.project_dir is None:
        raise ValueError(
            "load_state() got no input_dir, and the Accelerator has no project folder to look in. Pass the checkpoint, or "
            "Accelerator(project_config=ProjectConfiguration(project_dir))."
        )
    return storage_of(project.project_dir).child(manifest.CHECKPOINTS_FOLDER)


def _on_all(barrier: SaveBarrier, work: Callable[[], tuple[Any, list[str]]]) -> tuple[list[Any], list[str]]:
    """Do something on every rank; return what each has, None where it failed, and the problems of all. All ranks."""
    value, found = None, []
    try:
        value, found = work()
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    notes = barrier.exchange([value, found])
    return [note[0] for note in notes], list(dict.fromkeys(line for note in notes for line in note[1]))


# Before the problem of a checkpoint that is not there at all.
_ABSENT = "absent: "


def _choose(
    accelerator: Facade,
    barrier: SaveBarrier,
    group: Group,
    storage: CheckpointStorage,
    latest: bool,
) -> _Chosen | None:
    """Return the checkpoint that all ranks take; None if another save took its place while it was verified."""
    searched, (candidates, passed) = None, ([storage.location], [])
    while latest or searched is None:
        if latest:
            candidates, passed = _searched(barrier, group, storage, warns=searched is None)
        if not candidates or candidates == searched:
            break
        searched = candidates  # none of them can be loaded: if a run prunes beside this load, there are others by now
        for candidate in map(storage_of, candidates):
            chosen, problems = _verified(accelerator, barrier, group, candidate)
            if not problems:
                return chosen
            candidate.release()
            absent = all(line.startswith(_ABSENT) for line in problems)
            if not latest:
                refusal: Exception = damaged(candidate.location, problems)
                if problems[0].startswith(_ABSENT):
                    reason = problems[0].removeprefix(_ABSENT)
                    refusal = ValueError(f"load_state({candidate.location!r}): {reason}.")
                raise _Refused(refusal, absent)
            passed.append(f"{candidate.location}: {'; '.join(problems)}")
            if group.rank == 0 and not absent:
                logger.warning("Passed over %s", passed[-1])
    more = "".join(f"\n  passed over {line}" for line in passed)
    text = f"There is no complete checkpoint in {storage.location!r}. Save one first, or name one.{more}"
    raise _Refused(FileNotFoundError(text), not passed)


def _searched(
    barrier: SaveBarrier, group: Group, storage: CheckpointStorage, warns: bool
) -> tuple[list[str], list[str]]:
    """Return the checkpoints in a folder, newest first, as the first rank finds them, and a line for each that it passed over."""

    def search() -> tuple[Any, list[str]]:
        if group.rank != 0:
            return None, []
        candidates, passed = newest_first(storage)
        return [[candidate.location for candidate in candidates], passed], []

    notes, problems = _on_all(barrier, search)
    if problems:
        text = f"{storage.location!r} could not be searched for checkpoints. {problems[0]}"
        raise _Refused(OSError(text), False)
    candidates, passed = notes[0]
    for line in passed if warns and group.rank == 0 else ():
        logger.warning("Passed over %s", line)
    return candidates, passed


def _verified(
    accelerator: Facade, barrier: SaveBarrier, group: Group, candidate: CheckpointStorage
) -> tuple[_Chosen | None, list[str]]:
    """Verify a checkpoint together; return it, None if another save took its place, and what is wrong with it, on any rank."""
    leader, state, readers = barrier.leader(), None, []

    def fetch() -> tuple[Any, list[str]]:
        nonlocal state
        state = candidate.state()
        if not state.loads:
            return None, [f"{_ABSENT}{state.reason}" if state.kind == "absent" else state.reason]
        here = candidate.fetch() if candidate.shared or leader == group.rank else None
        return [here, None if state.manifest is None else state.manifest.save, leader], []

    def verify() -> tuple[Any, list[str]]:
        following, hashed, problems = _following_number(accelerator, candidate), [], []
        if chosen.manifest is not None:
            problems = manifest.problems(chosen.folder, chosen.manifest)
            hashed = (
                [] if problems else _hashed(chosen.folder, chosen.manifest, readers.index(group.rank), len(readers))
            )
        elif group.rank == 0:
            logger.warning("%s is loaded unverified: %s.", candidate.location, state.reason)
        return [following, hashed], problems

    notes, problems = _on_all(barrier, fetch)
    if not problems and len({save for _, save, _ in notes}) > 1:
        if group.shared:
            return None, []
        problems = ["the machines have checkpoints of different saves: not all had published when the run ended"]
    if problems:
        return None, problems
    chosen = _Chosen(candidate, notes[group.rank][0] or notes[leader][0], state.manifest)
    readers = [rank for rank, note in enumerate(notes) if note[2] == leader]
    notes, problems = _on_all(barrier, verify)
    if not problems:
        chosen.following = max((note[0] for note in notes if note[0] is not None), default=None)
    if not problems and chosen.manifest is not None:
        digests = {(name, start): digest for rank in readers for name, start, digest in notes[rank][1]}
        problems = _compared(chosen.manifest, digests)
        if len(readers) < len(notes):  # there are copies of which another one may be damaged
            _, problems = _on_all(barrier, lambda: (None, problems))
    if problems and any(barrier.exchange(chosen.replaced())):
        candidate.release()
        return None, []
    return chosen, problems


def _hashed(folder: str, listing: Manifest, reader: int, readers: int) -> list[tuple[str, int, str]]:
    """Hash this rank's pieces of the files, with file and offset: the ranks that read one copy share its bytes evenly."""
    every = [(name, start) for name in sorted(listing.files) for start in _pieces(listing, name)]
    own: dict[str, list[int]] = {}
    for name, start in every[reader::readers]:
        own.setdefault(name, []).append(start)
    found = []
    for name, starts in own.items():
        digests = durable.digests(os.path.join(folder, name), starts, listing.files[name].size, durable.threads())
        found += [(name, start, digest.hex()) for start, digest in zip(starts, digests, strict=True)]
    return found


def _compared(listing: Manifest, digests: dict[tuple[str, int], str]) -> list[str]:
    """Return a line for each file that has changed."""
    lines = []
    for name, entry in sorted(listing.files.items()):
        checksum = durable.combined(bytes.fromhex(digests[name, start]) for start in _pieces(listing, name))
        lines += manifest.changed(name, entry, checksum)
    return lines


def _pieces(listing: Manifest, name: str) -> range:
    """Return where the pieces of a file begin that have a digest each."""
    return range(0, listing.files[name].size, durable.CHUNK)


def _read(accelerator: Facade, folder: str, options: dict[str, Any], model_options: dict[str, Any]) -> Contents:
    backend, problem = accelerator._backend, None
    common = Common.of(accelerator, backend.checkpointed_schedulers(accelerator))
    try:
        _check_custom(folder, common.custom)
        contents = read_common(common, folder, options["load_kwargs"])
    except Exception as error:
        if accelerator.num_processes == 1:
            raise
        contents, problem = Contents(folder, common), error  # the others wait for this rank where they read together
    try:
        for index, optimizer in enumerate(accelerator.prepared.optimizers):
            state = backend.load_optimizer(accelerator, optimizer, folder, index, **options)
            if isinstance(state, Deferred):
                contents.remaining.append(state.finish)
                state = state.state
            if state is not None:
                contents.optimizers.append((optimizer, state, manifest.optimizer_file(index)))
        _read_models(accelerator, contents, folder, options, model_options)
        if problem is not None:
            raise problem
    except BaseException:
        contents.undo()
        if problem is not None:
            raise problem from None
        raise
    _warn_of_fewer_processes(accelerator, folder)
    return contents


def _check_custom(folder: str, custom: Sequence[Any]) -> None:
    pattern = re.escape(manifest.CUSTOM_NAME) + r"_\d+\.pkl"
    if (saved := sum(re.fullmatch(pattern, file) is not None for file in os.listdir(folder))) != len(custom):
        raise RuntimeError(
            f"{folder!r} has the states of {saved} registered objects, but {len(custom)} are registered. Register the "
            "same objects in the same order with `accelerator.register_for_checkpointing` before loading."
        )


def _read_models(
    accelerator: Facade, contents: Contents, folder: str, options: dict[str, Any], model_options: dict[str, Any]
) -> None:
    """Let the hooks load what they want to load, and read the other models. Hooks come last, because they change models."""
    backend = accelerator._backend
    options = {**options, "strict": model_options.get("strict", True)}
    if backend.saves_shards and "adapter_only" in model_options:
        options["adapter_only"] = model_options["adapter_only"]
    inner = [backend.unwrap_model(model, keep_torch_compile=False) for model in accelerator.prepared.models]
    hooks = list(accelerator._load_model_state_pre_hook.values())
    pairs = list(zip(accelerator.prepared.models, inner, strict=True))
    left = [model for outer, model in pairs if not backend.owns_state(outer)]
    for model in left if hooks else []:
        contents.keep(model)
    for hook in hooks:
        hook(left, folder)
    # A hook takes out of the list what it loaded itself.
    kept = {id(model) for model in left}
    # Shards have the numbers of all models, whatever hooks of `save_state` did; whole weights of those that they left.
    known = [place for place, (outer, model) in enumerate(pairs) if id(model) in kept or backend.owns_state(outer)]
    for number, place in enumerate(known):
        outer, model = pairs[place]
        state = backend.load_model(accelerator, outer, folder, place if backend.saves_shards else number, **options)
        if isinstance(state, Deferred):
            contents.remaining.append(state.finish)
        elif isinstance(state, tuple):  # what takes the state, and the state
            contents.models.append(state)
        elif state is not None:  # None: the strategy has put the weights where they belong
            contents.models.append((model, state))


def _warn_of_fewer_processes(accelerator: Facade, folder: str) -> None:
    """Ranks that are new say so themselves; for those that are gone the main process does."""
    beyond = manifest.random_states_file(accelerator.num_processes)
    if accelerator.process_index == 0 and os.path.exists(os.path.join(folder, beyond)):
        logger.warning(
            f"{folder} was saved by more processes than the {accelerator.num_processes} running now (it has {beyond}). Its "
            "weights and positions in the data load, but the ranks draw other random numbers and other samples than before."
        )


def _following_number(accelerator: Facade, storage: CheckpointStorage) -> int | None:
    """Return the number of the next automatic name, where that follows from the checkpoint that is loaded."""
    project = accelerator.project_configuration
    number = manifest.number_of(storage.name)
    if not project.automatic_checkpoint_naming or project.project_dir is None or number is None:
        return None
    here = storage_of(project.project_dir).child(manifest.CHECKPOINTS_FOLDER)
    if storage.parent() != here:
        return None
    # After going back to an older one, the newer ones keep their numbers, and what comes next is the newest. Damaged ones keep
    # theirs, too: a user may want to look at them. What a killed save leaves in an object store is of no use.
    taken = [known for known, other in here.checkpoints() if other.state().loads or other.files()]
    return max(taken, default=number) + 1
