"""`accelerate config`: write, show, check and update configuration files."""

import argparse
from typing import Any

from accelerate.commands.utils import or_exit
from accelerate.extensions.configure.config import config_command_parser, show_command_parser, validate_command_parser
from accelerate.extensions.configure.config_args import default_config_file, load_config_from_file  # noqa: F401, recorded here
from accelerate.extensions.configure.default import default_command_parser
from accelerate.extensions.configure.update import update_command_parser


class _Commands(argparse._SubParsersAction):
    """Hands `--config_file`, given before a subcommand, on to it; otherwise the subcommand's own default would replace it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        above = getattr(namespace, "config_file", None)
        super().__call__(parser, namespace, values, option_string)
        name = "save_location" if namespace.subcommand == "default" else "config_file"
        if isinstance(above, str) and name not in namespace.nondefault:  # anything else says that it was not given
            setattr(namespace, name, above)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, or add it to what `add_subparsers` returned."""
    parser = config_command_parser(subparsers)
    commands = parser.add_subparsers(
        title="subcommands", dest="subcommand", metavar="{default,update,show,validate}", action=_Commands
    )
    for add in (default_command_parser, update_command_parser, show_command_parser, validate_command_parser):
        add(commands, parents=[])
    return parser


def main() -> None:
    """Run the console script `accelerate-config`; status 2 for a request that cannot be run."""
    args = get_config_parser().parse_args()
    or_exit("accelerate config", args.func, args)
