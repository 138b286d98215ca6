"""Launches on the cores of AWS Neuron, with a torch that seems to have them."""

import types

import pytest
import torch

from accelerate.devices import probe
from accelerate.launch import hardware, runners
from accelerate.launch.hardware import Hardware
from accelerate.launch.plan import worker_environment
from accelerate.utils import imports

detect = hardware.detect


@pytest.fixture(autouse=True)
def cores(fake_package, monkeypatch):
    """Four cores; the conftest of this folder's parent hides what the machine really has."""
    fake_package("torch_neuronx")
    module = types.SimpleNamespace(device_count=lambda: 4, is_available=lambda: True)
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    monkeypatch.setattr(hardware, "detect", detect)
    imports.is_neuron_available.cache_clear()
    probe.forget()
    yield
    imports.is_neuron_available.cache_clear()


def test_a_process_for_each_core(plan):
    found = plan("")
    assert found.hardware == Hardware("neuron", 4, "NEURON_RT_VISIBLE_CORES")
    assert (found.runner, found.num_processes, found.on_cpu) == ("local", 4, False)
    processes = runners.processes(found)
    assert [process.environment["LOCAL_RANK"] for process in processes] == ["0", "1", "2", "3"]


def test_chosen_cores(plan):
    found = plan("--gpu_ids 1,3 --mixed_precision bf16")
    environment = worker_environment(found, {})
    assert found.num_processes == 2 and environment["NEURON_RT_VISIBLE_CORES"] == "1,3"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16" and "CUDA_VISIBLE_DEVICES" not in environment
    assert "NEURON_RT_VISIBLE_CORES" not in worker_environment(plan("--cpu --gpu_ids 1"), {})
