"""`accelerate config`: the interview; `show` prints the settings of a launch and their sources; `validate` checks a file."""

import argparse
import os
import pathlib
import sys
from typing import Any

from accelerate.base import _lazy
from accelerate.base._warn import printable
from accelerate.commands.utils import OneSpelling, add_options, make_parser, or_exit
from accelerate.extension import imported
from accelerate.extensions.configure import config_utils
from accelerate.extensions.configure.interview import Asker, check
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError

__getattr__ = _lazy.aliases("accelerate.commands.config.config")

description = "Write a configuration file for `accelerate launch` by answering questions."


# Explanations that only the parser of `accelerate launch` needs.
_OWN = ("help", "config_file", "all")


def get_user_input() -> Any:
    """Ask for all settings.

    Returns:
        A `ClusterConfig`, or a `SageMakerConfig` for jobs on Amazon SageMaker.

    Raises:
        EOFError: the input ended before the last answer.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    return _ask(None)


def _ask(before: files.FileSettings | None) -> Any:
    """Ask for all settings; those of the file that is replaced are the defaults."""
    asker = Asker()
    content, values = (before.content, before.values) if before else ({}, {})
    elsewhere = files.elsewhere()
    places = [feature.wanted for feature in elsewhere]
    was = content.get("compute_environment")
    before = places.index(was) + 1 if was in places else 0
    lines = ["Machines of your own", *(feature.title for feature in elsewhere)]
    chosen = asker.choose("Where should the training run?", lines, before) if elsewhere else 0
    if chosen:
        plain = {key: value for key, value in content.items() if not isinstance(value, dict)}
        return imported(elsewhere[chosen - 1].interview)(asker, {**plain, **values} if chosen == before else {})
    from accelerate.extensions.configure.cluster import ask_cluster

    return ask_cluster(asker, {} if before else values, None if before else content.get("distributed_type"))


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate config`, without its subcommands, or add it to `subparsers`."""
    parser = make_parser("config", description, subparsers, config_command, allow_abbrev=False)
    text = "The file to write; by default the one that `accelerate launch` looks for. If it exists, it gives the defaults."
    parser.add_argument("--config_file", help=text)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask for all settings and write them, as parsed by `config_command_parser`. Nothing is written before the last answer.

    Raises:
        LaunchError: the existing file cannot be read, or the file cannot be written, or the input ended too early.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    default = files.default_path()
    path = default if args.config_file is None else args.config_file
    config_utils.check_writable(path)
    before = files.inspect(pathlib.Path(path)) if os.path.exists(path) else None
    if before:
        print(f"{path} exists: its settings are the defaults, and it is replaced at the end.")
    try:
        config = _ask(before)
    except EOFError:
        print(file=sys.stderr)
        raise LaunchError("The input ended before the last question was answered; nothing was written.") from None
    config.save(path)
    shown = "" if os.path.abspath(path) == os.path.abspath(default) else f"--config_file {path} "
    print(f"Wrote {path}. `accelerate launch {shown}SCRIPT` runs with it.")


# -- show and validate -------------------------------------------------------------------------------------------------


class _OwnOptions(OneSpelling):
    """Skips the options of `accelerate launch`, which are also accepted."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in _OWN:
            super().add_argument(action)


def show_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config show`."""
    command = make_parser(
        "show",
        "Print the settings that `accelerate launch` would use, and where each comes from.",
        parser,
        show_command,
        parents=parents,
        usage="accelerate config show [--config_file FILE] [--all] [options of accelerate launch]",
        epilog="Command line over environment over configuration file over default. Every option of `accelerate launch` is "
        "accepted, so a command line can be tried before it is run; `accelerate launch --dry_run` shows the processes too.",
        formatter_class=_OwnOptions,
    )
    add_options(command)
    command.add_argument("--all", action="store_true", help="Settings with their defaults, too.")
    return command


def show_command(args: argparse.Namespace) -> None:
    """Run `accelerate config show`."""
    from accelerate.extensions.dry_run.text import settings_table  # not for --help
    from accelerate.launch import resolve

    values, file = resolve.merge(args, os.environ)
    # A launch would not use values that a higher layer rules out.
    values = {**values, **resolve.choose_paradigm(values)}
    print(f"configuration file: {file.path if file else f'none ({files.default_path()} does not exist)'}")
    print(settings_table(values, every=args.all))
    for note in file.unused if file else ():
        print(f"note: {note}")


def validate_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config validate`."""
    text = "Report all errors of a configuration file, with line numbers; the exit status is 2 if there are any."
    command = config_utils.add_command(parser, parents, "validate", text, validate_command)
    command.add_argument("file", nargs="?", help="The file; by default the one that `accelerate launch` reads.")
    command.add_argument("--config_file", help="Another way to name it.")
    return command


def validate_command(args: argparse.Namespace) -> None:
    """Run `accelerate config validate`: status 2 if something is wrong with the file."""
    if args.file is not None and args.config_file is not None:
        raise LaunchError("Name one file: either FILE or --config_file FILE.")
    path = config_utils.find_required(args.config_file if args.file is None else args.file)
    problems, notes = check(files.inspect(path))
    for problem in problems:
        place = f"{path}:{problem.line}" if problem.line else str(path)
        print(printable(f"{place}: {problem.text}"), file=sys.stderr)
    for note in notes:
        print(f"{path}: note: {note}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{path}: {count} found.", file=sys.stderr)
        raise SystemExit(2)
    print(f"{path}: no problem found.")


def main() -> None:
    """Hold the interview as a separate program; exit statuses are those of `accelerate.commands.config.main`."""
    or_exit("accelerate config", config_command, config_command_parser().parse_args())


if __name__ == "__main__":
    main()
