import pytest
import torch

from accelerate.devices import DEVICES, detect, row, table


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
