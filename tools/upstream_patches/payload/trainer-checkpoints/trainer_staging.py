"""Checkpoints of the Trainer that are complete or not there.

A checkpoint is written under another name, in the folder where it belongs. It gets its own name in one step, when all
processes have written. The other name begins with an underscore, which pushes to the Hub omit.
"""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

STAGING_PREFIX = "_saving-"
# The file that the Trainer writes last
STATE_NAME = "trainer_state.json"


def stage_checkpoint(checkpoint_dir: str, args: Any, wait_for_everyone: Callable[[], Any]) -> str:
    """Return where to write what becomes `checkpoint_dir`. What killed saves left is removed. All processes."""
    run_dir, name = os.path.split(checkpoint_dir)
    if _publishes(args):
        _complete(run_dir)
        prefix = STAGING_PREFIX + name.rpartition("-")[0]
        for left in glob.glob(os.path.join(glob.escape(run_dir), f"{prefix}-*")):
            shutil.rmtree(left, ignore_errors=True)
    wait_for_everyone()
    return os.path.join(run_dir, STAGING_PREFIX + name)


def publish_checkpoint(staged: str, checkpoint_dir: str, args: Any, wait_for_everyone: Callable[[], Any]) -> None:
    """Give what is staged its name, when all processes have written, and before any of them continues. All processes."""
    wait_for_everyone()
    if _publishes(args):
        claimed, replaced = f"{staged}-claimed", f"{staged}-replaced"
        try:
            # The first processes of all nodes come here. On a disk that they share one of them gets it, on disks of
            # their own each of them gets what its node has written.
            os.rename(staged, claimed)
        except FileNotFoundError:
            pass
        except OSError as error:
            if args.should_save:
                logger.warning(f"{staged} cannot be renamed, so it is copied to {checkpoint_dir}: {error}")
                _copy(staged, checkpoint_dir)
        else:
            _sync(claimed)
            if os.path.isdir(checkpoint_dir):
                os.rename(checkpoint_dir, replaced)
            _rename_claimed(claimed, checkpoint_dir)
            _sync_folder(os.path.dirname(checkpoint_dir))
            shutil.rmtree(replaced, ignore_errors=True)
    wait_for_everyone()


def pass_over_unfinished(folder: str, names: list[str]) -> list[str]:
    """Return the names of checkpoints, oldest first, without those behind the last whole one; each has a warning."""
    names = sorted({*names, *_complete(folder)}, key=lambda name: int(name.rpartition("-")[2]))
    while names and not _is_whole(os.path.join(folder, names[-1])):
        path = os.path.join(folder, names.pop())
        logger.warning(f"Passed over {path}: it has no {STATE_NAME} that can be read, so its saving did not end.")
    return names


def _complete(run_dir: str) -> list[str]:
    """Give its name to a checkpoint whose process was killed when the older one had lost it; return the names of such."""
    names = []
    for replaced in glob.glob(os.path.join(glob.escape(run_dir), f"{STAGING_PREFIX}checkpoint-*-replaced")):
        staged = replaced[: -len("-replaced")]
        checkpoint_dir = os.path.join(run_dir, os.path.basename(staged)[len(STAGING_PREFIX) :])
        if not os.path.isdir(checkpoint_dir):
            _rename_claimed(f"{staged}-claimed", checkpoint_dir)
        if os.path.isdir(checkpoint_dir):
            names.append(os.path.basename(checkpoint_dir))
    return names


def _rename_claimed(claimed: str, checkpoint_dir: str) -> None:
    # Another process that looked for the last checkpoint may have been first
    with contextlib.suppress(FileNotFoundError):
        os.rename(claimed, checkpoint_dir)


def _is_whole(checkpoint_dir: str) -> bool:
    try:
        with open(os.path.join(checkpoint_dir, STATE_NAME), encoding="utf-8") as file:
            return isinstance(json.load(file), dict)
    except (OSError, ValueError):
        return False


def _publishes(args: Any) -> bool:
    return args.should_save or args.local_process_index == 0


def _copy(staged: str, checkpoint_dir: str) -> None:
    """Replace the folder by a copy, for mounted object stores; the file by which it is complete goes first and comes last."""
    state = os.path.join(checkpoint_dir, STATE_NAME)
    with contextlib.suppress(FileNotFoundError):
        os.remove(state)
    shutil.rmtree(checkpoint_dir, ignore_errors=True)
    shutil.copytree(staged, checkpoint_dir, ignore=shutil.ignore_patterns(STATE_NAME), dirs_exist_ok=True)
    shutil.copyfile(os.path.join(staged, STATE_NAME), state)
    shutil.rmtree(staged, ignore_errors=True)


def _sync(folder: str) -> None:
    """Wait until what is in a folder is on the disk, so that a machine that goes down leaves no empty files."""
    if os.name != "posix":  # Windows syncs only what is open for writing
        return
    for path, _, names in os.walk(folder):
        for name in filter(os.path.isfile, (os.path.join(path, name) for name in names)):
            with open(name, "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(path)


def _sync_folder(path: str) -> None:
    with contextlib.suppress(OSError):  # Windows opens no folders, and some network file systems do not sync them
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
