"""The console script `accelerate`: it imports only the command that was asked for."""

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import NoReturn

from accelerate import __version__
from accelerate.base import _lazy
from accelerate.commands.utils import CustomArgumentParser, as_program, or_exit
from accelerate.launch.config_file import nearest

__getattr__ = _lazy.aliases(__name__)


@dataclass(frozen=True)
class Command:
    """A command of the console script; `parser` is the function of its module that makes its parser."""

    module: str
    parser: str
    help: str


COMMANDS: dict[str, Command] = {
    "checkpoint": Command("checkpoint", "checkpoint_command_parser", "List, verify, convert and prune checkpoints."),
    "config": Command("config", "get_config_parser", "Write and update configuration files."),
    "diagnose": Command("diagnose", "diagnose_command_parser", "Read what ranks that hung or failed have left."),
    "env": Command("env", "env_command_parser", "Print versions, devices and configuration, for a bug report."),
    "estimate-memory": Command("estimate", "estimate_command_parser", "Estimate how much memory a model needs."),
    "launch": Command("launch", "launch_command_parser", "Start a training script, in one process or several."),
    "merge-weights": Command("merge", "merge_command_parser", "Merge the shards of an FSDP checkpoint."),
    "plan": Command("plan", "plan_command_parser", "List the layouts of a training that fit on a cluster."),
    "stacks": Command("diagnose", "stacks_command_parser", "Ask the ranks of a running job where their threads are."),
    "test": Command("test", "test_command_parser", "Check that training works here, through the launcher."),
    "to-fsdp2": Command("to_fsdp2", "to_fsdp2_command_parser", "Convert a configuration file from FSDP 1 to FSDP 2."),
    "tpu-config": Command("tpu", "tpu_command_parser", "Run commands on the machines of a TPU pod."),
}


def main() -> None:
    """Run the command that stands on the command line; status 2 if it cannot be run, 1 without one, or its own."""
    with as_program("accelerate"):
        name, *rest = sys.argv[1:] or [None]
        if name in COMMANDS:
            _run(COMMANDS[name], f"accelerate {name}", rest)
        else:
            _without_command(name)


def _run(command: Command, prog: str, words: list[str]) -> None:
    module = importlib.import_module(f"accelerate.commands.{command.module}")
    args = getattr(module, command.parser)().parse_args(words)
    if hasattr(module, "console"):  # it starts programs, whose output is theirs
        module.console(args)
    else:
        or_exit(prog, args.func, args)


def _without_command(word: str | None) -> NoReturn:
    """Answer a command line that does not begin with a command."""
    width = max(map(len, COMMANDS)) + 2
    parser = CustomArgumentParser(
        "accelerate",
        usage="accelerate <command> [<args>]",
        description="\n".join(["commands:", *(f"  {name:{width}}{row.help}" for name, row in COMMANDS.items())]),
        epilog="`accelerate <command> --help` lists the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"accelerate {__version__}")
    if word is None:
        parser.print_help()
        raise SystemExit(1)
    if word in ("-h", "--help", "-V", "--version"):
        parser.parse_args([word])
    if word.endswith(".py"):
        parser.error(f"{word!r} is no command; did you mean `accelerate launch {word}`?")
    near = nearest(word.lower().replace("_", "-"), COMMANDS)
    hint = f"did you mean {near}?" if near else f"choose one of {', '.join(COMMANDS)}."
    parser.error(f"{word!r} is no command; {hint}")


if __name__ == "__main__":
    main()
