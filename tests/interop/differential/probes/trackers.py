"""Trackers, against fakes of their packages that write down what is called."""

import contextlib
import functools
import importlib.machinery
import pathlib
import sys
import types
from typing import Any

import numpy as np
import torch
import yaml

from accelerate import tracking
from accelerate.state import PartialState
from interop.differential.core import attempt, probe
from recorder import Recorder

TRACKERS = {
    "AimTracker": "aim", "ClearMLTracker": "clearml", "CometMLTracker": "comet_ml", "DVCLiveTracker": "dvclive",
    "MLflowTracker": "mlflow", "SwanLabTracker": "swanlab", "TensorBoardTracker": "torch.utils.tensorboard",
    "TrackioTracker": "trackio", "WandBTracker": "wandb",
}  # fmt: skip
COVERED = tuple(f"tracking:{name}" for name in TRACKERS)


class Library(Recorder):
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def _record(self, *call):
        self._calls.append(told(call))


def told(value):
    if isinstance(value, Recorder):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(told, value))
    return {k: told(v) for k, v in value.items()} if isinstance(value, dict) else value


class Task:
    """ClearML's, with or without one that is running."""

    running = False
    calls: list[Any] = []

    @classmethod
    def current_task(cls):
        return Library("Task.current", cls.calls) if cls.running else None

    @classmethod
    def init(cls, *args, **kwargs):
        return Library("Task.init", cls.calls)(*args, **kwargs)


class Metric:
    @staticmethod
    def could_log(value):
        return isinstance(value, (int, float, str))


@contextlib.contextmanager
def installed(*names, known=False):
    """Put fakes in the place of packages; yields the list of calls."""
    PartialState(cpu=True)  # what upstream logs with needs it
    calls = []
    Task.calls, Task.running = calls, known
    limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=8, MAX_PARAMS_TAGS_PER_BATCH=2)
    found = [types.SimpleNamespace(experiment_id="7")] if known else []
    more = {
        "clearml": {"Task": Task}, "comet_ml": {"__version__": "3.50.0"},
        "mlflow": {"utils": types.SimpleNamespace(validation=limits), "search_experiments": lambda *a, **k: found},
        "dvclive.plots": {"Metric": Metric},
    }  # fmt: skip
    names = tuple(names) + (("dvclive.plots",) if "dvclive" in names else ())
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module, recorder = types.ModuleType(name), Library(name, calls)
        module.__dict__.update(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[], **more.get(name, {}))
        module.__getattr__ = functools.partial(getattr, recorder)  # type: ignore[method-assign]
        sys.modules[name] = module
    board = getattr(torch.utils, "tensorboard", None)
    if "torch.utils.tensorboard" in names:
        torch.utils.tensorboard = sys.modules["torch.utils.tensorboard"]  # type: ignore[assignment]
    try:
        yield calls
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
        if board is not None:
            torch.utils.tensorboard = board


def started(name, **kwargs):
    first = {"TensorBoardTracker": ("run", "logs"), "AimTracker": ("run", "logs")}.get(name, ("run",))
    tracker = getattr(tracking, name)(*first, **kwargs)
    tracker.start()
    return tracker


VALUES = {
    "float": lambda: 0.5, "int": lambda: 3, "bool": lambda: True, "text": lambda: "word",
    "long text": lambda: "w" * 600, "none": lambda: None, "nan": lambda: float("nan"),
    "0d": lambda: torch.tensor(0.25), "1d": lambda: torch.tensor([1.0, 2.0]), "one": lambda: torch.tensor([4.0]),
    "numpy": lambda: np.float32(1.5), "numpy int": lambda: np.int64(2), "array": lambda: np.arange(3.0),
    "dict": lambda: {"a": 1.0, "b": 2}, "dict of text": lambda: {"a": "x"}, "list": lambda: [1, 2], "empty": dict,
    "object": lambda: pathlib.PurePosixPath("p"),
}  # fmt: skip


@probe(*COVERED, tracker=list(TRACKERS), value=VALUES, step=[None, 0, 5])
def log(tracker, value, step):
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        made.log({"train_loss": value, "eval_loss": 1.0}, step=step)
        return calls


@probe(*COVERED, tracker=list(TRACKERS), value=VALUES, nested=[False, True])
def configuration(tracker, value, nested):
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        given = {"a": {"b": value}, "c": 1} if nested else {"a": value, "c": 1}
        yield "stored", isinstance(attempt(made.store_init_configuration, given), Exception)
        yield "calls", calls
        yield "files", sorted(path.name for path in pathlib.Path().glob("logs/**/*.yml"))
        yield "content", [yaml.unsafe_load(path.read_text()) for path in pathlib.Path().glob("logs/**/*.yml")]


@probe(
    "tracking:WandBTracker", "tracking:ClearMLTracker", tracker=["WandBTracker", "ClearMLTracker", "AimTracker"],
    columns=[None, ["a", "b"], []], data=[None, [[1, 2], [3, 4]], []], dataframe=[False, True], step=[None, 3],
)  # fmt: skip
def tables(tracker, columns, data, dataframe, step):
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        made.log_table("eval_table", columns=columns, data=data, dataframe="frame" if dataframe else None, step=step)
        return calls
