"""GPUs that cannot exchange data directly, made of answers of `nvidia-smi`."""

import os
import subprocess

import pytest
import torch

from accelerate.base import environment
from accelerate.extensions.peer_to_peer import gpus


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
    assert gpus.get_gpu_info() == (["NVIDIA H100", "NVIDIA H100"], 2)
    assert gpus.get_driver_version() == "550.40.07"
    nvidia_smi["driver_version"] = ""
    with pytest.raises(ValueError, match="no driver version"):
        gpus.get_driver_version()
    monkeypatch.setattr(environment.shutil, "which", lambda *arguments: None)
    with pytest.raises(FileNotFoundError, match="nvidia-smi is not on PATH"):
        gpus.get_gpu_info()
    assert gpus.check_cuda_p2p_ib_support() is True


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
    assert gpus.check_cuda_p2p_ib_support() is expected


@pytest.mark.parametrize(
    ("gpus_here", "on_cpu", "able", "expected"),
    [(True, "0", False, "1"), (True, "0", True, None), (True, "1", False, None), (False, "0", False, None)],
)
def test_nccl_is_told_before_the_group_is_made(monkeypatch, gpus_here, on_cpu, able, expected):
    monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "")  # so that it is restored
    del os.environ["NCCL_P2P_DISABLE"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus_here)
    monkeypatch.setattr(gpus, "check_cuda_p2p_ib_support", lambda: able)
    with gpus.PeerToPeer().joining(None, 0, 2):
        assert os.environ.get("NCCL_P2P_DISABLE") == expected and os.environ["NCCL_IB_DISABLE"] == "0"
