"""`accelerate merge-weights`: one file of weights from the shards of an FSDP checkpoint."""

import argparse
import os
from typing import Any

from accelerate.base.constants import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from accelerate.base.table import size_text
from accelerate.checkpoint.manifest import METADATA
from accelerate.commands.utils import make_parser, or_exit
from accelerate.extensions.convert.command import one_line_errors
from accelerate.launch.errors import LaunchError

description = "Merge the shards of an FSDP checkpoint (SHARDED_STATE_DICT) into one set of weights."


def merge_command(args: argparse.Namespace) -> None:
    """Merge the shards of a checkpoint, for what `merge_command_parser` parsed.

    The file appears under its name when all of it is on the disk.

    Raises:
        LaunchError: the shards are damaged, or cannot be merged like that, or the output is there already; the message says why.
        OSError: the result could not be written.
    """
    from accelerate.utils.fsdp_utils import merge_fsdp_weights

    safe = not args.unsafe_serialization
    _check_output(args.output_path, safe, getattr(args, "overwrite", False))
    with one_line_errors():
        _check_shards(args.checkpoint_directory)
        merge_fsdp_weights(args.checkpoint_directory, args.output_path, safe, args.remove_checkpoint_dir)
    written = os.path.join(args.output_path, SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME)
    print(f"{written}: {size_text(os.path.getsize(written))}")


def _check_shards(folder: str) -> None:
    from accelerate.extensions.export.headers import tensors_of_shards

    if os.path.isfile(folder):
        raise LaunchError(f"checkpoint_directory {folder!r} is a file; name the folder of shards ({METADATA}).")
    # Without metadata, the function that merges them reports what is there instead.
    names = tensors_of_shards(folder) if os.path.isfile(os.path.join(folder, METADATA)) else {}
    if names and all(name.partition(".")[0] in ("state", "param_groups") for name in names):
        raise LaunchError(f"checkpoint_directory {folder!r} holds the state of an optimizer, and no weights.")


def _check_output(folder: str, safe: bool, overwrite: bool) -> None:
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise LaunchError(f"output_path {folder!r} is a file; name a folder.")
    # Those of the other format as well: a library that finds both loads one of them.
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    there = [name for name in names if os.path.lexists(os.path.join(folder, name))]
    written = SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME
    if there and not overwrite:
        present = f"output_path {folder!r} has weights already: {', '.join(there)}"
        raise LaunchError(f"{present}. Name another folder, or add --overwrite to replace {written}.")


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`, or add it to what `add_subparsers` returned."""
    parser = make_parser("merge-weights", description, subparsers, merge_command)
    parser.add_argument("checkpoint_directory", help="The directory of the shards.")
    parser.add_argument("output_path", help="The directory to write to; it is created if it does not exist.")
    pickled = "Write `.bin` (pickle) instead of `.safetensors`."
    parser.add_argument("--unsafe_serialization", action="store_true", help=pickled)
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the shards afterwards.")
    parser.add_argument("--overwrite", action="store_true", help="Replace the file of weights, if it is there.")
    return parser


def main() -> None:
    """Run the console script `accelerate-merge-weights`; status 2 without such a checkpoint, 1 if it cannot write."""
    or_exit("accelerate merge-weights", merge_command, merge_command_parser().parse_args())


if __name__ == "__main__":
    main()
