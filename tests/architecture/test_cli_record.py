"""The command line against the record of 1.15.0: every flag, where it is listed, and a reference that is up to date."""

import argparse
import json
import pathlib
import subprocess
import sys

import pytest

from accelerate.commands import accelerate_cli
from accelerate.commands.launch import launch_command_parser
from architecture import source

RECORD = pathlib.Path(__file__).with_name("record") / "cli-1.15.0.json"
RECORDED = json.loads(RECORD.read_text("utf-8"))["commands"]
# The headings of `accelerate launch --help` as 1.15.0 prints them, with the arguments below each.
GROUPS = json.loads(RECORD.with_name("launch-help-1.15.0.json").read_text("utf-8"))


def parser_of(name, sub=None):
    parser = accelerate_cli.parser_of(name)
    if sub is None:
        return parser
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[sub]


def test_groups_of_launch():
    ours = {}
    for group in launch_command_parser()._action_groups:
        for action in group._group_actions:
            ours.setdefault(action.dest, group.title)
    recorded = {dest: title for title, dests in GROUPS.items() for dest in dests}
    assert {dest: ours.get(dest) for dest in recorded} == recorded
    assert len(recorded) >= 120
    assert {argument["dest"] for argument in RECORDED["launch"]["arguments"] if argument["options"]} == set(recorded)


def recorded_commands():
    for name, content in RECORDED.items():
        yield name, None, content["arguments"]
        for sub, inner in content.get("subcommands", {}).items():
            yield name, sub, inner["arguments"]


@pytest.mark.parametrize(("name", "sub", "arguments"), list(recorded_commands()))
def test_recorded_arguments(name, sub, arguments):
    parser = parser_of(name, sub)
    for recorded in arguments:
        what = recorded["options"] or recorded["dest"]
        actions = [action for action in parser._actions if action.dest == recorded["dest"]]
        action = next((a for a in actions if set(recorded["options"]) <= set(a.option_strings)), None)
        assert action is not None, what
        # A constant that is no is how a flag says no.
        kind = {"StoreConstAction": "StoreFalseAction"}.get(recorded["action"], recorded["action"])
        assert type(action).__name__ == f"_{kind}", what
        assert (action.nargs, action.required) == (recorded["nargs"], recorded["required"]), what
        # Further choices are allowed; where there were none, everything is still taken.
        assert set(recorded["choices"] or ()) <= set(action.choices or ()), what
        assert recorded["choices"] or not action.choices, what
        # The record holds the default of the negation, and a path of the machine it was made on.
        if (
            recorded["options"]
            and recorded["options"] != ["--no_tpu_cluster", "--no-tpu-cluster"]
            and sub != "default"
        ):
            # A truth value that the record holds as text is one here.
            default = recorded["default"]
            assert repr(actions[0].default) in (default, default.strip("'").title()), what
        if recorded["type"] in ("int", "float"):
            assert action.type("7") == 7, what
            with pytest.raises((ValueError, argparse.ArgumentTypeError)):
                action.type("many")


def test_every_recorded_command():
    names = set(accelerate_cli.commands())
    assert set(RECORDED) <= names
    assert names - set(RECORDED) == {"checkpoint", "diagnose", "plan", "stacks"}  # what only we have


def test_reference_is_up_to_date():
    """`python tools/cli_reference.py` writes docs/reference/cli.md; run it after a change of the command line."""
    tool = source.ROOT / "tools" / "cli_reference.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_stale_reference_is_noticed(tmp_path):
    tool = source.ROOT / "tools" / "cli_reference.py"
    page = tmp_path / "new" / "cli.md"
    command = [sys.executable, str(tool), "--out", str(page)]
    assert subprocess.run([*command, "--check"], capture_output=True, timeout=120).returncode == 1
    assert subprocess.run(command, timeout=120).returncode == 0
    page.write_text(page.read_text("utf-8").replace("--num_processes", "--processes"), "utf-8")
    assert subprocess.run([*command, "--check"], capture_output=True, timeout=120).returncode == 1
