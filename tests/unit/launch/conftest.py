"""A clean place to resolve in: no configuration file, no variables of ours, no devices."""

import re

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launch import hardware
from accelerate.launch.errors import LaunchError
from accelerate.launch.resolve import resolve


@pytest.fixture(autouse=True)
def no_devices(place, monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda environ: hardware.Hardware("cpu", 0))
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    (place / "train.py").touch()


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
def found_or_refused():
    """Expect a value of a function, or a text of its refusal."""

    def check(expected, function, *args):
        if isinstance(expected, str):
            with pytest.raises(LaunchError, match=re.escape(expected)):
                function(*args)
        else:
            assert function(*args) == expected

    return check
