"""What a shell is offered: commands, options, choices and files, without torch."""

import argparse
import os
import subprocess
import sys

import pytest

from accelerate.commands import completion
from accelerate.commands.accelerate_cli import COMMANDS
from accelerate.commands.launch import launch_command_parser

BREAKS = " \t\n\"'><=;|&(:"


@pytest.fixture
def typed(monkeypatch):
    def set_line(line):
        monkeypatch.setenv("COMP_LINE", line)

    return set_line


def values(parser, dest, prefix=""):
    completion.describe_values(parser)
    action = next(action for action in parser._actions if action.dest == dest)
    return list(action.completer(prefix=prefix))


def test_files_by_what_they_are_for(place):
    for name in ("train.py", "c.yaml", "c.json", "notes.txt", ".hidden.py"):
        (place / name).touch()
    (place / "sub").mkdir()
    (place / "sub" / "more.py").touch()
    parser = launch_command_parser()
    assert values(parser, "training_script") == ["sub/", "train.py"]
    assert values(parser, "training_script", "sub/m") == ["sub/more.py"]
    assert values(parser, "training_script", "tr") == ["train.py"]
    assert values(parser, "training_script", ".h") == [".hidden.py"]
    assert values(parser, "training_script", f"{place}/t") == [f"{place}/train.py"]
    assert values(parser, "training_script", "nowhere/") == []
    assert values(parser, "config_file") == ["c.json", "c.yaml", "sub/"]
    assert values(parser, "log_dir") == ["sub/"]
    assert values(parser, "training_script_args", "n") == ["notes.txt"]


def test_home_is_found(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    (place / "train.py").touch()
    assert values(launch_command_parser(), "training_script", "~/t") == ["~/train.py"]


def test_words():
    parser = launch_command_parser()
    assert values(parser, "fsdp_sharding_strategy")[0] == "FULL_SHARD"
    assert values(parser, "fsdp_use_orig_params") == ["true", "false"]
    assert values(parser, "num_processes") == []
    assert not hasattr(next(a for a in parser._actions if a.dest == "mixed_precision"), "completer")  # its choices


def test_only_the_command_on_the_line_is_loaded(typed):
    typed("accelerate launch --num")
    commands = next(
        a for a in completion.parser_of_all(COMMANDS)._actions if isinstance(a, argparse._SubParsersAction)
    )
    assert set(commands.choices) == set(COMMANDS)
    assert {name for name, parser in commands.choices.items() if len(parser._actions) > 1} == {"launch"}


@pytest.mark.parametrize(
    ("words", "word", "offered", "hidden"),
    [
        ([], "--n", "--num_processes", "--num-processes"),
        ([], "--num-p", "--num-processes", "--num_processes"),
        (["--cpu", "--num_processes", "2"], "--n", "--num_processes", "--num-processes"),
        (["--num_processes=2"], "--n", "--num_machines", "--num-machines"),
        (["train.py"], "--n", None, "--num_processes"),
        (["--num_processes", "2", "train.py", "x"], "--n", None, "--num_processes"),
    ],
)
def test_which_options_are_offered(words, word, offered, hidden):
    unwanted = set(completion._unwanted(launch_command_parser(), words, word))
    assert hidden in unwanted
    assert offered not in unwanted


def test_without_argcomplete_nothing_is_said(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    with pytest.raises(SystemExit):
        completion.answer(launch_command_parser())
    assert capsys.readouterr() == ("", "")


def complete(line, place, module="accelerate.commands.accelerate_cli"):
    """Ask as bash asks; return the words, and fail where torch was loaded."""
    answer = place / "answer"
    program = (
        f"import sys, {module} as program\nsys.argv = ['accelerate']\n"
        "def end(status):\n    assert 'torch' not in sys.modules\n    sys.exit(status)\n"
        "import argcomplete\nplain = argcomplete.autocomplete\n"
        "argcomplete.autocomplete = lambda *args, **kw: plain(*args, exit_method=end, **kw)\n"
        "program.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=place,
        env={
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "_ARGCOMPLETE_COMP_WORDBREAKS": BREAKS,
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return answer.read_text().split("\v")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("accelerate la", ["launch "]),
        ("accelerate ", sorted(COMMANDS)),
        ("accelerate launch --mixed_precision ", ["no", "fp16", "bf16", "fp8"]),
        ("accelerate launch --num_p", ["--num_processes "]),
        ("accelerate launch --num-p", ["--num-processes "]),
        ("accelerate launch --cpu ", ["sub/", "train.py"]),
        ("accelerate launch train.py --num_p", [""]),
        ("accelerate launch --config_file ", ["c.yaml", "sub/"]),
        ("accelerate config default --mixed_p", ["--mixed_precision "]),
        ("accelerate env --conf", ["--config_file "]),
    ],
)
def test_in_a_shell(place, line, words):
    pytest.importorskip("argcomplete", reason="completion is optional: pip install argcomplete")
    (place / "sub").mkdir()
    (place / "train.py").touch()
    (place / "c.yaml").touch()
    assert sorted(complete(line, place)) == sorted(words)


def test_other_console_scripts_complete_too(place):
    pytest.importorskip("argcomplete", reason="completion is optional: pip install argcomplete")
    assert complete("accelerate-launch --mixed_p", place, "accelerate.commands.launch") == ["--mixed_precision "]


def test_argcomplete_is_not_loaded_otherwise():
    program = (
        "import sys\nfrom accelerate.commands.launch import launch_command_parser\n"
        "launch_command_parser().parse_args(['train.py'])\n"
        "assert not {'argcomplete', 'accelerate.commands.completion'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_marker_for_shells_that_complete_everything():
    from accelerate.commands import accelerate_cli

    with open(accelerate_cli.__file__, encoding="utf-8") as file:
        assert "PYTHON_ARGCOMPLETE_OK" in file.read(1024)
