"""Rows of the table as arguments: both spellings, and what was given."""

import argparse

import pytest

from accelerate.config.options import OPTIONS
from accelerate.launch.option import Parser, add_options, both_spellings, strayed


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
    err = capsys.readouterr().err
    assert "argument --mixed_precision: invalid choice: 'fp17'" in err
    assert "'no', 'fp16', 'bf16', 'fp8'" in err


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


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--num_proceses 2 train.py", "--num_proceses is unknown; did you mean --num_processes?"),
        ("--num-proceses=2 train.py", "--num-proceses is unknown; did you mean --num_processes?"),
        ("--NUM_PROCESSES 2 train.py", "--NUM_PROCESSES is unknown; did you mean --num_processes?"),
        ("--gpu 0 train.py", "--gpu is unknown; did you mean --gpu_ids?"),
        ("--nproc_per_node 2 train.py", "--nproc_per_node is unknown; here it is --num_processes"),
        ("--master-port 1 train.py", "--master-port is unknown; here it is --main_process_port."),
        ("--bf16 train.py", "--bf16 is unknown; here it is --mixed_precision bf16."),
        ("--qqq train.py", "--qqq is unknown; `accelerate launch --help` lists the options."),
        ("-z train.py", "-z is unknown; `accelerate launch --help` lists the options."),
        ("--qqq --gpu_id 0 train.py", "--qqq is unknown; `accelerate launch --help` lists the options. --gpu_id is"),
        ("--use_fsdb", "--use_fsdb is unknown; did you mean --use_fsdp? Besides, the following arguments are"),
        ("--num_m 1 train.py", "--num_m is unknown; did you mean --num_machines?"),
    ],
)
def test_unknown_options(parse, capsys, line, answer):
    with pytest.raises(SystemExit, match="2"):
        parse(line)
    assert f"accelerate launch: error: {answer}" in capsys.readouterr().err


def test_options_of_the_script_are_its_own(parse):
    line = "--num_proceses 2 --use_fsdb"
    assert parse(f"train.py {line}").training_script_args == line.split()


def test_unknown_options_can_still_be_kept():
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--some_name")
    assert parser.parse_known_args(["--some_nam", "--other"])[1] == ["--some_nam", "--other"]


def test_option_behind_the_script(place):
    (place / "train.py").write_text("print('no options')")
    notes = strayed("train.py", ["--num_processes", "2", "--use-fsdp", "--lr=1"])
    assert [note.partition(" ")[0] for note in notes] == ["--num_processes", "--use-fsdp"]
    assert "train.py receives it" in notes[0]


@pytest.mark.parametrize(
    ("text", "words", "given"),
    [
        ("parser.add_argument('--num_processes')", ["--num_processes", "2"], ()),
        ("parser.add_argument('--num-processes')", ["--num_processes=2"], ()),
        ("", ["--num_processes", "2"], ("num_processes",)),
        ("", ["--mixed_precision", "bf16", "--config_file", "c.yaml", "--cpu", "--debug"], ()),
        ("", ["num_processes", "2"], ()),
        ("", [], ()),
    ],
    ids=["mentioned", "mentioned with hyphens", "given before too", "scripts have these", "no option", "nothing"],
)
def test_what_a_script_may_want_is_not_remarked(place, text, words, given):
    (place / "train.py").write_text(text)
    assert strayed("train.py", words, given) == []


def test_of_modules_nothing_is_known(place):
    assert strayed("package.train", ["--num_processes", "2"]) == []
    (place / "big.py").write_bytes(b" " * (1 << 20) + b" ")
    assert strayed("big.py", ["--num_processes", "2"]) == []


def test_auto_cannot_undo_a_lower_layer(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--gradient_clipping auto train.py")
    assert "gradient_clipping is 'auto'; leave the option out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "end"),
    [("--mixed_precision pf16", "'fp8'); did you mean fp16?\n"), ("--fsdp_version 7", "(choose from '1', '2')\n")],
)
def test_the_nearest_choice_is_named(parse, capsys, line, end):
    with pytest.raises(SystemExit):
        parse(f"{line} train.py")
    assert capsys.readouterr().err.endswith(end)
