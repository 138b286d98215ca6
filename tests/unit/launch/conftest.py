"""A clean place to resolve in: no configuration file, no variables of ours, no devices."""

import os

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launch import hardware
from accelerate.launch.resolve import resolve

OURS = ("ACCELERATE_", "FSDP_", "OMP_", "MEGATRON_", "PARALLELISM_")
# A scheduler may run the tests.
OURS += ("SLURM_", "OMPI_", "PMI", "MV2_", "PBS_", "LSB_", "JSM_", "MASTER_")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(OURS) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "detect", lambda environ: hardware.Hardware("cpu", 0))
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture
def gpus(monkeypatch):
    def have(count):
        monkeypatch.setattr(
            hardware, "detect", lambda environ: hardware.Hardware("cuda", count, "CUDA_VISIBLE_DEVICES")
        )

    return have


@pytest.fixture
def parse():
    return lambda line: launch_command_parser().parse_args(line.split())


@pytest.fixture
def plan(parse):
    return lambda line, environ=None: resolve(parse(f"{line} train.py"), environ)


@pytest.fixture
def file(place):
    def write(text):
        folder = place / "home" / "accelerate"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "default_config.yaml").write_text(text)

    return write
