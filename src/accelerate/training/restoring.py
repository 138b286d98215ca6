"""Loading a run's checkpoint: found, verified, read and compared in full, and only then put into the objects."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.backends.registry import resolve
from accelerate.checkpoint import names
from accelerate.checkpoint.barrier import SaveBarrier
from accelerate.checkpoint.load import Contents, read_common
from accelerate.checkpoint.manifest import damaged
from accelerate.checkpoint.save import Group, damage, shares
from accelerate.checkpoint.storage import CheckpointStorage, newest_first, storage_of
from accelerate.checkpointing import resolve_map_location
from accelerate.training.saving import as_path, pending_of

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]


def load_state(
    accelerator: "Accelerator",
    input_dir: Folder | None = None,
    load_kwargs: dict[str, Any] | None = None,
    latest: bool = False,
    missing_ok: bool = False,
    **load_model_func_kwargs: Any,
) -> Path | str | None:
    """Load what ``save_state`` saved into everything prepared or registered. All ranks call it.

    The checkpoint is verified, read in full and compared with the objects before any of them is changed. If one of them refuses
    its state all the same, on any rank, all are given back what they had.

    Args:
        accelerator: The Accelerator, with the same objects prepared and registered in the same order.
        input_dir: The checkpoint; a path or a URL. None takes the newest complete one of the project.
        load_kwargs: Passed to ``torch.load``; ``{"weights_only": False}`` for states that hold objects of your own.
        latest: Take the newest complete checkpoint in ``input_dir``, or in the project's folder.
        missing_ok: Return None where there is no checkpoint yet, instead of raising. One that is damaged still raises.
        **load_model_func_kwargs: ``map_location`` (``"cpu"`` or ``"on_device"``), and arguments of the models'
            ``load_state_dict``, such as ``strict``.

    Returns:
        Where the checkpoint is that was loaded, or None.

    Raises:
        ValueError: The folder does not exist, or there is no folder to look in.
        FileNotFoundError: There is no checkpoint yet, or it lacks a file.
        DamagedCheckpoint: It is not whole.
        RuntimeError: It does not fit the objects; the message lists the differences. Or another rank could not load it.
        CollectiveMisuse: Other ranks do something else; raised on all that called it.
    """
    former = pending_of(accelerator).settle("load_state()")
    location = resolve_map_location(load_model_func_kwargs.pop("map_location", None))
    latest = latest or input_dir is None
    place = _place(accelerator, input_dir)
    group = Group.of(accelerator, place)
    barrier = group.barrier("load_state", place)
    barrier.begin()
    barrier.check(former)  # what failed in the background on one rank alone is raised on all of them now
    contents, problem, chosen, following = None, None, None, None
    try:
        chosen, folder, following = _choose(accelerator, barrier, group, place, latest)
        contents = _read(accelerator, folder, location, load_kwargs, load_model_func_kwargs)
        contents.begin(**load_model_func_kwargs)
    except _Agreed as agreed:  # every rank raises this, so nobody has to be told
        barrier.end(None)
        # One that cannot be read is no reason to begin anew, and to save over it.
        if missing_ok and agreed.nothing:
            logger.info("%s Nothing was loaded.", agreed.problem)
            return None
        raise agreed.problem from None
    except BaseException as error:  # a rank that leaves without a word is waited for
        problem = error
    try:
        _complete(accelerator, barrier, contents, problem)
    finally:
        if chosen is not None:
            chosen.release()
    accelerator._loaded_checkpoint = chosen.location
    if following is not None:
        accelerator.project_configuration.iteration = following
    return as_path(chosen)


def _complete(
    accelerator: "Accelerator", barrier: SaveBarrier, contents: Contents | None, problem: BaseException | None
) -> None:
    """Put the rest into the objects if all ranks got this far, else give back what they had."""
    try:
        barrier.check(problem)
    except BaseException:
        if contents is not None:
            contents.undo()
        raise
    try:
        for name, value in contents.complete().items():
            setattr(accelerator, name, value)
    except BaseException as error:  # nobody must go on with a rank that has another state
        problem = error
    barrier.end(problem)


class _Agreed(Exception):
    """A problem that all ranks have found together.

    Args:
        problem: What is raised.
        nothing: There is no checkpoint at all, whole or not.
    """

    def __init__(self, problem: Exception, nothing: bool = False) -> None:
        super().__init__(str(problem))
        self.problem, self.nothing = problem, nothing


def _place(accelerator: "Accelerator", input_dir: Folder | None) -> CheckpointStorage:
    project = accelerator.project_configuration
    if input_dir is not None:
        return storage_of(input_dir)
    if project.project_dir is None:
        raise ValueError(
            "load_state() got no input_dir, and the Accelerator has no project folder to look in. Pass the checkpoint, or "
            "Accelerator(project_config=ProjectConfiguration(project_dir))."
        )
    return storage_of(project.project_dir).child(names.CHECKPOINTS_FOLDER)


def _choose(
    accelerator: "Accelerator", barrier: SaveBarrier, group: Group, place: CheckpointStorage, latest: bool
) -> tuple[CheckpointStorage, str, int | None]:
    """Return the checkpoint that all ranks take, verified; this rank's local folder of it; and the next automatic number."""
    candidates, passed = [place.location], []
    if latest:
        problem = ""
        if group.rank == 0:
            try:
                found, passed = newest_first(place)
                candidates = [candidate.location for candidate in found]
            except Exception as error:  # the others wait for what was found
                problem = f"{type(error).__name__}: {error}"
        candidates, passed, problem = barrier.exchange([candidates, passed, problem])[0]
        if problem:
            raise _Agreed(OSError(f"{place.location!r} could not be searched for checkpoints. {problem}"))
        if group.rank == 0:
            for line in passed:
                logger.warning("Passed over %s", line)
    for candidate in map(storage_of, candidates):
        folder, found, following = _verified(accelerator, barrier, group, candidate)
        if not found:
            return candidate, folder, following
        candidate.release()
        if not latest:
            raise _Agreed(_refusal(candidate, found), nothing=all(line.startswith(_ABSENT) for line in found))
        passed.append(f"{candidate.location}: {'; '.join(found)}")
        if group.rank == 0:
            logger.warning("Passed over %s", passed[-1])
    more = "".join(f"\n  passed over {line}" for line in passed)
    problem = FileNotFoundError(
        f"There is no complete checkpoint in {place.location!r}. Save one first, or name one.{more}"
    )
    raise _Agreed(problem, nothing=not passed)


def _verified(
    accelerator: "Accelerator", barrier: SaveBarrier, group: Group, candidate: CheckpointStorage
) -> tuple[str | None, list[str], int | None]:
    """Verify a checkpoint together: the folder to read from, what is wrong (the same on all ranks), and the next number."""
    leader = barrier.leader(group.leader)
    folder, found, state, save = None, [], None, None
    try:
        state = candidate.state()
        save = None if state.manifest is None else state.manifest.save
        if not state.loads:
            found = [state.reason] if state.kind != "absent" else [f"{_ABSENT}{state.reason}"]
        elif leader == group.rank or candidate.shared:
            folder = candidate.fetch()
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    notes = barrier.exchange([folder, group.rank, found, save])
    problems = _distinct(note[2] for note in notes)
    if not problems and len({note[3] for note in notes}) > 1:
        problems = [
            "the machines have checkpoints of different saves: not all of them had published when the run ended"
        ]
    if problems:
        return None, problems, None
    if folder is None:
        folder = next(note[0] for note in notes if note[1] == leader)
    following, checked = None, []
    try:
        following = _following_number(accelerator, candidate)
        if state.manifest is not None:
            checked = shares(state.manifest, group)
            found = damage(folder, state.manifest, checked)
        elif group.rank == 0:
            logger.warning("%s is loaded unverified: %s.", candidate.location, state.reason)
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    notes = barrier.exchange([found, leader, checked, following])
    found = _distinct(note[0] for note in notes)
    numbers = [note[3] for note in notes if note[3] is not None]
    if not found and state.manifest is not None:
        unseen = _unseen(notes, state.manifest.files, group.shared)
        if any(unseen.values()):
            try:
                found = damage(folder, state.manifest, unseen[leader])
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            found = _distinct(barrier.exchange(found))
    return folder, found, max(numbers, default=None)


def _unseen(notes: Sequence[Any], files: Iterable[str], shared: bool) -> dict[int, list[str]]:
    """Return, for the copy of each leader, the files that no rank has looked at: variables of a launcher may be wrong."""
    seen: dict[int, set[str]] = {}
    for _, leader, checked, _ in notes:
        seen.setdefault(-1 if shared else leader, set()).update(checked)
    return {leader: sorted(set(files) - seen[-1 if shared else leader]) for _, leader, _, _ in notes}


_ABSENT = "absent: "


def _distinct(lists: Any) -> list[str]:
    return list(dict.fromkeys(line for lines in lists for line in lines))


def _refusal(candidate: CheckpointStorage, found: list[str]) -> Exception:
    if found[0].startswith(_ABSENT):
        return ValueError(f"load_state({candidate.location!r}): {found[0].removeprefix(_ABSENT)}.")
    return damaged(candidate.location, found)


def _read(
    accelerator: "Accelerator",
    folder: str,
    location: Any,
    load_kwargs: dict[str, Any] | None,
    model_options: dict[str, Any],
) -> Contents:
    backend = resolve(accelerator.state)
    custom = accelerator._custom_objects
    pattern = re.compile(re.escape(names.CUSTOM_NAME) + r"_\d+\.pkl")
    if (saved := sum(bool(pattern.fullmatch(file)) for file in os.listdir(folder))) != len(custom):
        raise RuntimeError(
            f"{folder!r} has the states of {saved} registered objects, but {len(custom)} are registered. Register the "
            "same objects in the same order with `accelerator.register_for_checkpointing` before loading."
        )
    optimizers = []
    for index, optimizer in enumerate(accelerator._optimizers):
        state = backend.load_optimizer(
            accelerator, optimizer, folder, index, map_location=location, load_kwargs=load_kwargs
        )
        if state is not None:
            optimizers.append((optimizer, state, names.optimizer_file(index)))
    contents = read_common(
        folder,
        backend.checkpointed_schedulers(accelerator),
        accelerator._dataloaders,
        custom,
        accelerator.scaler,
        accelerator.process_index,
        load_kwargs,
    )
    contents.optimizers = optimizers
    _read_models(accelerator, contents, folder, location, load_kwargs, model_options)
    _warn_of_fewer_processes(accelerator, folder)
    return contents


def _read_models(
    accelerator: "Accelerator",
    contents: Contents,
    folder: str,
    location: Any,
    load_kwargs: dict[str, Any] | None,
    model_options: dict[str, Any],
) -> None:
    """Let the hooks load what they want to load, and read the other models. Hooks come last, because they change models."""
    backend = resolve(accelerator.state)
    options = {"strict": model_options.get("strict", True)}
    if backend.saves_shards and "adapter_only" in model_options:
        options["adapter_only"] = model_options["adapter_only"]
    inner = [backend.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    hooks = list(accelerator._load_model_state_pre_hook.values())
    for model in inner if hooks else []:
        contents.keep(model)
    left = list(inner)
    try:
        for hook in hooks:
            hook(left, folder)
        # A hook takes out of the list what it loaded itself.
        kept = {id(model) for model in left}
        pairs = [(outer, model) for outer, model in zip(accelerator._models, inner, strict=True) if id(model) in kept]
        for index, (outer, model) in enumerate(pairs):
            state = backend.load_model(
                accelerator,
                outer,
                folder,
                index,
                map_location=location,
                load_kwargs=load_kwargs,
                **options,
            )
            if isinstance(state, tuple):  # what takes the state, and the state
                contents.models.append(state)
            elif state is not None:  # None: the strategy has put the weights where they belong
                contents.models.append((model, state))
    except BaseException:
        contents.undo()
        raise


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


def _following_number(accelerator: "Accelerator", place: CheckpointStorage) -> int | None:
    """Return the number of the next automatic name, where that follows from the checkpoint that is loaded."""
    project = accelerator.project_configuration
    number = names.number_of(place.name)
    if not project.automatic_checkpoint_naming or project.project_dir is None or number is None:
        return None
    here = storage_of(project.project_dir).child(names.CHECKPOINTS_FOLDER)
    if place.parent() != here:
        return None
    # After going back to an older one, the newer ones keep their numbers, and what comes next is the newest. Damaged ones keep
    # theirs, too: somebody may want to look at them. Of a killed save to an object store nobody wants to see anything.
    taken = [known for known, other in here.checkpoints() if other.state().loads or other.files()]
    return max(taken, default=number) + 1
