"""What a shell is offered: commands, options, choices and files, without torch."""

import os
import subprocess
import sys

import pytest

from accelerate.commands import completion
from accelerate.commands.accelerate_cli import COMMANDS
from accelerate.commands.launch import launch_command_parser


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
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    streams = {"capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", program], cwd=place, env={**os.environ, **asked}, **streams)
    assert done.returncode == 0, done.stderr
    return answer.read_text().split("\v")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("accelerate la", ["launch "]),
        ("accelerate ", sorted(COMMANDS)),
        ("accelerate launch --mixed_precision ", ["no", "fp16", "bf16", "fp8"]),
        ("accelerate launch --fsdp_use_orig_params ", ["true", "false"]),
        ("accelerate launch --num_p", ["--num_processes "]),
        ("accelerate launch --cpu --num_processes 2 --num_m", ["--num_machines "]),
        ("accelerate launch --num-p", ["--num-processes "]),
        ("accelerate launch train.py --num_p", [""]),  # the script's own
        ("accelerate config sh", ["show "]),
        ("accelerate launch tr", ["train.py "]),
        ("accelerate launch sub/m", ["sub/more.py "]),
        ("accelerate launch train.py n", ["notes.txt "]),
        ("accelerate launch --config_file c", ["c.json", "c.yaml"]),
        ("accelerate env --conf", ["--config_file "]),
    ],
)
def test_in_a_shell(place, line, words):
    pytest.importorskip("argcomplete", reason="completion is optional: pip install argcomplete")
    (place / "sub").mkdir()
    for name in ("train.py", "c.yaml", "c.json", "notes.txt", "sub/more.py"):
        (place / name).touch()
    assert sorted(complete(line, place)) == sorted(words)
    if line.endswith("launch --num_p"):  # other console scripts complete, too
        assert complete("accelerate-launch --mixed_p", place, "accelerate.commands.launch") == ["--mixed_precision "]


def test_the_marker_for_shells_that_complete_everything():
    from accelerate.commands import accelerate_cli

    with open(accelerate_cli.__file__, encoding="utf-8") as file:
        assert "PYTHON_ARGCOMPLETE_OK" in file.read(1024)
