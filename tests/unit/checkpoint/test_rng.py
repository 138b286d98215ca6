"""Random states: each source by itself."""

import random

import numpy as np
import pytest
import torch

from accelerate.checkpoint import rng


@pytest.fixture(autouse=True)
def keep_random_states():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_all_sources_come_back(caplog):
    states = rng.collect()
    assert {"random_state", "numpy_random_seed", "torch_manual_seed"} <= set(states)
    expected = draw()
    assert draw() != expected
    rng.restore(states, "folder")
    assert draw() == expected
    assert caplog.text == ""


def test_one_that_fails_is_named_with_its_cause_and_the_others_come_back(caplog):
    states = rng.collect()
    expected = draw()
    states["numpy_random_seed"] = ("MT19937", "nonsense")
    rng.restore(states, "folder/random_states_0.pkl")
    got = draw()
    assert (got[0], got[2]) == (expected[0], expected[2])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "numpy in folder/random_states_0.pkl" in record.getMessage() and "Error" in record.getMessage()


def test_one_that_is_missing_is_named(caplog):
    states = rng.collect()
    del states["torch_manual_seed"]
    rng.restore(states, "folder")
    assert "no random state for torch (CPU)" in caplog.text


def test_states_of_devices_that_are_not_in_use_are_passed_over(caplog):
    rng.restore({**rng.collect(), "torch_cuda_manual_seed": [torch.zeros(1)]}, "folder")
    assert caplog.text == ""


def test_a_device_in_use_is_a_source(monkeypatch):
    class Device:
        type = "cuda"
        state = ["state"]

        def get_rng_state_all(self):
            return self.state

        def set_rng_state_all(self, states):
            self.state = states

    device = Device()
    monkeypatch.setattr(rng, "PartialState", lambda: type("S", (), {"device": torch.device("cuda:1")})())
    monkeypatch.setattr(rng.devices, "row", lambda kind: device)
    assert rng.collect()["torch_cuda_manual_seed"] == ["state"]
    rng.restore({**rng.collect(), "torch_cuda_manual_seed": [torch.zeros(1)]}, "folder")
    assert torch.equal(device.state[0], torch.zeros(1))


@pytest.mark.parametrize("generator", [np.random.PCG64, np.random.SFC64, np.random.Philox, np.random.MT19937])
def test_another_bit_generator_of_numpy(generator):
    if not hasattr(np.random, "set_bit_generator"):
        pytest.skip("this numpy has one")
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(generator(3))
        tensors, told = rng.encode(rng.collect())
        drawn = np.random.rand(3).tolist()
        rng.restore(rng.decode(tensors, told), "here")
        assert np.random.rand(3).tolist() == drawn
    finally:
        np.random.set_bit_generator(before)
