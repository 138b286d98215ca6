"""The console script and its parsers, against the record."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

from accelerate.commands.accelerate_cli import COMMANDS

RECORD = Path(__file__).parents[2] / "architecture" / "record" / "cli-1.15.0.json"
RECORDED = json.loads(RECORD.read_text("utf-8"))["commands"]


def parser_of(name):
    command = COMMANDS[name]
    return getattr(importlib.import_module(f"accelerate.commands.{command.module}"), command.parser)()


def arguments():
    for name, content in RECORDED.items():
        for argument in content["arguments"]:
            yield pytest.param(name, None, argument, id=f"{name} {(argument['options'] or [argument['dest']])[0]}")
        for sub, inner in content.get("subcommands", {}).items():
            for argument in inner["arguments"]:
                yield pytest.param(name, sub, argument, id=f"{name} {sub} {argument['options'][0]}")


@pytest.mark.parametrize(("name", "sub", "recorded"), list(arguments()))
def test_recorded_argument(name, sub, recorded):
    parser = parser_of(name)
    if sub is not None:
        parser = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[sub]
    actions = [a for a in parser._actions if a.dest == recorded["dest"]]
    assert actions
    for option in recorded["options"]:
        action = next(a for a in parser._actions if option in a.option_strings)
        assert action.dest == recorded["dest"]
        assert action.nargs == recorded["nargs"]
        assert action.required == recorded["required"]
        assert set(recorded["choices"] or ()) <= set(action.choices or ())
    # The record holds the default of the negation, and a path of the machine it was made on.
    if recorded["options"] and recorded["options"] != ["--no_tpu_cluster", "--no-tpu-cluster"] and sub != "default":
        # A truth value that the record holds as text is one here.
        assert repr(actions[0].default) in (recorded["default"], recorded["default"].strip("'").title())


def test_every_recorded_command():
    assert set(RECORDED) <= set(COMMANDS)
    assert set(COMMANDS) - set(RECORDED) == {"checkpoint"}  # what only we have


@pytest.mark.parametrize("name", COMMANDS)
def test_parsers_join_another_parser(name):
    command = COMMANDS[name]
    make = getattr(importlib.import_module(f"accelerate.commands.{command.module}"), command.parser)
    parser = argparse.ArgumentParser()
    assert make(parser.add_subparsers()) is not None
    assert name in parser.format_help()


def test_without_a_command(accelerate):
    status, out, _ = accelerate()
    assert status == 1
    assert all(name in out for name in COMMANDS)


def test_help(accelerate):
    status, out, _ = accelerate("--help")
    assert status == 0
    assert "Start a training script" in out


def test_unknown_command(accelerate):
    status, _, err = accelerate("lunch")
    assert status == 2
    assert "'lunch'" in err
    assert "launch" in err


def test_help_of_a_command(accelerate):
    status, out, _ = accelerate("launch", "--help")
    assert status == 0
    assert "--num_processes" in out
    assert "--num-processes" not in out
