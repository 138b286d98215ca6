"""Merging a sharded checkpoint into one file of weights."""

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate.checkpoint import checksum, formats, fsdp_state
from accelerate.checkpoint.dcp import FolderReader, is_folder
from accelerate.checkpoint.disk import sync_folder
from accelerate.checkpoint.fsdp_files import Found, merged_model
from accelerate.checkpoint.names import STAGING_PREFIX
from accelerate.logging import get_logger
from accelerate.modules.tensors import clean_state_dict_for_safetensors
from accelerate.process import PartialState
from accelerate.utils.constants import FSDP_MODEL_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

logger = get_logger(__name__)


def merge_fsdp_weights(
    checkpoint_dir: str, output_path: str, safe_serialization: bool = True, remove_checkpoint_dir: bool = False
) -> None:
    """Merge a sharded checkpoint into one file of weights. All ranks; the main process works, the others wait for it.

    What the manifest of the checkpoint says of the shards is compared with them first. The file is on the disk, and is
    what was written, before anything is deleted.

    Args:
        checkpoint_dir: the folder `pytorch_model_fsdp_0` of a checkpoint, with a `.metadata` file. The whole model must
            fit into memory.
        output_path: the folder for `model.safetensors` or `pytorch_model.bin`; it is made if missing.
        safe_serialization: write safetensors rather than a pickle.
        remove_checkpoint_dir: delete `checkpoint_dir` after the file is written.

    Raises:
        ValueError: `checkpoint_dir` is no sharded checkpoint, or would be deleted together with the result.
        DamagedCheckpoint: a shard is damaged; nothing was deleted.
        RuntimeError: the main process failed; raised on the others.
    """
    state = PartialState()
    source, target = Path(checkpoint_dir).absolute(), Path(output_path)

    def merge() -> None:
        _check_sharded(source)
        if remove_checkpoint_dir and source.resolve() in (target.resolve(), *target.resolve().parents):
            raise ValueError(
                f"output_path {target} lies in checkpoint_dir {source}, which remove_checkpoint_dir deletes."
            )
        Found(str(source.parent), source.name, "sharded").verify()
        written = _write_merged(merged_model(FolderReader(source)), target, safe_serialization, remove_checkpoint_dir)
        logger.info(f"The merged weights are in {written}.")
        if remove_checkpoint_dir:
            shutil.rmtree(source)

    fsdp_state.together(lambda: merge() if state.is_main_process else None)
    state.wait_for_everyone()


def _check_sharded(folder: Path) -> None:
    if is_folder(folder):
        return
    if not folder.is_dir():
        raise ValueError(f"checkpoint_dir {folder} does not exist.")
    inside = sorted(path.parent.name for path in folder.glob("*/.metadata"))
    models = [name for name in inside if name.startswith(FSDP_MODEL_NAME)] or inside
    hint = f" Did you mean {folder / models[0]}?" if models else ""
    raise ValueError(f"checkpoint_dir {folder} is no sharded checkpoint: it has no .metadata file.{hint}")


def _write_merged(weights: dict[str, Any], folder: Path, safe_serialization: bool, read_back: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
    staged = path.with_name(STAGING_PREFIX + path.name)
    if safe_serialization:
        tensors = clean_state_dict_for_safetensors(weights)
        entry = formats.write_safetensors(staged, tensors, {"format": "pt"})
    else:
        entry = formats.write_torch(staged, weights)
    if read_back and checksum.of_file(staged) != (entry.size, entry.checksum):
        raise OSError(f"{staged} is not what was written; {path} stays as it was, and no shards were deleted.")
    os.replace(staged, path)
    sync_folder(str(folder))
    return path
