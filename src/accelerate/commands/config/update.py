"""`accelerate config update`: an old configuration file in today's shape."""

import argparse
import pathlib
from typing import Any

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.commands.utils import make_parser


def update_config(args: argparse.Namespace) -> str:
    """Rewrite a configuration file: settings that it lacks are added with their defaults.

    Args:
        args: has `config_file`; None is the default file.

    Returns:
        The file.

    Raises:
        FileNotFoundError: there is no such file.
        LaunchError: it holds an unknown key.
    """
    path = args.config_file or default_config_file
    config = load_config_from_file(path)
    if pathlib.Path(path).suffix == ".json":
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    return str(path)


def update_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config update`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    command = make_parser(
        "update",
        "Bring a configuration file into today's shape.",
        parser,
        update_config_command,
        parents=parents,
        formatter_class=SubcommandHelpFormatter,
    )
    command.add_argument(
        "--config_file", help="The file to rewrite; by default the one that `accelerate launch` reads."
    )
    return command


def update_config_command(args: argparse.Namespace) -> None:
    """Run `accelerate config update`.

    Args:
        args: what `update_command_parser` parsed.
    """
    print(f"Updated the configuration at {update_config(args)}")
