"""A torch that is too old is refused by the first import, in one line, without importing it."""

import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cold

ROOT = pathlib.Path(__file__).resolve().parents[2]


def imported_beside(version: str, folder: pathlib.Path, program: str) -> subprocess.CompletedProcess:
    """Run a program that finds a torch of some version, which cannot be imported."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (package / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\n")
    paths = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT / 'src')!r}]\n"
    return subprocess.run([sys.executable, "-c", paths + program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("program", ["import accelerate", "from accelerate.commands import accelerate_cli"])
def test_an_older_torch_is_named_with_what_to_do(tmp_path, program):
    done = imported_beside("2.6.0+cu124", tmp_path, program)
    last = done.stderr.splitlines()[-1]
    needed = "accelerate needs torch>=2.7, and torch 2.6.0+cu124 is installed: pip install 'torch>=2.7'"
    assert last == f"ImportError: {needed}"


@pytest.mark.parametrize("version", ["2.7.0", "2.15.0a0+git1234", "3.0.0.dev20270101", "unknown"])
def test_a_newer_torch_and_one_that_says_nothing_are_taken(tmp_path, version):
    assert imported_beside(version, tmp_path, "import accelerate").returncode == 0


def test_every_page_says_the_same_oldest_torch():
    [oldest] = re.findall(r"_require_torch\(\((\d+), (\d+)\)\)", (ROOT / "src/accelerate/__init__.py").read_text())
    name = ".".join(oldest)
    assert f'"torch>={name}"' in (ROOT / "setup.py").read_text()
    assert f"| torch | {name} and newer |" in (ROOT / "docs/support.md").read_text()
    assert f"torch {name} or newer" in (ROOT / "README.md").read_text()
    assert f"{name}." in re.search(r"^TORCH_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
