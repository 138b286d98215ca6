"""The console script `accelerate`: it imports only the command that was asked for."""

import argparse
import importlib
import sys
from dataclasses import dataclass

from accelerate.commands.utils import or_exit


@dataclass(frozen=True)
class Command:
    """A command of the console script.

    Attributes:
        module: where it lives, below `accelerate.commands`.
        parser: the function there that makes its parser.
        help: what it does, in one sentence.
    """

    module: str
    parser: str
    help: str


COMMANDS: dict[str, Command] = {
    "checkpoint": Command(
        "checkpoint", "checkpoint_command_parser", "List, verify, inspect, convert and prune checkpoints."
    ),
    "config": Command("config", "get_config_parser", "Write and update configuration files."),
    "env": Command("env", "env_command_parser", "Print versions, devices and configuration, for a bug report."),
    "estimate-memory": Command("estimate", "estimate_command_parser", "Estimate how much memory a model needs."),
    "launch": Command("launch", "launch_command_parser", "Start a training script, in one process or several."),
    "merge-weights": Command("merge", "merge_command_parser", "Merge the shards of an FSDP checkpoint."),
    "test": Command("test", "test_command_parser", "Check that training works here, through the launcher."),
    "to-fsdp2": Command("to_fsdp2", "to_fsdp2_command_parser", "Convert a configuration file from FSDP 1 to FSDP 2."),
    "tpu-config": Command("tpu", "tpu_command_parser", "Run commands on the machines of a TPU pod."),
}


def main() -> None:
    """Run the command that stands on the command line.

    Raises:
        SystemExit: with status 2 for a request that cannot be run, 1 for no request, or the status of what ran.
    """
    name, *rest = sys.argv[1:] or [None]
    if name not in COMMANDS:
        parser = argparse.ArgumentParser(
            "accelerate", usage="accelerate <command> [<args>]", formatter_class=argparse.RawTextHelpFormatter
        )
        parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="command", help=_overview())
        parser.parse_args()  # answers --help and an unknown command
        parser.print_help()
        raise SystemExit(1)
    command = COMMANDS[name]
    module = importlib.import_module(f"accelerate.commands.{command.module}")
    args = getattr(module, command.parser)().parse_args(rest)
    or_exit(f"accelerate {name}", getattr(module, "console", args.func), args)


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(f"{name:{width}}{command.help}" for name, command in COMMANDS.items())


if __name__ == "__main__":
    main()
