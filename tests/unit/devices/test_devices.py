from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from accelerate.devices import DEVICES, Device, detect, register, row, table
from accelerate.utils import DistributedType


def test_environment_chooses_the_device(monkeypatch):
    table.forget()
    assert detect().available() and detect(cpu=True) is DEVICES["cpu"]
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mps:0")
    assert detect().type == "mps"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert detect().type == "cpu"


def test_unknown_device_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'toaster:1'.*cpu, cuda"):
        row("toaster:1")


def test_cpu_follows_the_contract():
    cpu = DEVICES["cpu"]
    cpu.set(3), cpu.synchronize(), cpu.empty_cache()
    assert cpu.count() == 1 and cpu.current() == cpu.torch_device(5) == torch.device("cpu")
    cpu.manual_seed_all(4)
    state = cpu.get_rng_state_all()
    first = torch.rand(3)
    cpu.set_rng_state_all(state)
    assert torch.equal(first, torch.rand(3))


def test_indices_wrap_around_where_processes_share_devices(monkeypatch):
    cuda = DEVICES["cuda"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [cuda.torch_device(i).index for i in range(4)] == [0, 1, 0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda.torch_device(1).index == 0


def test_every_row_says_where_its_names_are_published():
    assert {row.type for row in table._OWN} == table.SOURCES.keys()


@pytest.fixture
def rows():
    """The table, which gets its rows back afterwards."""
    kept = dict(DEVICES)
    yield DEVICES
    DEVICES.clear()
    DEVICES.update(kept)


def test_a_registered_device_is_found_before_the_others(rows):
    toaster = Device("toaster", DistributedType.MULTI_GPU, ("gloo",), None, usable=lambda: True)
    detect()
    register(toaster)
    assert detect() is row("toaster:1") is toaster and next(iter(rows)) == "toaster"
    register(replace(toaster, usable=lambda: False))
    assert detect().type != "toaster" and len(rows) == len({*rows})


def test_a_module_with_the_functions_that_torch_asks_for_is_enough(rows, monkeypatch):
    states = {0: torch.zeros(1), 1: torch.ones(1)}
    module = SimpleNamespace(
        device_count=lambda: 2,
        get_rng_state=lambda device: states[device.index],
        set_rng_state=lambda state, device: states.update({device.index: state}),
    )
    monkeypatch.setattr(torch, "cuda", module)  # a type of device that torch knows
    plain = Device("cuda", DistributedType.MULTI_GPU, ("gloo",), None, usable=lambda: True)
    saved = plain.get_rng_state_all()
    plain.set_rng_state_all(saved[::-1])
    assert [states[0].item(), states[1].item()] == [1, 0]
    plain.empty_cache()
