"""Loading a run's checkpoint: found, verified, read and compared in full, and only then put into the objects.

Rank 0 finds the checkpoint and looks at all of its files; where machines have disks of their own, one rank of each does so. The others take
its word, and touch only what they read. What is read is hashed before: the ranks of a machine share the files that all of them read, and
each hashes what it alone reads. Ranks report only what is wrong, before any object has changed.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate.base._warn import warn_user
from accelerate.checkpoint import manifest
from accelerate.checkpoint.load import CheckpointFolder, Contents, Deferred, read_common, tensor_device
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest, damaged
from accelerate.checkpoint.ranks import Group, Ranks, default_store
from accelerate.checkpoint.state import Common
from accelerate.checkpoint.storage import CheckpointStatus, CheckpointStorage, LocalStorage, storage_of
from accelerate.training import gradients
from accelerate.training.run import TrainingRun
from accelerate.training.unclaimed import unclaimed_states

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
T = TypeVar("T")

# How often a load starts over because another save has taken the place of the checkpoint that it was reading.
_ATTEMPTS = 100


def load_state(
    accelerator: TrainingRun,
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
    problem: Exception | None = background.wait("load_state()") if background.pending else None
    location = tensor_device(model_options.pop("map_location", None), accelerator.device)
    options = {"map_location": location, "load_kwargs": load_kwargs}
    storage = _storage(accelerator, input_dir)
    search = Search(accelerator, storage, latest or input_dir is None)
    return _load_found(search, problem, options, model_options, missing_ok)


def _load_found(
    search: "Search",
    problem: Exception | None,
    options: dict[str, Any],
    model_options: dict[str, Any],
    missing_ok: bool,
) -> Path | str | None:
    accelerator, storage = search.accelerator, search.storage
    group, replaced = Group.of(accelerator, storage), 0
    while True:
        ranks = Ranks(group, default_store())
        ranks.agree("load_state", storage.location)
        # What failed in the background on one rank alone is raised on all of them.
        answer = ranks.share(search.answer() if group.rank == 0 and problem is None else None, error=problem)
        if (refusal := refused(answer)) is not None:
            ranks.leave()
            # One that cannot be read is no reason to begin anew, and to save over it.
            if missing_ok and answer["nothing"]:
                logger.info("%s Nothing was loaded.", refusal)
                return None
            raise refusal
        chosen = _Chosen.of(search, ranks, group, answer)
        try:
            contents = _read_together(accelerator, ranks, chosen, options, model_options)
            if contents is not None:
                _complete(accelerator, ranks, contents, model_options)
                break
        except _Damaged as error:
            if not search.latest:
                raise damaged(chosen.storage.location, error.args[0]) from None
            search.pass_over(chosen, "; ".join(error.args[0]))
            continue
        finally:
            chosen.storage.release()
        replaced += 1
        logger.info("%r: another save took its place while it was read; starting over.", storage.location)
        if replaced == _ATTEMPTS:
            raise RuntimeError(
                f"load_state({storage.location!r}): another save took its place {replaced} times while it was read; nothing was "
                "loaded. Save there less often, or load a copy."
            )
        time.sleep(replaced / 1000)
    if accelerator._window.micro_batches:
        gradients.reset(accelerator)
    accelerator._loaded_checkpoint = chosen.storage.location
    if accelerator.process_index == 0:
        _warn_of_differences(chosen.storage.location, contents)
    if chosen.following is not None:
        accelerator.project_configuration.iteration = chosen.following
    return Path(chosen.storage.location) if isinstance(chosen.storage, LocalStorage) else chosen.storage.location


def _storage(accelerator: TrainingRun, input_dir: Folder | None) -> CheckpointStorage:
    project = accelerator.project_configuration
    if input_dir is not None:
        return storage_of(input_dir)
    if project.project_dir is None:
        raise ValueError(
            "load_state() got no input_dir, and the Accelerator has no project folder to look in. Pass the checkpoint, or "
            "Accelerator(project_config=ProjectConfiguration(project_dir))."
        )
    return storage_of(project.project_dir).child(manifest.CHECKPOINTS_FOLDER)


# -- which one ---------------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """Finds the checkpoint to load: the leader alone, but for `pass_over`.

    Attributes:
        passed: why checkpoints were passed over, by location.
        damaged: those of them that some rank found damaged, with the names of their saves.
        listing: the manifest of the one that `answer` names, None without one.
    """

    accelerator: TrainingRun
    storage: CheckpointStorage
    latest: bool
    passed: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str | None] = field(default_factory=dict)
    listing: Manifest | None = None

    def answer(self) -> dict[str, Any]:
        """Return which checkpoint all ranks load, or why there is none: small and plain data."""
        try:
            found = self._newest() if self.latest else (self.storage, self.storage.state())
        except Exception as error:
            return _no(OSError, f"{self.storage.location!r} could not be read. {type(error).__name__}: {error}")
        if found is None:
            passed = [f"{location}: {reason:.1000}" for location, reason in self.passed.items()]
            more = "".join(f"\n  passed over {line}" for line in manifest.first_of(passed))
            text = f"There is no complete checkpoint in {self.storage.location!r}. Save one first, or name one.{more}"
            return _no(FileNotFoundError, text, nothing=not passed)
        storage, state = found
        if state.kind == "absent":
            return _no(ValueError, f"load_state({storage.location!r}): {state.reason}.", nothing=True)
        if not state.loads:
            return _no(DamagedCheckpoint, str(damaged(storage.location, [state.reason])))
        if state.manifest is None:
            logger.warning("%s is loaded unverified: %s.", storage.location, state.reason)
        self.listing = state.manifest
        folder = storage.fetch() if storage.shared else ""
        return {
            "location": storage.location,
            "save": _name_of(state),
            "folder": folder,
            "following": self.following_number(storage),
        }

    def _newest(self) -> tuple[CheckpointStorage, CheckpointStatus] | None:
        """Return the newest checkpoint that may be loaded; what lies before it is not looked at."""
        listed = None
        while (now := self.storage.checkpoints()) != listed:  # a run that prunes beside this search has others by now
            listed, absent = now, True
            for _, storage in reversed(now):
                state = storage.state()
                if state.loads and self.damaged.get(storage.location) != _name_of(state):
                    return storage, state
                absent = absent and state.kind == "absent"
                if state.kind == "incomplete":
                    self._pass(storage.location, state.reason)
            if absent:
                state = self.storage.state()
                if state.kind == "complete" and self.damaged.get(self.storage.location) != _name_of(state):
                    return self.storage, state
                if state.kind == "incomplete" and self.storage.files():
                    self._pass(self.storage.location, state.reason)
        return None

    def _pass(self, location: str, reason: str) -> None:
        if self.passed.get(location) != reason:
            self.passed[location] = reason
            logger.warning("Passed over %s: %s", location, reason)

    def pass_over(self, chosen: "_Chosen", reason: str) -> None:
        """Look for another one than what some rank has found damaged. All ranks."""
        self.damaged[chosen.storage.location] = chosen.save
        if self.accelerator.process_index == 0:
            self._pass(chosen.storage.location, reason)

    def following_number(self, storage: CheckpointStorage) -> int | None:
        """Return the number of the next automatic name, where that follows from the checkpoint that is loaded."""
        project = self.accelerator.project_configuration
        number = manifest.number_of(storage.name)
        if not project.automatic_checkpoint_naming or project.project_dir is None or number is None:
            return None
        here = storage_of(project.project_dir).child(manifest.CHECKPOINTS_FOLDER)
        if storage.parent() != here:
            return None
        # After going back to an older one, the newer ones keep their numbers, and what comes next is the newest. Damaged ones
        # keep theirs, too: a user may want to look at them. An empty folder is of no use.
        taken = [known for known, other in here.checkpoints() if not other.is_empty()]
        return max(taken, default=number) + 1


def _no(kind: type[Exception], text: str, nothing: bool = False) -> dict[str, Any]:
    return {"error": kind.__name__, "text": text[:20_000], "nothing": nothing}


def refused(answer: dict[str, Any]) -> Exception | None:
    """Return what a search's answer refuses with, if it found nothing that can be loaded. Any rank, alone."""
    kinds = {kind.__name__: kind for kind in (ValueError, FileNotFoundError, OSError, DamagedCheckpoint)}
    return kinds[answer["error"]](answer["text"]) if "error" in answer else None


def _name_of(state: CheckpointStatus) -> str:
    """Return the name of the save that wrote a checkpoint; an empty one of another library's."""
    return "" if state.manifest is None else state.manifest.save


class _Damaged(Exception):
    """Raised on all ranks: the checkpoint is damaged; with a line for each thing that is wrong."""


@dataclass
class _Chosen:
    """The checkpoint that all ranks load.

    Attributes:
        folder: this rank's local folder of it.
        save: the name of the save, None where it could not be read.
        problems: what is wrong with this machine's copy, found by its leader.
        following: the next automatic number.
        listing: the manifest, None without one.
    """

    storage: CheckpointStorage
    folder: str
    save: str | None
    problems: list[str]
    following: int | None
    listing: Manifest | None = None

    @classmethod
    def of(cls, search: Search, ranks: Ranks, group: Group, answer: dict[str, Any]) -> "_Chosen":
        """Return what the leader of all ranks has chosen, as it lies on the disk of this rank's machine. All ranks."""
        storage = storage_of(answer["location"])
        problems: list[str] = []
        folder, save, following = answer["folder"], answer["save"], answer["following"]
        listing = search.listing if group.shared else None
        if not group.shared:
            mine = None
            if group.rank == ranks.leader():
                folder, save, problems, listing = _own_copy(storage, save)
                mine = [folder, save, (storage.fetched or ("", ""))[1]]
            folder, save, generation = ranks.share(mine, ranks.leader())
            storage.fetched = folder, generation
        if group.each_node and following is not None:  # a machine may have one more
            leads = group.rank == ranks.leader()
            following = -ranks.smallest(-((search.following_number(storage) or 0) if leads else 0))
        with contextlib.suppress(OSError, DamagedCheckpoint):  # there is none, or another save takes the place
            listing = listing or Manifest.read(folder)
            folder = CheckpointFolder(folder, listing, _local_rank_and_size(search.accelerator), storage.bring)
        return cls(storage, folder, save, problems, following, listing)

    @property
    def wrong(self) -> list[str]:
        """What this rank has found wrong with the files so far."""
        return [*self.problems, *getattr(self.folder, "wrong", ())]

    def replaced(self) -> bool:
        """Say whether another save has taken its place, or it was removed, since it was chosen. Any rank, alone."""
        if self.wrong and not self.storage.shared:  # a local copy of it stays as it was
            return _name_of(self.storage.state()) != self.save
        mark, save = (self.listing.mark, self.listing.save) if self.listing else ((), "")
        return manifest.mark(self.folder) != mark or self.save not in (None, save)

    def verify(self, rank: int, by_parts: bool) -> None:
        """Hash this rank's share of the files that all ranks of the machine read, and the files of its own. Any rank, alone.

        With `by_parts` the shards of models and optimizers are left to those who read them.
        """
        if not isinstance(self.folder, CheckpointFolder) or self.problems or self.replaced():
            return
        shared, own = _read_by(self.folder.listing, rank, by_parts)
        self.folder.differences(shared, shared=True)
        self.folder.differences(own)


def _own_copy(storage: CheckpointStorage, save: str) -> tuple[str, str | None, list[str], Manifest | None]:
    """Return the folder of a machine's own copy of a checkpoint, its save, what is wrong with it, and its manifest. The leader of the machine."""
    try:
        if not storage.shared:  # rank 0 has looked at it for all
            folder, listing = storage.outline()
            return folder, save, [], listing
        state = storage.state()
        if not state.loads:
            return storage.location, _name_of(state), [state.reason], None
        if _name_of(state) != save:
            problem = "the machines have checkpoints of different saves: not all had published when the run ended"
            return storage.location, _name_of(state), [problem], None
        return storage.fetch(), save, [], state.manifest
    except Exception as error:
        return storage.location, None, [f"{type(error).__name__}: {error}"], None


def _local_rank_and_size(accelerator: TrainingRun) -> tuple[int, int]:
    """Return which rank of its machine this one is, and how many they are, as far as the launcher said so."""
    count = min(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), accelerator.num_processes)
    rank = accelerator.local_process_index
    return (rank, count) if rank < count else (0, 1)


# The files of one rank each, with its number; and files of models and optimizers that ranks read in part, or not at all.
_OF_RANK = re.compile(
    r"(?:random_states|generators)_([0-9]+)\.\w+|rank([0-9]+)_dl_state_dict(?:_[0-9]+)?\.bin"
    r"|(?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?_rank([0-9]+)\.bin"
)
_PARTS = re.compile(r"[^/]+/(?:__[0-9]+_[0-9]+\.distcp|[^/]*_states\.pt)")


def _read_by(listing: Manifest, rank: int, by_parts: bool) -> tuple[list[str], list[str]]:
    """Return the files that every rank reads, and those that this one reads alone."""
    owners = {name: int(found[found.lastindex or 0]) for name in listing.files if (found := _OF_RANK.fullmatch(name))}
    # A rank that was not there when the checkpoint was saved begins with the random states of the first one.
    mine = rank if manifest.random_states_file(rank) in listing.files else 0
    own = [name for name, owner in owners.items() if owner in (rank, mine)]
    others = {*owners, *(filter(_PARTS.fullmatch, listing.files) if by_parts else ())}
    parts = f"{manifest.PARTS_FOLDER}/"
    return [name for name in listing.files if name not in others and not name.startswith(parts)], own


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_together(
    accelerator: TrainingRun,
    ranks: Ranks,
    chosen: _Chosen,
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> Contents | None:
    """Verify and read a checkpoint; None if another save took its place meanwhile. All ranks.

    Raises:
        _Damaged: its files are not what was written.
    """
    _, problem = _attempted(lambda: chosen.verify(accelerator.process_index, accelerator._state_io.saves_shards))
    if not _may_go_on(ranks, chosen, problem):
        return None
    contents, problem = _attempted(lambda: _read_contents(accelerator, chosen.folder, options, model_options))
    may_go_on = False
    try:
        # Before any rank gives its objects anything: they may have collectives of their own.
        may_go_on = _may_go_on(ranks, chosen, problem)
        return contents if may_go_on else None
    finally:
        if contents is not None and not may_go_on:
            contents.undo()


def _attempted(step: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Take a step; return its result, or why it failed: the other ranks would wait for one that leaves before they know."""
    try:
        return step(), None
    except BaseException as error:
        return None, error


def _may_go_on(ranks: Ranks, chosen: _Chosen, problem: BaseException | None) -> bool:
    """Say whether all is well on all ranks, or not because another save took the place; else raise. All ranks."""
    if not ranks.any(problem is not None or bool(chosen.wrong) or chosen.replaced()):
        return True
    replaced = ranks.any(isinstance(problem, Exception | None) and chosen.replaced())
    is_damaged, wrong = not replaced and ranks.any(bool(chosen.wrong)), chosen.wrong
    if is_damaged:  # what a rank ran into that found nothing wrong is a consequence
        problem = DamagedCheckpoint("; ".join(manifest.first_of(wrong))) if wrong else None
    try:
        ranks.first_error(None if replaced else problem)
    except RuntimeError as error:
        if not is_damaged:
            raise
        raise _Damaged(wrong or [str(error).partition(" failed on other ranks. ")[2]]) from None
    ranks.leave()
    return False


def _complete(
    accelerator: TrainingRun,
    ranks: Ranks,
    contents: Contents,
    model_options: dict[str, Any],
) -> None:
    """Give the objects their states if none refuses its own on any rank, else give back what they had."""
    _, problem = _attempted(lambda: contents.begin(**model_options))
    try:
        ranks.first_error(problem)
    except BaseException:
        contents.undo()
        raise
    attributes, problem = _attempted(contents.complete)
    ranks.first_error(problem)  # no rank may go on while another has other states
    ranks.leave()
    for name, value in (attributes or {}).items():
        setattr(accelerator, name, value)


def _read_contents(
    accelerator: TrainingRun, folder: str, options: dict[str, Any], model_options: dict[str, Any]
) -> Contents:
    """Read all states.

    A rank that fails goes on, because the others wait for it where they read together, and raises at the end.
    """
    state_io, problems = accelerator._state_io, []
    common = Common.of(accelerator, state_io.checkpointed_schedulers(accelerator))
    contents = Contents(folder, common)

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            problems.append(error)
            if accelerator.num_processes == 1:
                raise

    try:
        with noted():
            for extension_loads in accelerator.extensions.loading:
                extension_loads(folder)
            _check_custom(folder, common.custom)
            contents = read_common(common, folder, options["load_kwargs"])
            contents.unclaimed = unclaimed_states(accelerator, contents)
        for index, optimizer in enumerate(accelerator._optimizers):
            with noted():
                state = state_io.load_optimizer(accelerator, optimizer, folder, index, **options)
                if isinstance(state, Deferred):
                    contents.remaining.append(state.finish)
                    state = state.state
                if state is not None:
                    contents.optimizers.append((optimizer, state, manifest.optimizer_file(index)))
        with noted():
            _read_models(accelerator, contents, folder, options, model_options)
        if problems:
            raise problems[0]
    except BaseException:
        contents.undo()
        raise
    _warn_of_fewer_processes(accelerator, folder)
    return contents


def _check_custom(folder: str, custom: Sequence[Any]) -> None:
    files = folder.listing.files if isinstance(folder, CheckpointFolder) else os.listdir(folder)
    saved = len(re.findall(rf"^{manifest.CUSTOM_NAME}_{manifest.NUMBER}\.pkl$", "\n".join(files), re.MULTILINE))
    if saved != len(custom):
        raise RuntimeError(
            f"{folder!r} has the states of {saved} registered objects, but {len(custom)} are registered. Register the "
            "same objects in the same order with `accelerator.register_for_checkpointing` before loading."
        )


def _read_models(
    accelerator: TrainingRun, contents: Contents, folder: str, options: dict[str, Any], model_options: dict[str, Any]
) -> None:
    """Let the hooks load what they want to load, and read the other models. Hooks come last, because they change models."""
    strategy, state_io = accelerator._strategy, accelerator._state_io
    options = {**options, "strict": model_options.get("strict", True)}
    if state_io.saves_shards and "adapter_only" in model_options:
        options["adapter_only"] = model_options["adapter_only"]
    inner = [strategy.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    hooks = list(accelerator._load_model_state_pre_hook.values())
    pairs = list(zip(accelerator._models, inner, strict=True))
    left = [model for outer, model in pairs if not state_io.owns_state(outer)]
    for model in left if hooks else []:
        contents.keep(model)
    for hook in hooks:
        hook(left, folder)
    # A hook takes out of the list what it loaded itself.
    kept = {id(model) for model in left}
    # Shards have the numbers of all models, whatever hooks of `save_state` did; whole weights of those that they left.
    known = [place for place, (outer, model) in enumerate(pairs) if id(model) in kept or state_io.owns_state(outer)]
    for number, place in enumerate(known):
        outer, model = pairs[place]
        state = state_io.load_model(accelerator, outer, folder, place if state_io.saves_shards else number, **options)
        if isinstance(state, Deferred):
            contents.remaining.append(state.finish)
        elif isinstance(state, tuple):  # what takes the state, and the state
            contents.models.append(state)
        elif state is not None:  # None: the strategy has put the weights where they belong
            contents.models.append((model, state))


def _warn_of_differences(location: str, contents: Contents) -> None:
    """Warn of states that no object took, and of schedules that continue on another number of replicas."""
    if contents.unclaimed:
        warn_user(
            f"load_state({location!r}) did not restore {', '.join(contents.unclaimed)}: no object is prepared for these states of the "
            "checkpoint. To resume training, prepare the objects that were saved, in the same order, before `load_state`; an "
            "evaluation may ignore this."
        )
    for line in contents.changed_schedules:
        warn_user(f"load_state({location!r}), {line}")


def _warn_of_fewer_processes(accelerator: TrainingRun, folder: str) -> None:
    """Ranks that are new say so themselves; for those that are gone the main process does."""
    beyond = manifest.random_states_file(accelerator.num_processes)
    if accelerator.process_index == 0 and os.path.exists(os.path.join(folder, beyond)):
        logger.warning(
            f"{folder} was saved by more processes than the {accelerator.num_processes} running now (it has {beyond}). Its "
            "weights and positions in the data load, but the ranks draw other random numbers and other samples than before."
        )
