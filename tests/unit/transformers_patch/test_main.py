"""The commands of `python -m transformers_patch`."""

import json
import sys

import pytest
import transformers

import transformers_patch
from accelerate.state import AcceleratorState
from transformers_patch import __main__ as program
from transformers_patch.registry import Finding

SCRIPT = """
import json, sys
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

accelerator = Accelerator(cpu=True)
TrainingArguments("out", use_cpu=True, report_to=[])
kept = bool(AcceleratorState._shared_state)
print(json.dumps([__name__, sys.argv[1:], kept, __file__ if "__file__" in globals() else None]))
import neighbour
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("print('neighbour')\n", "utf-8")
    path = tmp_path / "scripts" / "task.py"
    path.write_text(SCRIPT, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["transformers_patch"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    yield path
    sys.modules.pop("neighbour", None)


def test_run_applies_the_patch_to_a_script_as_it_is(script, capsys):
    assert program.main(["run", str(script), "--epochs", "2", "--strategy", "mine"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == ["__main__", ["--epochs", "2", "--strategy", "mine"], True, str(script)]
    assert second == "neighbour"


def test_run_takes_a_module_and_a_strategy(script, capsys, monkeypatch):
    monkeypatch.chdir(script.parent)
    script.write_text(SCRIPT.replace("report_to=[]", "report_to=[], preserve_accelerator_state=False"), "utf-8")
    assert program.main(["run", "--strategy", "flag", "-m", "task", "-x"]) == 0
    name, arguments, kept, _ = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (name, arguments, kept) == ("__main__", ["-x"], False)


def test_run_patches_checkpoints_when_it_is_told_to(script, capsys):
    script.write_text(
        "import transformers_patch\nprint([p.name for p in transformers_patch.status() if p.applied])\n", "utf-8"
    )
    assert program.main(["run", "--checkpoints", str(script), "--checkpoints"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "['training_args', 'save_checkpoint', 'build', 'train', 'last_checkpoint']"
    ]
    transformers_patch.revert()
    assert program.main(["run", str(script), "--checkpoints"]) == 0
    assert capsys.readouterr().out.splitlines() == ["['training_args']"]


def test_a_script_that_fails_fails(script):
    script.write_text("import sys\nsys.exit(7)\n", "utf-8")
    with pytest.raises(SystemExit) as ended:
        program.main(["run", str(script)])
    assert ended.value.code == 7


def test_a_missing_script_is_named(tmp_path, capsys):
    assert program.main(["run", str(tmp_path / "absent.py")]) == 2
    assert "absent.py' is not a file" in capsys.readouterr().err
    assert transformers_patch.status()[0].applied is None


def test_status_in_words_and_as_json(capsys):
    assert program.main(["status"]) == 0
    text = capsys.readouterr().out
    assert f"transformers {transformers.__version__}" in text and "can be applied" in text and "40376" in text
    transformers_patch.apply("flag")
    assert program.main(["status", "--json"]) == 0
    patch, *others = json.loads(capsys.readouterr().out)
    # The losses are for newer releases than the rest.
    assert {(other["applied"], other["verdict"]) for other in others if other["part"] != "losses"} == {
        (None, "can be applied")
    }
    assert (patch["applied"], patch["verdict"], patch["version"]) == ("flag", "applied", transformers.__version__)


def test_an_unknown_shape_is_refused(script, capsys, monkeypatch):
    monkeypatch.setattr("transformers_patch.training_args.examine", lambda module: Finding(("it is round",), True))
    assert program.main(["run", str(script)]) == 2
    assert "it is round" in capsys.readouterr().err and not AcceleratorState._shared_state
    assert program.main(["status"]) == 1
    assert "it is round" in capsys.readouterr().out
