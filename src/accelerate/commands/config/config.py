"""`accelerate config` without a subcommand: the questionnaire, which is not written yet."""

import argparse
from typing import Any, NoReturn

from accelerate.commands.utils import make_parser, or_exit
from accelerate.launch.errors import NotAvailableError


def get_user_input() -> NoReturn:
    """Ask for all settings; not available yet.

    Raises:
        NotAvailableError: always.
    """
    raise NotAvailableError(
        "The questionnaire is not available in this version yet. What works: `accelerate config default "
        "[--mixed_precision bf16]` writes a file for this machine, which any editor can change; `accelerate launch` needs "
        "no file at all."
    )


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, without its subcommands.

    Args:
        subparsers: what `ArgumentParser.add_subparsers` returned, or None for a parser of its own.
    """
    parser = make_parser(
        "config", "Write a configuration file for `accelerate launch`.", subparsers, config_command, allow_abbrev=False
    )
    parser.add_argument(
        "--config_file", help="The file to write; by default the one that `accelerate launch` looks for."
    )
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask for all settings and write them.

    Args:
        args: what `config_command_parser` parsed.

    Raises:
        NotAvailableError: always, until the questionnaire exists.
    """
    get_user_input()


def main() -> None:
    """Run the questionnaire as a program of its own.

    Raises:
        SystemExit: as in `accelerate.commands.config.main`.
    """
    or_exit("accelerate config", config_command, config_command_parser().parse_args())


if __name__ == "__main__":
    main()
