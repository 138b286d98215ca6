"""The programs of ``examples/``: each runs as its docstring says, and prints the line that it promises.

A docstring lists the commands (`accelerate launch ...`, with `# status N` where a command does not end with 0) and the last line of the last one
(`Prints: ...`); what the error output has to contain stands after `Reports: ...`.
"""

import ast
import functools
import importlib
import importlib.util
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed.conftest import LAUNCH_ON_CPU, done, plain_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
FEATURES = sorted(path.relative_to(EXAMPLES).as_posix() for path in (EXAMPLES / "by_feature").glob("*.py"))
LARGER = ["lm.py", "vision.py", "denoise.py", "stream_mix.py", "lora_sft.py", "dpo.py"]
# What a newcomer runs first; the others take minutes together.
BASIC = {f"by_feature/{name}.py" for name in ("first", "resume")}
RAY = "clusters/ray_train.py"
# Packages that not every environment of the tests has. Some have a separate one: `make test-deepspeed`, `test-liger`, `test-ray`.
NEEDED = {
    RAY: ("ray",),
    "by_feature/deepspeed_zero.py": ("deepspeed",),
    "by_feature/fp8.py": ("torchao",),
    "by_feature/liger.py": ("liger_kernel", "triton", "transformers"),
    "by_feature/qlora.py": ("bitsandbytes", "peft", "transformers"),
    "by_feature/quantise.py": ("bitsandbytes",),
    "by_feature/schedule_free.py": ("schedulefree",),
}
PROGRAMS = [*FEATURES, *LARGER, RAY]
LINES = {"by_feature": 120, ".": 300, "clusters": 300}
COMMAND = re.compile(r"^    ((?:[A-Z_]+=\S+ )*(?:accelerate launch|python) .*?)(?:  # status (\d+))?$", re.M)
# Only these are loaded to look names up; of others it is enough that they are there.
LOOKED_UP = {"accelerate", "transformers_patch", "torch", "sklearn", "pydoc_data"}


@dataclass(frozen=True)
class Program:
    """What the docstring of a program promises."""

    title: str
    commands: tuple[tuple[str, int], ...]
    prints: str
    reports: str


@functools.cache
def promised(name: str) -> Program:
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text("utf-8"))) or ""
    commands = tuple((command.strip(), int(status or 0)) for command, status in COMMAND.findall(text))
    ends = {word: re.search(rf"^{word}: (.+)$", text, re.M) for word in ("Prints", "Reports")}
    prints, reports = (found[1].strip() if found else "" for found in ends.values())
    return Program(text.partition("\n")[0], commands, prints, reports)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BASIC else pytest.mark.slow) for name in PROGRAMS]
)
def test_a_program_prints_what_it_promises(name, tmp_path):
    for package in NEEDED.get(name, ()):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    program = promised(name)
    source = str(EXAMPLES.parent / "src")
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    variables = plain_environment(tmp_path, PYTHONPATH=paths, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    for command, status in program.commands:
        words = shlex.split(command)
        own = dict(
            word.split("=", 1) for word in words[: words.index("accelerate" if "launch" in words else "python")]
        )
        at = len(own)
        launched = (
            [*LAUNCH_ON_CPU, *words[at + 2 :]] if words[at] == "accelerate" else [sys.executable, *words[at + 1 :]]
        )
        ended = done(launched, env={**variables, **own}, cwd=tmp_path)
        report = f"{command}\nexit status {ended.returncode}\n{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
        assert ended.returncode == status, report
    assert ended.stdout.strip().rpartition("\n")[2] == program.prints, report
    assert program.reports in ended.stderr, report


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_its_names_are_there(name):
    path = EXAMPLES / name
    text = path.read_text("utf-8")
    program, tree = promised(name), ast.parse(text)
    assert text.count("\n") < LINES[Path(name).parent.as_posix()], "too long"
    assert program.prints and program.title.endswith("."), "the docstring has a title, and says what is printed"
    assert program.commands and all(f"examples/{name}" in command for command, _ in program.commands)
    # A program's folder comes first on its path: one called `profile` would hide the library's.
    assert path.stem not in sys.stdlib_module_names and not importlib.util.find_spec(path.stem), "hides a module"
    compile(tree, name, "exec")
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        for module in [node.module] if isinstance(node, ast.ImportFrom) else names:
            top = module.partition(".")[0]
            own = (path.parent / f"{top}.py").exists() or top in NEEDED.get(name, ())
            assert own or importlib.util.find_spec(top), f"{module} is not there"
            if isinstance(node, ast.ImportFrom) and top in LOOKED_UP:
                home = importlib.import_module(module)
                missing = [each for each in names if not hasattr(home, each)]
                assert not missing, f"{module} has no {missing}"


def test_the_table_has_every_program():
    table = (EXAMPLES / "README.md").read_text("utf-8")
    for name in PROGRAMS:
        row = f"| [{Path(name).name}]({name}) | {promised(name).title} |"
        assert row in table, f"examples/README.md lacks this row:\n{row}"
