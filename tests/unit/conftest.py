"""A clean place to run in, and programs on the PATH that record how they were called."""

import json
import os
import stat
import sys

import pytest

# Variables of ours, and of a scheduler that may run the tests.
OUTER = ("ACCELERATE_", "FSDP_", "OMP_", "MEGATRON_", "PARALLELISM_")
OUTER += ("SLURM_", "OMPI_", "PMI", "MV2_", "PBS_", "LSB_", "JSM_", "MASTER_")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory without a configuration file, and no variables of a launch."""
    for name in list(os.environ):
        if name.startswith(OUTER) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def default_file(place):
    def write(text):
        path = place / "home" / "accelerate" / "default_config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


RECORDER = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
if sys.argv[1:] == ["--version"] and os.path.exists({version!r}):
    sys.exit(print(open({version!r}).read()))
with open({record!r}, "a") as file:
    entry = {{"name": name, "arguments": sys.argv[1:], "environment": dict(os.environ), "extra": None}}
    if "DS_ENV_FILE" in os.environ:
        entry["extra"] = open(os.environ["DS_ENV_FILE"]).read()
        entry["mode"] = os.stat(os.path.dirname(os.environ["DS_ENV_FILE"])).st_mode & 0o777
    print(json.dumps(entry), file=file)
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""


class Programs:
    """Fake programs in a separate folder."""

    def __init__(self, folder):
        self.folder, self.record = folder, folder.parent / "record.jsonl"

    def add(self, name, version=None):
        answer = self.folder.parent / f"{name}.version"
        if version is not None:
            answer.write_text(version)
        file = self.folder / name
        file.write_text(RECORDER.format(python=sys.executable, version=str(answer), record=str(self.record)))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def calls(self):
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Only these programs are on the PATH."""
    if os.name != "posix":
        pytest.skip("the fake programs are scripts with a #! line")
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Programs(folder)
