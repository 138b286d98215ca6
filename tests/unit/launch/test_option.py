"""Rows of the table as arguments: both spellings, and what was given."""

import argparse

import pytest

from accelerate.config.options import OPTIONS
from accelerate.launch.option import Parser, add_options, both_spellings


def test_both_spellings():
    assert both_spellings(["-a", "--b_c", "--d"]) == ("-a", "--b_c", "--b-c", "--d")


@pytest.mark.parametrize("flag", ["--num_processes", "--num-processes"])
def test_hyphens_and_underscores(parse, flag):
    assert parse(f"{flag} 2 train.py").num_processes == 2


def test_nondefault_holds_what_was_given(parse):
    args = parse("--cpu --dynamo_mode default train.py --num_processes 3")
    assert args.nondefault == {"cpu", "dynamo_mode", "training_script", "training_script_args"}
    assert args.training_script_args == ["--num_processes", "3"]
    assert args.num_processes is None


def test_defaults_are_those_of_the_table(parse):
    args = parse("train.py")
    assert {o.name: getattr(args, o.name) for o in OPTIONS if o.spellings} == {
        o.name: o.default for o in OPTIONS if o.spellings
    }


def test_switches_and_negation(parse):
    assert parse("--tpu_cluster train.py").tpu_use_cluster is True
    assert parse("--no-tpu-cluster train.py").tpu_use_cluster is False
    assert parse("train.py").tpu_use_cluster is False


def test_repeatable(parse):
    args = parse("--vm a --vm b train.py")
    assert args.vm == ["a", "b"]
    assert type(args.vm) is list
    assert parse("--vm c train.py").vm == ["c"]


def test_words_in_any_case(parse):
    assert parse("--mixed_precision BF16 train.py").mixed_precision == "bf16"


def test_unknown_choice_lists_the_choices(parse, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--mixed_precision fp17 train.py")
    assert "'no', 'fp16', 'bf16', 'fp8'" in capsys.readouterr().err


def test_bad_number(parse, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--num_processes two train.py")
    assert "num_processes is 'two'; it must be an integer" in capsys.readouterr().err


def test_subparser_records_too():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(parser_class=Parser)
    add_options(commands.add_parser("launch"))
    assert parser.parse_args(["launch", "--cpu"]).nondefault == {"cpu"}


def test_given_namespace_is_used():
    parser = Parser()
    parser.add_argument("--some_name", default="a")
    namespace = argparse.Namespace(other=1)
    assert parser.parse_args([], namespace) is namespace
    assert (namespace.other, namespace.some_name) == (1, "a")


def test_headings_spell_both_ways():
    parser = Parser()
    parser.add_argument_group("heading").add_argument("--some_name")
    assert parser.parse_args(["--some-name", "x"]).some_name == "x"
