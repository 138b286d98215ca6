"""Values that a careful reader refuses are named when they are saved."""

import collections
import datetime
import enum
import pathlib
import warnings

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpoint.plain_data import unreadable


class Colour(enum.Enum):
    RED = 1


class Registered:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"inside": [0, {"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["inside"][1]["value"]


ODD = [
    collections.defaultdict(list),
    collections.deque([1]),
    datetime.date(2026, 1, 2),
    pathlib.Path("a"),
    Colour.RED,
    frozenset([1]),
    10**700,
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_saving_warns_of_a_value_that_would_not_load(tmp_path, value):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Registered(value))
    with pytest.warns(UserWarning, match=rf"Registered .*{type(value).__name__} at state\['inside'\]\[1\]\['value'\]"):
        accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})


def test_what_loads_is_saved_without_a_warning(tmp_path):
    plain = {"a": [1, -(2**63), 1.5, None, True], "b": {1, 2}, "c": (np.float64(1), np.arange(3)), "d": torch.ones(2)}
    plain["self"] = plain
    registered = Registered({**plain, "self": None, 3: collections.OrderedDict(x=torch.Size([1]))})
    assert unreadable(plain) is None, "a state may contain itself"
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(registered)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)


def test_a_key_that_would_not_load_is_named():
    assert unreadable({"a": {Colour.RED: 1}}) == ("the key <Colour.RED: 1> of state['a']", "Colour")


@pytest.mark.parametrize(
    ("url", "message"),
    [("s3:/a/b", "two slashes.*'s3://a/b'"), ("http://host/a", "http:// URLs"), ("https://host/a", "object store")],
)
def test_a_location_that_cannot_hold_checkpoints_is_refused(url, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (Accelerator(cpu=True).save_state, Accelerator(cpu=True).load_state):
        with pytest.raises(ValueError, match=message):
            call(url)
    assert not list(tmp_path.iterdir())
