"""`accelerate test`: check that training works on this machine, through the launcher."""

import argparse
import sys
from typing import Any

from accelerate.base import _lazy
from accelerate.commands import launch
from accelerate.commands.utils import make_parser, or_exit

__getattr__ = _lazy.aliases("accelerate.commands.test")


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate test`, or add it to what `add_subparsers` returned."""
    description = "Check that training works on this machine."
    parser = make_parser("test", description, subparsers, test_command, allow_abbrev=False)
    which = "The configuration file to test; by default the one that a launch reads."
    parser.add_argument("--config_file", help=which)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the self check as a launch runs a user's script, for what `test_command_parser` parsed.

    Raises:
        SystemExit: the check failed (status 1), could not be started (2), or was interrupted (130).
    """
    config = [] if args.config_file is None else ["--config_file", args.config_file]
    words = [*config, "--module", "accelerate.test_utils.scripts.test_script"]
    print("Running the self check:", "accelerate launch", *words, flush=True)
    try:
        launch.console(launch.launch_command_parser().parse_args(words), replace=False)
    except SystemExit as ended:
        what = "could not be started" if ended.code == 2 else "failed; see the messages above"
        print(f"The self check {what}.", file=sys.stderr)
        raise
    print("The self check passed: this machine is ready to train.")


def main() -> None:
    """Run `accelerate test` as a separate program; exit statuses are those of `test_command`."""
    or_exit("accelerate test", test_command, test_command_parser().parse_args())


if __name__ == "__main__":
    main()
