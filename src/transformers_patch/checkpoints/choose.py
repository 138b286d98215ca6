"""The complete checkpoints of a Trainer, and the choice of the one to resume from.

A folder with a manifest is compared with it. A folder without one was written by the stock Trainer, directly into the final
folder. Its files only show some faults: files that a reader cannot open, and sets with missing parts.
"""

import logging
import os
import re
import shlex
import sys
from typing import Any

from accelerate.checkpoint import manifest
from accelerate.checkpoint.layouts import unreadable
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.checkpoint.ranks import Group, Ranks, default_store
from accelerate.checkpoint.storage import LocalStorage

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
# A file in a folder that transformers' own preemption callback is writing to.
_UNFINISHED = "checkpoint-is-incomplete.txt"
_NAME = re.compile(f"checkpoint-({manifest.NUMBER})")
_SHARDS = re.compile(f"(optimizer|pytorch_model_fsdp)_{manifest.NUMBER}")


def place_of(folder: str, number: int) -> str:
    """Return the path of a run's checkpoint of a step."""
    return os.path.join(folder, f"checkpoint-{number}")


def numbers(folder: str) -> list[int]:
    """Return the steps of a run's folders, complete or not, newest first."""
    with os.scandir(folder) as entries:
        matches = [_NAME.fullmatch(entry.name) for entry in entries if entry.is_symlink() or entry.is_dir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def flaw(folder: str | os.PathLike[str], deep: bool = False) -> str:
    """Return why the Trainer cannot resume from a folder, or nothing; `deep` reads all bytes that a manifest lists.

    Not a collective.
    """
    try:
        status = LocalStorage(folder).state()
        if not status.loads:
            return status.reason
        if not os.path.isfile(os.path.join(folder, STATE)):
            return f"it has no {STATE}"
        listing = status.manifest
        problems = _stock_flaws(folder) if listing is None else manifest.problems(folder, listing, deep=deep)
        return "; ".join(manifest.first_of(problems))
    except OSError as error:
        return str(error)


def _stock_flaws(folder: str) -> list[str]:
    names = sorted(os.listdir(folder))
    problems = ["the stock Trainer did not finish writing it"] if _UNFINISHED in names else []
    problems += unreadable(folder)
    optimizer = any(name.startswith(("optimizer", "global_step")) or "-optimizer." in name for name in names)
    if optimizer != any(name.startswith("rng_state") for name in names):
        problems.append(f"the {'generators' if optimizer else 'optimizer'} are missing")
    # The last file of a sharded set.
    last = {name: os.path.join(name, ".metadata") for name in names if _SHARDS.fullmatch(name)}
    last |= {name: "latest" for name in names if name.startswith("global_step")}
    problems += [f"{end} is missing" for end in last.values() if not os.path.isfile(os.path.join(folder, end))]
    others = re.compile(r"(training_args|optimizer.*|scheduler)\.bin")
    weights = [name for name in names if name.endswith((".safetensors", ".bin")) and not others.fullmatch(name)]
    if not weights and not any(os.path.isdir(os.path.join(folder, name)) for name in names):
        problems.append("it has no weights")
    return problems


def newest(folder: str, deep: bool = False) -> tuple[int | None, list[str]]:
    """Return the step of the newest complete checkpoint, None without one, and a warning for each skipped one.

    Not a collective.
    """
    passed: list[str] = []
    for number in numbers(folder):
        place = place_of(folder, number)
        if not (reason := flaw(place, deep)):
            return number, passed
        passed.append(f"{place}: {reason}")
        logger.warning("Passed over %s", passed[-1])
    return None, passed


def group_of(args: Any) -> Group:
    """Return the ranks of a Trainer, as the one of its arguments sees them."""
    each_node = bool(args.save_on_each_node)
    return Group(args.process_index, args.world_size, args.local_process_index, each_node, not each_node)


def resolved(trainer: Any, asked: Any) -> Any:
    """Return the folder that the Trainer resumes from: the newest complete checkpoint for True, or the named one, verified.

    One rank per file system reads and hashes; the others check that they see the same folder.

    Collective: call on every rank.

    Raises:
        DamagedCheckpoint: The named one is not complete.
        ValueError: There is none; or some rank does not see it.
    """
    if asked is None or asked is False:
        return asked
    group = group_of(trainer.args)
    folder = os.fspath(trainer.args.output_dir if asked is True else asked)
    ranks = Ranks(group, default_store())
    ranks.agree("train", os.path.realpath(folder))
    leads, problem, number = ranks.leader() == group.rank, None, sys.maxsize
    try:
        if asked is True and leads:
            number = _newest_number(folder)
        elif leads and os.path.isdir(folder) and (reason := flaw(folder, deep=True)):
            raise DamagedCheckpoint(
                f"The checkpoint {folder!r} is not whole: {reason}\nNothing was loaded. Name another one, or pass "
                "resume_from_checkpoint=True, which takes the newest whole one. If you changed its files on purpose, accept them: "
                f"accelerate checkpoint accept {shlex.quote(folder)}"
            )
    except BaseException as error:  # the others hear of it
        problem = error
    ranks.first_error(problem)
    if asked is True:
        folder = place_of(folder, ranks.smallest(number))
    if not os.path.isdir(folder):
        place = f"rank {group.rank} does not see it. All ranks resume from one checkpoint, which each of them reads"
        problem = ValueError(f"There is no folder {folder!r}: {place}.")
    ranks.first_error(problem)
    ranks.leave()
    return folder


def _newest_number(folder: str) -> int:
    if os.path.isdir(folder):
        LocalStorage(folder).sweep()  # it also completes a checkpoint whose publication was killed
    number, passed = newest(folder, deep=True) if os.path.isdir(folder) else (None, [])
    if number is None:
        what = "\n  ".join([" These are not whole:", *manifest.first_of(passed)] if passed else [])
        what += "\nIf you changed files on purpose, accept them: accelerate checkpoint accept FOLDER" if passed else ""
        raise ValueError(f"No valid checkpoint found in output directory ({folder}).{what}")
    return number
