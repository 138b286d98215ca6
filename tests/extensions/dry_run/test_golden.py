"""What `launch --dry-run` prints for every configuration file of users, on a machine without GPUs and on one with eight.

The files in `tests/fixtures/dry_run` were written before launching was rebuilt; since then only the order of lines has changed. To write them again after a change that is meant:
`ACCELERATE_WRITE_GOLDEN=1 pytest tests/extensions/dry_run/test_golden.py`, and read the diff.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from accelerate.launch import hardware

FIXTURES = Path(__file__).parents[2] / "fixtures"
WRITES = bool(os.environ.get("ACCELERATE_WRITE_GOLDEN"))


@pytest.mark.parametrize("count", [0, 8])
def test_dry_run_of_every_configuration_file(place, monkeypatch, accelerate, count):
    found = hardware.Hardware("cuda", count, "CUDA_VISIBLE_DEVICES") if count else hardware.Hardware("cpu", 0)
    monkeypatch.setattr(hardware, "detect", lambda environ: found)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (place / "train.py").touch()
    sections = []
    for config in sorted((FIXTURES / "configs").glob("*.[yj]*")):
        shutil.copy(config, place)
        status, out, err = accelerate("launch", "--dry-run", "--config_file", config.name, "train.py", "--lr", "1")
        sections.append(f"=== {config.name}: exit status {status}\n{out}{err}")
    text = "\n".join(sections).replace(str(place), "/PLACE").replace(sys.executable, "python")
    text = re.sub(" {2,}", "  ", text)
    golden = FIXTURES / "dry_run" / f"{count}_gpus.txt"
    if WRITES:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, "utf-8")
    assert text.splitlines() == golden.read_text("utf-8").splitlines()
