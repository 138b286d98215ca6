"""`accelerate config show`: the settings of a launch and their sources; `validate`: what is wrong with a file."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from accelerate.commands.config.config_utils import add_command
from accelerate.commands.config.interview import as_text
from accelerate.commands.utils import OneSpelling, make_parser
from accelerate.launch import config_file as files
from accelerate.launch.errors import LaunchError
from accelerate.launch.option import add_options
from accelerate.launch.secrets import masked

# What only the parser of `accelerate launch` needs to explain.
_OWN = ("help", "config_file", "all", "json")


class _OwnOptions(OneSpelling):
    """Leaves out the options of `accelerate launch`, which are accepted too."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in _OWN:
            super().add_argument(action)


def show_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config show`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    command = make_parser(
        "show",
        "Print the settings that `accelerate launch` would use, and where each comes from.",
        parser,
        show_command,
        parents=parents,
        usage="accelerate config show [--config_file FILE] [--all] [--json] [options of accelerate launch]",
        epilog="Command line over environment over configuration file over default. Every option of `accelerate launch` is "
        "accepted, so a command line can be tried before it is run; `accelerate launch --dry_run` shows the processes too.",
        formatter_class=_OwnOptions,
    )
    add_options(command)
    command.add_argument("--all", action="store_true", help="Settings that have their defaults, too.")
    command.add_argument("--json", action="store_true", help="As JSON, for programs.")
    return command


def show_command(args: argparse.Namespace) -> None:
    """Run `accelerate config show`.

    Args:
        args: what `show_command_parser` parsed.

    Raises:
        LaunchError: a layer holds something that is no value of its option, or two options exclude each other.
        FileNotFoundError: the configuration file does not exist.
    """
    from accelerate.diagnostics.table import table  # not for --help
    from accelerate.launch import resolve

    values, file = resolve.merge(args, os.environ)
    notes = list(file.unused) if file else []
    resolve.choose_paradigm(values)  # what a higher layer rules out is not what a launch would use
    rows = [row for row in _rows(values, file) if args.all or row["source"] != "default"]
    path = str(file.path) if file else None
    if args.json:
        print(json.dumps({"config_file": path, "settings": rows, "notes": notes}, indent=2, default=str))
        return
    print(f"configuration file: {path or f'none ({files.default_path()} does not exist)'}")
    if not rows:
        print("Nothing is set: every setting has its default. `--all` lists them.")
    else:
        cells = []
        for row in rows:
            value = "-" if row["value"] is None else as_text(row["value"])
            cells.append(
                (row["name"], value, row["where"] or row["source"], f"({row['effect']})" if row["effect"] else "")
            )
        print(table(["setting", "value", "from", ""], cells))
    for note in notes:
        print(f"note: {note}")


def _rows(values: Mapping[str, Any], file: Any) -> list[dict[str, Any]]:
    from accelerate.config.options import BY_NAME, FEATURES
    from accelerate.launch.plan import Source

    rows = []
    for name, resolved in values.items():
        option = BY_NAME[name]
        feature = FEATURES.get(option.feature or "")
        off = feature is not None and not feature.is_on(values[feature.switch].value)
        line = file.lines.get(name) if file and resolved.source is Source.FILE else None
        rows.append(
            {
                "name": name,
                "value": masked(resolved.value, name),
                "source": resolved.source.name.lower().replace("_", " "),
                "where": f"{file.path}:{line}" if line else resolved.detail,
                "effect": f"none without {feature.request}" if off else "",
            }
        )
    return rows


def validate_command_parser(parser: Any, parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config validate`.

    Args:
        parser: what `ArgumentParser.add_subparsers` returned.
        parents: parsers whose arguments it shares.
    """
    text = "Say everything that is wrong with a configuration file, with line numbers; the exit status is 2 if anything is."
    command = add_command(parser, parents, "validate", text, validate_command)
    command.add_argument("file", nargs="?", help="The file; by default the one that `accelerate launch` reads.")
    command.add_argument("--config_file", help="Another way to name it.")
    return command


def validate_command(args: argparse.Namespace) -> None:
    """Run `accelerate config validate`.

    Args:
        args: what `validate_command_parser` parsed.

    Raises:
        LaunchError: the file cannot be read at all, or two were named.
        FileNotFoundError: there is no such file.
        SystemExit: with status 2 if something is wrong with it.
    """
    from accelerate.commands.config import rules  # not for --help

    if args.file is not None and args.config_file is not None:
        raise LaunchError("Name one file: either FILE or --config_file FILE.")
    path = files.find_required(args.config_file if args.file is None else args.file)
    problems, notes = rules.check(files.inspect(path))
    for problem in problems:
        place = f"{path}:{problem.line}" if problem.line else str(path)
        print(f"{place}: {problem.text}", file=sys.stderr)
    for note in notes:
        print(f"{path}: note: {note}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"{path}: {count} found.", file=sys.stderr)
        raise SystemExit(2)
    print(f"{path}: no problem found.")
