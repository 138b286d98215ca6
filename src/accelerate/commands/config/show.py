"""`accelerate config show`: the settings that a launch would use, and where each comes from."""

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from accelerate.commands.utils import OneSpelling, make_parser
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
    from accelerate.launch.config_file import default_path

    merged = resolve.merge(args, os.environ)
    values = dict(merged.values)
    resolve.choose_paradigm(values)  # what a higher layer rules out is not what a launch would use
    rows = [row for row in _rows(values, merged.file) if args.all or row["source"] != "default"]
    path = str(merged.file.path) if merged.file else None
    if args.json:
        print(json.dumps({"config_file": path, "settings": rows, "notes": list(merged.notes)}, indent=2, default=str))
        return
    print(f"configuration file: {path or f'none ({default_path()} does not exist)'}")
    if rows:
        cells = []
        for row in rows:
            effect = f"({row['effect']})" if row["effect"] else ""
            cells.append((row["name"], _plain(row["value"]), row["where"] or row["source"], effect))
        print(table(["setting", "value", "from", ""], cells))
    else:
        print("Nothing is set: every setting has its default. `--all` lists them.")
    for note in merged.notes:
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
                "section": option.section or option.group,
            }
        )
    return rows


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_plain, value)) if isinstance(value, (list, tuple)) else str(value)
