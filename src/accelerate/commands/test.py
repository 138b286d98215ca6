"""`accelerate test`: check that training works on this machine, through the launcher."""

import argparse
import subprocess
import sys
from typing import Any

from accelerate.commands.utils import make_parser, or_exit


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate test`.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "test", "Check that training works on this machine.", subparsers, test_command, allow_abbrev=False
    )
    parser.add_argument(
        "--config_file", help="The configuration file to test; by default the one that a launch reads."
    )
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the self check through `accelerate launch`, as a user's script would run.

    Args:
        args: what `test_command_parser` parsed.

    Raises:
        SystemExit: the check failed; the status is that of the launch.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    config = [] if args.config_file is None else ["--config_file", args.config_file]
    script = ["--module", "accelerate.test_utils.scripts.test_script"]
    print("Running the self check:", "accelerate launch", *config, *script, flush=True)
    status = subprocess.run([*launcher, *config, *script], check=False).returncode
    if status:
        print("The self check failed; what failed is printed above.", file=sys.stderr)
        raise SystemExit(status)
    print("The self check passed: this machine is ready to train.")


# pytest collects functions of this name.
test_command.__test__ = False
test_command_parser.__test__ = False


def main() -> None:
    """Run `accelerate test` as a program of its own.

    Raises:
        SystemExit: as in `test_command`.
    """
    or_exit("accelerate test", test_command, test_command_parser().parse_args())


if __name__ == "__main__":
    main()
