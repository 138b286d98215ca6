"""Rows of the table as arguments: both spellings, what was given, and answers to what is unknown."""

import argparse

import pytest

from accelerate.config.options import OPTIONS
from accelerate.launch.option import Parser, add_options


def test_nondefault_holds_what_was_given(parse):
    args = parse("--cpu --dynamo_mode default train.py --num_processes 3 --use_fsdb")
    assert args.nondefault == {"cpu", "dynamo_mode", "training_script", "training_script_args"}
    assert args.training_script_args == ["--num_processes", "3", "--use_fsdb"], "options of the script are its own"
    assert args.num_processes is None


def test_defaults_are_those_of_the_table(parse):
    args, options = parse("train.py"), [option for option in OPTIONS if option.spellings]
    assert [getattr(args, option.name) for option in options] == [option.default for option in options]
    assert not args.nondefault.intersection(option.name for option in options)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--tpu_cluster", "tpu_use_cluster", True),
        ("--no-tpu-cluster", "tpu_use_cluster", False),
        ("--vm a --vm b", "vm", ["a", "b"]),
        ("--vm c", "vm", ["c"]),
        ("--mixed_precision BF16", "mixed_precision", "bf16"),
        ("--num-processes 2", "num_processes", 2),
    ],
)
def test_values(parse, line, name, value):
    args = parse(f"{line} train.py")
    assert (getattr(args, name), type(getattr(args, name))) == (value, type(value)) and name in args.nondefault


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--mixed_precision fp17", "invalid choice: 'fp17' (choose from 'no', 'fp16', 'bf16', 'fp8')"),
        ("--fsdp_version 7", "(choose from '1', '2')\n"),
        ("--num_processes two", "num_processes is 'two'; it must be an integer"),
        ("--gradient_clipping auto", "gradient_clipping is 'auto'; leave the option out"),
        ("--num_proceses 2", "error: --num_proceses is unknown; did you mean --num_processes?"),
        ("--num-proceses=2", "error: --num-proceses is unknown; did you mean --num_processes?"),
        ("--qqq", "error: --qqq is unknown; `accelerate launch --help` lists the options."),
        ("--qqq --gpu_id 0", "error: --qqq is unknown; `accelerate launch --help` lists the options. --gpu_id is"),
    ],
)
def test_what_is_not_understood(parse, capsys, line, answer):
    with pytest.raises(SystemExit, match="2"):
        parse(f"{line} train.py")
    assert answer in capsys.readouterr().err


def test_parsers_of_programs():
    parser = argparse.ArgumentParser()
    add_options(parser.add_subparsers(parser_class=Parser).add_parser("launch"))
    assert parser.parse_args(["launch", "--cpu"]).nondefault == {"cpu"}
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--some_name", default="3", type=int)
    parser.add_argument_group("heading").add_argument("--other_name")
    namespace = argparse.Namespace(other=1)
    assert parser.parse_args([], namespace) is namespace and (namespace.other, namespace.some_name) == (1, 3)
    args, rest = parser.parse_known_args(["--other-name", "x", "--some_nam", "--y"])
    assert (args.other_name, args.some_name, args.nondefault) == ("x", 3, {"other_name"})
    assert rest == ["--some_nam", "--y"]
