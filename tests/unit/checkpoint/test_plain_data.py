"""Values that a careful reader refuses are named when they are saved."""

import collections
import datetime
import decimal
import enum
import fractions
import functools
import os
import pathlib
import pickle
import re
import subprocess
import uuid
import warnings
import zoneinfo

import numpy as np
import pytest
import torch

from accelerate import Accelerator, checkpointing
from accelerate.checkpoint.plain_data import unreadable
from cases import cases


class Colour(enum.Enum):
    RED = 1


class Registered:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"inside": [0, {"value": self.value}]}

    def load_state_dict(self, state):
        self.value = state["inside"][1]["value"]


LONG = 10**700
KEPT = {
    "defaultdict": collections.defaultdict(list, {LONG: [pathlib.Path("a")], uuid.UUID(int=5): [2]}),
    "defaultdict without a factory": collections.defaultdict(None, x=1),
    "deque": collections.deque([1, datetime.date(2026, 1, 2), collections.deque([-LONG])], maxlen=4),
    "Counter": collections.Counter({frozenset([LONG]): 2, "b": 1}),
    "OrderedDict": collections.OrderedDict(b=frozenset(), a=slice(1, LONG)),
    "sets": ({1, uuid.UUID(int=6)}, frozenset([frozenset([LONG]), (decimal.Decimal("0.10"),)])),
    "range": (range(0, 9, 2), range(LONG)),
    "slice": slice(None, 3),
    "times": [
        datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.timezone.utc),
        datetime.time(4),
        datetime.timedelta(days=1.5),
    ],
    "zone": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "CEST")),
    "numbers": [LONG, -LONG, 2**2000 - 1, 1j, decimal.Decimal("NaN"), fractions.Fraction(1, 3)],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("d:/e")],
    "bytes": [b"", b"\xff\x00", bytearray(b"a")],
    "keys": {datetime.date(2026, 1, 2): 1, (LONG, pathlib.Path("a")): 2, None: 3, 1.5: 4, b"k": 5, range(3): 6},
}


def described(value):
    """Return a text that names the values and types inside a value."""
    if isinstance(value, dict):
        inside = [getattr(value, "default_factory", None), *[part for item in value.items() for part in item]]
    elif isinstance(value, list | tuple | collections.deque):
        inside = [getattr(value, "maxlen", None), *value]
    elif isinstance(value, range | slice):
        inside = [value.start, value.stop, value.step]
    elif isinstance(value, set | frozenset):
        return f"{type(value)} {sorted(map(described, value))}"
    else:  # a repr has at most 4,300 digits
        return f"{type(value)} {hex(value) if isinstance(value, int) else repr(value)}"
    return f"{type(value)} {[described(part) for part in inside]}"


@pytest.mark.parametrize("blocking", [True, False])
def test_values_of_the_standard_library_come_back_with_their_types(tmp_path, blocking):
    accelerator = Accelerator(cpu=True)
    registered = Registered(KEPT)
    accelerator.register_for_checkpointing(registered)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(tmp_path, blocking=blocking)
        registered.value = None
        accelerator.load_state(tmp_path)
    assert described(registered.value) == described(KEPT)
    registered.value["defaultdict"]["new"].append(1)
    # Other readers, as upstream, get the same.
    other_reader = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=False)
    assert described(other_reader["inside"][1]["value"]) == described(KEPT)


def test_a_deque_keeps_arrays_tensors_and_its_identity(tmp_path):
    shared = collections.deque([np.arange(3), torch.ones(2)])
    accelerator = Accelerator(cpu=True)
    registered = Registered([shared, shared, collections.defaultdict(int, a=np.float64(2))])
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    first, second, third = registered.value
    assert first is second and type(first[0]) is np.ndarray and third["b"] == 0 and third["a"] == 2
    assert first[0].tolist() == [0, 1, 2] and first[1].tolist() == [1, 1]


class Record:
    def __init__(self):
        self.number = 1


ODD = [
    (Colour.RED, "Colour at state['inside'][1]['value']"),
    (collections.deque([{"a": Colour.RED}]), "Colour at state['inside'][1]['value'][0]['a']"),
    ({1, Colour.RED}, "Colour at an item of state['inside'][1]['value']"),
    (collections.defaultdict(Record), "Record at state['inside'][1]['value'].default_factory"),
    ({Colour.RED: 1}, "Colour at the key <Colour.RED: 1> of state['inside'][1]['value']"),
    (Record(), "Record at"),
    (lambda: 0, "function at"),
    (np.datetime64("2026-01-02"), "datetime64 at"),
    (datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")), "datetime at"),
    (collections.namedtuple("Pair", "a b")(1, 2), "Pair at"),
]


@pytest.mark.parametrize(("value", "message"), ODD, ids=lambda value: value[:12] if isinstance(value, str) else "")
def test_a_value_that_would_not_load_is_refused_before_anything_is_written(tmp_path, value, message):
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Registered(value))
    for blocking in (True, False):
        with pytest.raises(TypeError, match=re.escape(message)) as caught:
            accelerator.save_state(tmp_path / "a", blocking=blocking)
    assert "Registered (custom_checkpoint_0.pkl)" in str(caught.value) and not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match=re.escape(message)):
        checkpointing.save_custom_state(Registered(value), tmp_path)
    assert not list(tmp_path.iterdir())


def test_classes_that_the_program_declares_safe_are_saved_and_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    registered = Registered([Colour.RED, Record()])
    accelerator.register_for_checkpointing(registered)
    with torch.serialization.safe_globals([Colour, Record]):
        accelerator.save_state(tmp_path)
        accelerator.load_state(tmp_path)
    assert registered.value[0] is Colour.RED and registered.value[1].number == 1


class Kept(torch.utils.data.IterableDataset):
    """A stream with a state."""

    value = Colour.RED

    def __iter__(self):
        yield from torch.arange(8)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_states_of_optimizers_schedules_and_data_are_checked_too(tmp_path):
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(inner, torch.optim.lr_scheduler.StepLR(inner, 2))
    scheduler.scheduler.mode = Colour.RED
    with pytest.raises(TypeError, match=r"\(scheduler.bin\): it has a Colour at state\['mode'\]"):
        accelerator.save_state(tmp_path)
    scheduler.scheduler.mode = collections.deque([1])
    optimizer.param_groups[0]["mode"] = Colour.RED
    with pytest.raises(TypeError, match=r"optimizer 0: it has a Colour at state\['param_groups'\]\[0\]\['mode'\]"):
        accelerator.save_state(tmp_path)
    optimizer.param_groups[0]["mode"] = datetime.date(2026, 1, 2)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert scheduler.scheduler.mode == collections.deque([1])
    loader = accelerator.prepare(torch.utils.data.DataLoader(Kept()))
    with pytest.raises(TypeError, match="data loader 0: it has a Colour"):
        next(iter(loader))
        accelerator.save_state(tmp_path)


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@cases(
    "attack",
    Attack(os.system, "touch harmed"),
    Attack(eval, "open('harmed', 'w')"),
    Attack(getattr, pathlib.Path("harmed"), "touch"),
    Attack(subprocess.Popen, ["touch", "harmed"]),
    Attack(pathlib.Path.touch, pathlib.Path("harmed")),
    Attack(functools.partial, os.system, "touch harmed"),
    Attack(collections.defaultdict, os.getcwd),
    Attack(map, os.system, ["touch harmed"]),
    collections.deque([Attack(os.system, "touch harmed")]),
    ids=lambda attack: "",
)
def test_no_file_runs_code_by_default(tmp_path, monkeypatch, attack):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Registered(1))
    accelerator.save_state("a")
    torch.save({"inside": [0, {"value": attack}]}, "a/custom_checkpoint_0.pkl")
    pathlib.Path("a/accelerate_manifest.json").unlink()
    with pytest.raises(pickle.UnpicklingError, match="custom_checkpoint_0.pkl could not be read"):
        accelerator.load_state("a")
    assert not pathlib.Path("harmed").exists()


def test_what_contains_itself_is_saved():
    plain = {"a": 1}
    plain["self"] = [plain]
    assert unreadable(plain) is None


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
