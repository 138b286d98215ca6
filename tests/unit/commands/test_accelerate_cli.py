"""The console script: commands, help, and answers to requests that cannot be run."""

import argparse
import sys

import pytest

from accelerate import __version__
from accelerate.commands import accelerate_cli
from accelerate.commands.accelerate_cli import commands, parser_of
from accelerate.extension import Command, Spec
from cases import cases


def parsers_of(name):
    """Yield the parser of a command and those of its subcommands, each with the words that lead to it."""
    pending = [([name], parser_of(name))]
    while pending:
        words, parser = pending.pop()
        yield words, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending += [([*words, sub], inner) for sub, inner in action.choices.items()]


@pytest.mark.parametrize("name", commands())
def test_parser_of_every_command(accelerate, name):
    for words, parser in parsers_of(name):
        assert parser.description, words
        for action in parser._actions:
            explained = action.help and action.help.rstrip().endswith((".", "exit"))
            assert explained or isinstance(action, argparse._SubParsersAction), (words, action.dest, action.help)
        status, out, err = accelerate(*words, "--help")  # a stray % would fail here
        assert (status, err) == (0, "")
        assert out.startswith(f"usage: accelerate {' '.join(words)}") and (name != "config" or "<command>" not in out)
    other = argparse.ArgumentParser()
    assert parser_of(name, other.add_subparsers()) is not None
    assert name in other.format_help()


def test_help(accelerate):
    status, out, _ = accelerate()
    assert status == 1 and all(name in out for name in commands())
    assert accelerate("--help") == (0, out, "") and "Start a training script" in out
    out = accelerate("launch", "--help")[1]
    assert "--num_processes" in out and "--num-processes" not in out
    for flag in ("--version", "-V"):
        assert accelerate(flag) == (0, f"accelerate {__version__}\n", "")


@cases(
    "word, answer",
    ("lunch", "'lunch' is no command; did you mean launch?"),
    ("train.py", "'train.py' is no command; did you mean `accelerate launch train.py`?"),
    ("xyz", "'xyz' is no command; choose one of checkpoint, config, diagnose, env,"),
)
def test_unknown_command(accelerate, word, answer):
    status, out, err = accelerate(word)
    assert (status, out) == (2, "") and err.startswith("usage: accelerate <command> [<args>]\n")
    assert f"accelerate: error: {answer}" in err


@cases(
    "words, problem",
    ("env more", "more is not expected here."),
    ("config default --config_fill=x", "--config_fill is unknown; did you mean --config_file?"),
    ("launch", "the following arguments are required: training_script\n"),
    ("launch --config_file", "expected one argument"),
    ("launch none.py", "There is no script 'none.py'"),
    ("launch --config_file none.yaml none.py", "none.yaml"),
    ("config shwo", "shwo"),
    ("checkpoint ls --folder x", "--folder is unknown"),
)
def test_usage_errors_have_no_traceback(accelerate, words, problem):
    status, _, err = accelerate(*words.split())
    assert status == 2 and problem in err and "Traceback" not in err


def test_command_of_an_extension(accelerate, monkeypatch, place):
    (place / "greet.py").write_text(
        "import argparse\n"
        "def parser(subparsers=None):\n"
        "    made = argparse.ArgumentParser('accelerate greet')\n"
        "    made.set_defaults(func=lambda args: print('hello'))\n"
        "    return made\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(str(place))
    row = Command("greet", "parser", "Greet.")
    monkeypatch.setattr(accelerate_cli, "all_specs", lambda: (Spec("greeting", commands={"greet": row}),))
    accelerate_cli.commands.cache_clear()
    try:
        assert "greet" in accelerate("--help")[1] and "greet" not in sys.modules
        assert accelerate("greet") == (0, "hello\n", "")
    finally:
        accelerate_cli.commands.cache_clear()
