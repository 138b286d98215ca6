"""Names of the files and folders of a checkpoint."""

import os
import re

from accelerate.runtime.durable import STAGING_PREFIX
from accelerate.utils.constants import (
    FSDP_MODEL_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)

CUSTOM_NAME = "custom_checkpoint"
DATALOADER_STATE_NAME = "dl_state_dict"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINT_PREFIX = "checkpoint_"

# Lies in a folder from before its first file is written until after its last one is: the writer's of the shared files, and
# with a number behind it that of another rank, which may come first.
INCOMPLETE_MARKER = ".incomplete"

# What a checkpoint has in front of its name while it is written, takes its place, is replaced, and is removed: nobody takes
# a folder of such a name for a checkpoint.
READY_PREFIX = ".ready_"
REPLACED_PREFIX = ".replaced_"
REMOVED_PREFIX = ".removed_"
HIDDEN_PREFIXES = (STAGING_PREFIX, READY_PREFIX, REPLACED_PREFIX, REMOVED_PREFIX)

# A file that a process holds locked while it saves to a place. One that no process holds means nothing.
LOCK_PREFIX = ".lock_"

# Lies in the newer one of two checkpoints that are being exchanged.
PUBLISHING_MARKER = ".publishing"

GENERATORS_NAME = "generators"

# Which parameter each number in an optimizer's file means: names by position, for each group. Torch's format does not tell.
PARAMETER_NAMES = "parameter_names.json"

# Lies in a folder of torch's distributed checkpoints.
METADATA = ".metadata"

_SHARDS = re.compile(r"__\d+_\d+\.distcp|\.metadata")
_NUMBERED = re.compile(re.escape(CHECKPOINT_PREFIX) + r"(\d+)")
_GENERATORS = re.compile(GENERATORS_NAME + r"_\d+\.safetensors")

_STEMS = [MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, SAFE_MODEL_NAME, DATALOADER_STATE_NAME]
_PARTS = re.compile(
    rf"(?:rank\d+_)?(?:{'|'.join(map(re.escape, _STEMS))})(?:_\d+)?\.(?:bin|safetensors)"
    rf"|{re.escape(SCALER_NAME)}|{re.escape(RNG_STATE_NAME)}_\d+\.pkl|{CUSTOM_NAME}_\d+\.pkl"
    rf"|{GENERATORS_NAME}_\d+\.safetensors|{re.escape(INCOMPLETE_MARKER)}(?:_\d+)?"
    # Of sharded layouts. A folder without a number is the user's own.
    r"|(?:pytorch_model_fsdp|optimizer)_\d+|(?:pytorch_model_fsdp|optimizer)(?:_\d+)?(?:_rank\d+)?\.bin"
    r"|parameter_names\.json"
)


def _indexed(stem: str, index: int, extension: str) -> str:
    """The first object of a kind has no number, so that the usual checkpoint reads plainly."""
    return f"{stem}{extension}" if index == 0 else f"{stem}_{index}{extension}"


def model_file(index: int, safe_serialization: bool = True) -> str:
    """Return the name of the file with a model's weights."""
    return (
        _indexed(SAFE_MODEL_NAME, index, ".safetensors") if safe_serialization else _indexed(MODEL_NAME, index, ".bin")
    )


def optimizer_file(index: int) -> str:
    """Return the name of the file with an optimizer's state."""
    return _indexed(OPTIMIZER_NAME, index, ".bin")


def scheduler_file(index: int) -> str:
    """Return the name of the file with a scheduler's state."""
    return _indexed(SCHEDULER_NAME, index, ".bin")


def dataloader_file(index: int, process_index: int | None = None) -> str:
    """Return the name of the file with the state of a stateful loader.

    Args:
        index: Which of the loaders it is.
        process_index: The rank whose state it is; None for the state that all ranks can use.
    """
    stem = DATALOADER_STATE_NAME if process_index is None else f"rank{process_index}_{DATALOADER_STATE_NAME}"
    return _indexed(stem, index, ".bin")


def model_folder(index: int) -> str:
    """Return the name of the folder with a model's shards."""
    return f"{FSDP_MODEL_NAME}_{index}"


def optimizer_folder(index: int) -> str:
    """Return the name of the folder with the shards of an optimizer's state."""
    return f"{OPTIMIZER_NAME}_{index}"


def gathered_model_file(index: int) -> str:
    """Return the name of the file with all weights of a model that was sharded."""
    return _indexed(FSDP_MODEL_NAME, index, ".bin")


def rank_file(stem: str, rank: int) -> str:
    """Return the name of the file with what one rank has of a model or an optimizer, which is called `stem`."""
    return f"{stem}_rank{rank}.bin"


def scaler_file() -> str:
    """Return the name of the file with the gradient scaler's state."""
    return SCALER_NAME


def random_states_file(process_index: int) -> str:
    """Return the name of the file with the random states of one rank."""
    return f"{RNG_STATE_NAME}_{process_index}.pkl"


def generators_file(process_index: int) -> str:
    """Return the name of the file with the random generators of one rank, which only we write."""
    return f"{GENERATORS_NAME}_{process_index}.safetensors"


def is_generators_file(name: str) -> bool:
    """Say whether a file has the name of a rank's random generators."""
    return _GENERATORS.fullmatch(name) is not None


def is_checkpoint_file(name: str) -> bool:
    """Say whether a file has a name that a checkpoint's files have, ours or upstream's.

    Args:
        name: the name of a file directly inside a checkpoint.
    """
    return _PARTS.fullmatch(name) is not None


def is_shard_file(name: str) -> bool:
    """Say whether a file has a name that torch gives to the files of a folder of shards."""
    return _SHARDS.fullmatch(name) is not None


def custom_file(index: int) -> str:
    """Return the name of the file with the state of a registered object."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def numbered_folder(number: int) -> str:
    """Return the name of an automatically named checkpoint."""
    return f"{CHECKPOINT_PREFIX}{number}"


def number_of(folder: str | os.PathLike[str]) -> int | None:
    """Return the number of an automatically named checkpoint, or None for a folder with another name.

    Args:
        folder: A folder's name or path.
    """
    match = _NUMBERED.fullmatch(os.path.basename(os.path.normpath(os.fspath(folder))))
    return int(match.group(1)) if match else None
