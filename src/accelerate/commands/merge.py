"""`accelerate merge-weights`: one file of weights from the shards of an FSDP checkpoint."""

import argparse
from typing import Any

from accelerate.commands.checkpoint import told_in_one_line
from accelerate.commands.utils import make_parser, or_exit


def merge_command(args: argparse.Namespace) -> None:
    """Merge the shards of a checkpoint.

    Args:
        args: what `merge_command_parser` parsed.

    Raises:
        LaunchError: the shards are damaged, or cannot be merged like that; the message says why.
    """
    from accelerate.utils.fsdp_utils import merge_fsdp_weights

    with told_in_one_line():
        merge_fsdp_weights(
            args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
        )


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate merge-weights`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "merge-weights",
        "Merge the shards of an FSDP checkpoint (SHARDED_STATE_DICT) into one set of weights.",
        subparsers,
        merge_command,
    )
    parser.add_argument("checkpoint_directory", help="The directory of the shards.")
    parser.add_argument("output_path", help="The directory to write to; it is created if it does not exist.")
    parser.add_argument(
        "--unsafe_serialization", action="store_true", help="Write `.bin` (pickle) instead of `.safetensors`."
    )
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the shards afterwards.")
    return parser


def main() -> None:
    """Run the console script `accelerate-merge-weights`.

    Raises:
        SystemExit: with status 2 if there is no such checkpoint.
    """
    or_exit("accelerate merge-weights", merge_command, merge_command_parser().parse_args())


if __name__ == "__main__":
    main()
