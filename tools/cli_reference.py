"""Write docs/reference/cli.md, the reference of the command line, from the parsers and the option table.

    python tools/cli_reference.py [--check] [--out FILE]

`--check` writes nothing and ends with status 1 if the file is not what would be written.
"""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

# The defaults of some arguments are paths that these decide.
for _name in ("HF_HOME", "XDG_CACHE_HOME"):
    os.environ.pop(_name, None)

from accelerate.commands.accelerate_cli import commands, parser_of  # noqa: E402
from accelerate.config.options import BY_NAME, FEATURES, OPTIONS, SWITCH_OF_DISTRIBUTED_TYPE, Option  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "cli.md"
RECORD = ROOT / "tests" / "architecture" / "record" / "cli-1.15.0.json"
TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "strs": "text, repeatable",
    "bools": "three of true or false",
    "json": "JSON mapping",
}
OURS = "**+**"

HEAD = """\
# Command line

<!-- Written by tools/cli_reference.py from the parsers and the option table: change those, then run it again. -->

This page lists every command and argument. **+** marks additions to upstream 1.15.0.

- Long options may be written with hyphens as well: `--num-processes` is `--num_processes`.
- An unknown option is an error that suggests the nearest one.
- Exit status: 0 success; 1 a failed run; 2 a request that cannot be run, with the reason on stderr; 130 an interrupt (Ctrl-C);
  141 a closed output. `accelerate launch` ends with the status of the process that failed first.
- `accelerate --version` prints the version.
"""

LAUNCH_HEAD = """\
[Configuration](../guides/config.md#which-setting-wins) says which setting wins. `accelerate launch --dry_run ...` prints every value with its
source, and starts nothing.

**Variable** is the environment variable that sets the option, and that the launcher sets for its processes. **Key** is its position in the
configuration file: `section.key`, or `key` at the top level. **Needs** is the option without which it has no effect.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the file is not up to date")
    parser.add_argument("--out", type=pathlib.Path, default=PAGE, help="the file; docs/reference/cli.md by default")
    options = parser.parse_args()
    text = page()
    if not options.check:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
        return 0
    if options.out.is_file() and options.out.read_text("utf-8") == text:
        return 0
    print(f"{options.out} is not up to date; run `python tools/cli_reference.py`.", file=sys.stderr)
    return 1


def page() -> str:
    """Return the whole page."""
    recorded = json.loads(RECORD.read_text("utf-8"))["commands"]
    lines = [HEAD]
    lines += [f"| command | |\n|---|---|\n{''.join(_overview(recorded))}"]
    for name in commands():
        lines += _command(name, recorded.get(name))
    return "\n".join(lines).rstrip() + "\n"


def _overview(recorded: dict[str, Any]) -> Iterator[str]:
    for name, command in commands().items():
        ours = "" if name in recorded else f" {OURS}"
        yield f"| [`accelerate {name}`](#accelerate-{name}){ours} | {command.help} |\n"


def _command(name: str, recorded: dict[str, Any] | None) -> Iterator[str]:
    yield from _section(f"accelerate {name}", parser_of(name), recorded, "##")


def _section(
    title: str, parser: Any, recorded: dict[str, Any] | None, level: str, in_ours: bool = False
) -> Iterator[str]:
    """Yield the section of a command and of its subcommands; below one that is ours in full, nothing is marked again."""
    ours = "" if in_ours or recorded is not None else f"\n{OURS}\n"
    yield f"{level} {title}\n{ours}\n{_plain(parser.description)}\n"
    if title == "accelerate launch":
        yield "```text\naccelerate launch [options of the launcher] training_script [arguments of the script]\n```\n"
        yield LAUNCH_HEAD
        yield from _launch_groups(recorded or {})
        return
    known = {flag for argument in (recorded or {}).get("arguments", []) for flag in argument["options"]}
    own, shared = _arguments(parser)
    if shared:
        yield "It takes every option of [`accelerate launch`](#accelerate-launch).\n"
    rows = [_argument(parser, action, None if recorded is None else known) for action in own]
    if rows:
        yield _table(["argument", "value", "default", ""], rows)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, inner in action.choices.items():
                record = (recorded or {}).get("subcommands", {}).get(sub)
                yield from _section(f"{title} {sub}", inner, record, level + "#", in_ours or recorded is None)


def _arguments(parser: Any) -> tuple[list[argparse.Action], bool]:
    """Return the arguments of a command, and whether it takes all those of a launch next to them."""
    skipped = (argparse._HelpAction, argparse._SubParsersAction)
    actions = [action for action in parser._actions if not isinstance(action, skipped)]
    rows = {flag for option in OPTIONS for flag in (*option.spellings, option.negation) if flag}
    if rows <= set(parser._option_string_actions):
        return [action for action in actions if not set(action.option_strings) & rows], True
    return actions, False


def _argument(parser: Any, action: argparse.Action, known: set[str] | None) -> list[str]:
    flags = [flag for flag in action.option_strings if "-" not in flag[2:]] or [action.metavar or action.dest]
    ours = known is not None and action.option_strings and not set(action.option_strings) & known
    if action.nargs == 0:
        value = "switch"
    elif action.choices is not None:
        value = _choices(action.choices)
    else:
        value = {int: "integer", float: "number"}.get(action.type, "text")
    value += ", several" if action.nargs in ("+", "*") else ""
    value += ", required" if action.required and action.option_strings else ""
    default = "" if action.nargs == 0 and not action.default else _default(action.default)
    help_text = _plain(parser._get_formatter()._expand_help(action)) if action.help else ""
    return [", ".join(f"`{flag}`" for flag in flags) + (f" {OURS}" if ours else ""), value, default, help_text]


def _launch_groups(recorded: dict[str, Any]) -> Iterator[str]:
    known = {flag for argument in recorded["arguments"] for flag in argument["options"]}
    groups = dict.fromkeys(option.group for option in OPTIONS if option.spellings)
    for group in groups:
        yield f"### {group}\n"
        rows = [_option(option, known) for option in OPTIONS if option.group == group and option.spellings]
        headings = ["option", "value", "default", "variable", "key", "needs", ""]
        needs = headings.index("needs")
        shared = rows[0][needs]
        if shared and all(row[needs] == shared for row in rows):
            yield f"They need {shared}.\n"
            rows = [[*row[:needs], "", *row[needs + 1 :]] for row in rows]
        filled = [column for column in range(len(headings)) if any(row[column] for row in rows)]
        yield _table([headings[column] for column in filled], [[row[column] for column in filled] for row in rows])
    yield "### Only in a configuration file\n"
    rows = [
        [f"`{_key(option)}`", _value(option), _needs(option), _plain(option.help)]
        for option in OPTIONS
        if not option.spellings
    ]
    rows.insert(0, ["`distributed_type`", _choices(SWITCH_OF_DISTRIBUTED_TYPE), "", _distributed_types()])
    yield _table(["key", "value", "needs", ""], rows)


def _distributed_types() -> str:
    switches = {switch: [] for switch in SWITCH_OF_DISTRIBUTED_TYPE.values() if switch}
    for name, switch in SWITCH_OF_DISTRIBUTED_TYPE.items():
        if switch:
            switches[switch].append(name)
    parts = (f"{_choices(names)} for `--{switch}`" for switch, names in switches.items())
    return f"Stands for an option: {'; '.join(parts)}."


def _option(option: Option, known: set[str]) -> list[str]:
    flags = [flag for flag in option.spellings if "-" not in flag[2:]]
    flags += [option.negation] if option.negation else []
    names = ", ".join(f"`{flag}`" for flag in flags)
    variables = ", ".join(f"`{name}`" for name in (option.env, *option.env_names) if name)
    key = f"`{_key(option)}`" if option.file_key else ""
    ours = "" if set(flags) & known else f" {OURS}"
    default = "" if option.switch and not option.default else _default(option.default)
    return [names + ours, _value(option), default, variables, key, _needs(option), _plain(option.help)]


def _value(option: Option) -> str:
    if option.switch:
        return "switch"
    if option.choices is not None:
        return _choices([choice for choice in option.choices if choice not in option.corrections])
    if option.words and not option.allow_other:
        return _choices(option.words)
    return TYPES[option.type]


def _key(option: Option) -> str:
    return f"{option.section}.{option.file_key}" if option.section else str(option.file_key)


def _needs(option: Option) -> str:
    needs = []
    feature = FEATURES.get(option.feature or "")
    if feature is not None and feature.switch != option.name:
        if BY_NAME[feature.switch].spellings:
            needs.append(f"`{feature.request}`")
        else:
            needs.append(f"`{feature.switch}: {feature.wanted}`")
    if option.exported_if_several is not None:
        needs.append(f"`--{option.exported_if_several}` above 1")
    return ", ".join(needs)


def _choices(choices: Sequence[Any]) -> str:
    return ", ".join(f"`{choice}`" for choice in choices)


def _default(value: Any) -> str:
    if value is None or value == "" or value is argparse.SUPPRESS:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(_default(item) for item in value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text.replace(os.path.expanduser('~'), '~').replace(os.sep, '/')}`"


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


if __name__ == "__main__":
    sys.exit(main())
