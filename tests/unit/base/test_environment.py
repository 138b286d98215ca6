"""Environment variables and what the machine says about itself."""

import subprocess

import pytest

from accelerate.base import environment


def test_flags_and_integers(monkeypatch):
    assert environment.str_to_bool("YES") == 1 and environment.str_to_bool("off", to_bool=True) is False
    monkeypatch.setenv("SAMPLE_A", "-1")
    monkeypatch.setenv("SAMPLE_B", "3")
    assert environment.get_int_from_env(["SAMPLE_C", "SAMPLE_A", "SAMPLE_B"], 7) == 3
    assert environment.get_int_from_env(("SAMPLE_A",), 7) == environment.get_int_from_env([], 7) == 7
    monkeypatch.setenv("SAMPLE_A", "three")
    with pytest.raises(ValueError, match="SAMPLE_A is 'three'"):
        environment.get_int_from_env(["SAMPLE_A", "SAMPLE_B"], 7)
    with pytest.raises(ValueError, match="SAMPLE_A has an invalid truth value 'three'"):
        environment.parse_flag_from_env("SAMPLE_A")
    monkeypatch.setenv("SAMPLE_A", " ")
    assert environment.parse_flag_from_env("SAMPLE_A", True) is True
    assert environment.parse_choice_from_env("SAMPLE_A") == "no"
    assert environment.get_int_from_env(["SAMPLE_A"], 7) == 7


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Stand in for the program: a dictionary of what each query prints."""
    answers = {}

    def run(command, **kwargs):
        assert isinstance(command, list) and command[0] == "/bin/nvidia-smi" and not kwargs.get("shell")
        (query,) = (part.partition("=")[2] for part in command if part.startswith("--query-gpu="))
        return subprocess.CompletedProcess(command, 0, stdout=answers[query])

    monkeypatch.setattr(environment.shutil, "which", lambda *arguments, **kwargs: "/bin/nvidia-smi")
    monkeypatch.setattr(environment.subprocess, "run", run)
    return answers


def test_gpu_information(nvidia_smi, monkeypatch):
    nvidia_smi.update({"name": "NVIDIA H100\nNVIDIA H100\n\n", "driver_version": "550.40.07\n550.40.07\n"})
    assert environment.get_gpu_info() == (["NVIDIA H100", "NVIDIA H100"], 2)
    assert environment.get_driver_version() == "550.40.07"
    nvidia_smi["driver_version"] = ""
    with pytest.raises(ValueError, match="no driver version"):
        environment.get_driver_version()
    monkeypatch.setattr(environment.shutil, "which", lambda *arguments: None)
    with pytest.raises(FileNotFoundError, match="nvidia-smi is not on PATH"):
        environment.get_gpu_info()
    assert environment.check_cuda_p2p_ib_support() is True


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (["RTX 4090"] * 2, "550.40.06", False),
        (["RTX 4090"] * 2, "550.40.07", True),
        (["RTX 4070 Ti", "NVIDIA H100"], "545.0", False),
        *[(["RTX 4090"], "545.0", True), (["RTX 3090"] * 2, "545.0", True)],
        *[(["NVIDIA H100"] * 8, "not a version", True), (["RTX 4090"] * 2, "not a version", True)],
    ],
)
def test_peer_to_peer(nvidia_smi, names, driver, expected):
    nvidia_smi.update({"name": "\n".join(names), "driver_version": "\n".join([driver] * len(names))})
    assert environment.check_cuda_p2p_ib_support() is expected
