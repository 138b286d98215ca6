"""Random states: each source separately."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerate.runtime import generators
from cases import cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keep_random_states():
    with generators.kept():
        yield


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


@cases(
    "states, restored, told",
    ({}, [0, 1, 2], None),
    ({"torch_cuda_manual_seed": [torch.zeros(1)]}, [0, 1, 2], None),  # of a device that is not in use
    ({"numpy_random_seed": ("MT19937", "nonsense")}, [0, 2], "numpy in states.pkl could not be restored.*Error"),
    ({"torch_manual_seed": None}, [0, 1], r"torch \(CPU\) in states.pkl could not be restored: KeyError"),
)
def test_all_that_can_come_back_do_and_the_others_are_named(caplog, states, restored, told):
    states = {**generators.collect(CPU), **states}
    expected = draw()
    generators.restore({key: state for key, state in states.items() if state is not None}, CPU, "states.pkl")
    got = draw()
    assert [number for number in range(3) if got[number] == expected[number]] == restored
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (told is not None)
    assert told is None or re.search(told, messages[0])


def test_a_device_in_use_is_a_source(monkeypatch):
    states = ["state"]
    device = SimpleNamespace(type="cuda", get_rng_state_all=states.copy, set_rng_state_all=states.extend)
    monkeypatch.setitem(generators.DEVICES, "cuda", device)
    cuda = torch.device("cuda:1")
    assert generators.collect(cuda)["torch_cuda_manual_seed"] == ["state"]
    generators.restore({**generators.collect(cuda), "torch_cuda_manual_seed": [torch.zeros(1)]}, cuda, "folder")
    assert torch.equal(states[1], torch.zeros(1))
