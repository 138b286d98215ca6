"""Trackers, against fakes of their packages that write down what is called."""

import contextlib
import functools
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import yaml

from accelerate import tracking
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from interop.differential.core import probe

PACKAGES = ["wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"]
TRACKERS = {
    "AimTracker": "aim",
    "ClearMLTracker": "clearml",
    "CometMLTracker": "comet_ml",
    "DVCLiveTracker": "dvclive",
    "MLflowTracker": "mlflow",
    "SwanLabTracker": "swanlab",
    "TensorBoardTracker": "torch.utils.tensorboard",
    "TrackioTracker": "trackio",
    "WandBTracker": "wandb",
}
COVERED = tuple(f"tracking:{name}" for name in TRACKERS)
BOTH = (1, 2)


class Recorder:
    """Takes every attribute, call and assignment, and writes calls and assignments down in one list."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self.__dict__.update(_name=name, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = self.__dict__[name] = Recorder(f"{self._name}.{name}", self._calls)
        return child

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._name}.{name} =", told(value)))
        self.__dict__[name] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append((f"{self._name}[{key!r}] =", told(value)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append((self._name, told(args), told(kwargs)))
        return Recorder(f"{self._name}()", self._calls)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def told(value: Any) -> Any:
    """Spell an argument: a recorder by its name."""
    if isinstance(value, Recorder):
        return f"<{value._name}>"
    if isinstance(value, (list, tuple)):
        return type(value)(map(told, value))
    return {k: told(v) for k, v in value.items()} if isinstance(value, dict) else value


class Task:
    """ClearML's, with or without one that is running."""

    running = False
    calls: list[Any] = []

    @classmethod
    def current_task(cls) -> Any:
        return Recorder("Task.current", cls.calls) if cls.running else None

    @classmethod
    def init(cls, *args: Any, **kwargs: Any) -> Any:
        return Recorder("Task.init", cls.calls)(*args, **kwargs)


class Metric:
    """DVCLive's judgement of what is a metric."""

    @staticmethod
    def could_log(value: Any) -> bool:
        return isinstance(value, (int, float, str))


@contextlib.contextmanager
def installed(*names: str, known: bool = False) -> Iterator[list[Any]]:
    """Put fakes in the place of packages; yields the list of calls."""
    PartialState(cpu=True)  # what upstream logs with needs it
    calls: list[Any] = []
    Task.calls, Task.running = calls, known
    limits = types.SimpleNamespace(MAX_PARAM_VAL_LENGTH=8, MAX_PARAMS_TAGS_PER_BATCH=2)
    found = [types.SimpleNamespace(experiment_id="7")] if known else []
    more = {
        "clearml": {"Task": Task},
        "comet_ml": {"__version__": "3.50.0"},
        "mlflow": {"utils": types.SimpleNamespace(validation=limits), "search_experiments": lambda *a, **k: found},
        "dvclive.plots": {"Metric": Metric},
    }
    names = tuple(names) + (("dvclive.plots",) if "dvclive" in names else ())
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        module, recorder = types.ModuleType(name), Recorder(name, calls)
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


def attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def started(name: str, **kwargs: Any) -> Any:
    """Build a tracker and start it."""
    first = {"TensorBoardTracker": ("run", "logs"), "AimTracker": ("run", "logs")}.get(name, ("run",))
    tracker = getattr(tracking, name)(*first, **kwargs)
    tracker.start()
    return tracker


VALUES = {
    "float": lambda: 0.5,
    "int": lambda: 3,
    "bool": lambda: True,
    "text": lambda: "word",
    "long text": lambda: "w" * 600,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "0d": lambda: torch.tensor(0.25),
    "1d": lambda: torch.tensor([1.0, 2.0]),
    "one": lambda: torch.tensor([4.0]),
    "numpy": lambda: np.float32(1.5),
    "numpy int": lambda: np.int64(2),
    "array": lambda: np.arange(3.0),
    "dict": lambda: {"a": 1.0, "b": 2},
    "dict of text": lambda: {"a": "x"},
    "list": lambda: [1, 2],
    "empty": dict,
    "object": lambda: pathlib.PurePosixPath("p"),
}


@probe(*COVERED, tracker=list(TRACKERS), value=VALUES, step=[None, 0, 5])
def log(tracker: str, value: Any, step: Any) -> Any:
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        made.log({"train_loss": value, "eval_loss": 1.0}, step=step)
        return calls


@probe(*COVERED, tracker=list(TRACKERS), value=VALUES, nested=[False, True])
def configuration(tracker: str, value: Any, nested: bool) -> Iterator[tuple[str, Any]]:
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        given = {"a": {"b": value}, "c": 1} if nested else {"a": value, "c": 1}
        yield "stored", isinstance(attempt(made.store_init_configuration, given), Exception)
        yield "calls", calls
        yield "files", sorted(path.name for path in pathlib.Path().glob("logs/**/*.yml"))
        yield "content", [yaml.unsafe_load(path.read_text()) for path in pathlib.Path().glob("logs/**/*.yml")]


GIVEN: list[dict[str, Any]] = [
    {},
    {"project": "other"},
    {"dir": "d", "mode": "offline"},
    {"name": "n"},
    {"config": {"a": 1}},
]


@probe(*COVERED, tracker=list(TRACKERS), given=GIVEN, known=[False, True])
def begin(tracker: str, given: dict[str, Any], known: bool) -> Iterator[tuple[str, Any]]:
    """What a start calls, the tracker's own object, and its end."""
    with installed(TRACKERS[tracker], known=known) as calls:
        made = attempt(started, tracker, **given)
        if isinstance(made, Exception):
            yield "refused", made
            return
        yield "calls", list(calls)
        calls.clear()
        yield "tracker", told(made.tracker)
        yield (
            "read",
            (made.name, made.requires_logging_directory, made.main_process_only, getattr(made, "run_name", None)),
        )
        yield "end", (made.finish(), list(calls))
        calls.clear()
        yield "end again", attempt(made.finish)


@probe(*COVERED, tracker=list(TRACKERS), name=["", "ü n", None])
def names(tracker: str, name: Any) -> Any:
    with installed(TRACKERS[tracker]) as calls:
        more = ["logs"] if tracker in ("TensorBoardTracker", "AimTracker") else []
        made = getattr(tracking, tracker)(name, *more)
        made.start()
        return calls


@probe(*COVERED, tracker=list(TRACKERS), stage=["built", "imported"])
def early(tracker: str, stage: str) -> Iterator[tuple[str, Any]]:
    """Before a tracker is started."""
    with installed(TRACKERS[tracker]) as calls:
        more = ["logs"] if tracker in ("TensorBoardTracker", "AimTracker") else []
        kind = getattr(tracking, tracker)
        yield (
            "class",
            (kind.name, kind.requires_logging_directory, kind.main_process_only, issubclass(kind, GeneralTracker)),
        )
        if stage == "built":
            made = kind("run", *more)
            yield "calls", list(calls)
            yield "log", attempt(made.log, {"a": 1})
            yield "tracker", told(attempt(lambda: made.tracker))
            yield "finish", attempt(made.finish)


IMAGES = {
    "array": lambda: np.zeros((2, 4, 4, 3)),
    "list": lambda: [np.zeros((4, 4, 3)), np.ones((4, 4, 3))],
    "single": lambda: np.zeros((4, 4, 3)),
    "text": lambda: "path.png",
    "empty": list,
}


@probe(
    *(
        f"tracking:{name}"
        for name in ("AimTracker", "ClearMLTracker", "SwanLabTracker", "TensorBoardTracker", "WandBTracker")
    ),
    tracker=[
        "AimTracker",
        "ClearMLTracker",
        "SwanLabTracker",
        "TensorBoardTracker",
        "WandBTracker",
        "CometMLTracker",
        "TrackioTracker",
    ],
    images=IMAGES,
    step=[None, 2],
    more=[None, {"caption": "c"}, {"dataformats": "NHWC"}],
)
def images(tracker: str, images: Any, step: Any, more: Any) -> Any:
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        if tracker == "AimTracker":
            made.log_images({"train_a": images}, step=step, kwargs={"aim_image": more} if more else None)
        else:
            made.log_images({"train_a": images}, step=step, **(more or {}))
        return calls


class Frame:
    """Stands for a data frame."""

    shape = (1, 1)

    def __repr__(self) -> str:
        return "frame"


@probe(
    "tracking:WandBTracker",
    "tracking:ClearMLTracker",
    tracker=["WandBTracker", "ClearMLTracker", "AimTracker"],
    columns=[None, ["a", "b"], []],
    data=[None, [[1, 2], [3, 4]], []],
    dataframe=[False, True],
    step=[None, 3],
)
def tables(tracker: str, columns: Any, data: Any, dataframe: bool, step: Any) -> Any:
    with installed(TRACKERS[tracker]) as calls:
        made = started(tracker)
        calls.clear()
        made.log_table("eval_table", columns=columns, data=data, dataframe="frame" if dataframe else None, step=step)
        return calls


@probe(
    "tracking:MLflowTracker",
    method=["log_figure", "log_artifact", "log_artifacts"],
    given=[("a",), ("a", "b"), (), (None, "x")],
)
def artifacts(method: str, given: tuple[Any, ...]) -> Any:
    with installed("mlflow") as calls:
        made = started("MLflowTracker")
        calls.clear()
        getattr(made, method)(*given)
        return calls


@probe("tracking:MLflowTracker", count=[0, 1, 2, 3, 5], length=[1, 8, 9, 20], kind=["text", "number"])
def parameters(count: int, length: int, kind: str) -> Any:
    """Limits that MLflow sets for names and values."""
    with installed("mlflow") as calls:
        made = started("MLflowTracker")
        calls.clear()
        made.store_init_configuration(
            {f"p{number}": "v" * length if kind == "text" else 10 ** (length - 1) for number in range(count)}
        )
        return calls


@probe(
    "tracking:MLflowTracker",
    given=[
        {},
        {"experiment_name": "e"},
        {"experiment_name": "it's"},
        {"run_id": "r"},
        {"tags": {"a": 1}},
        {"tags": '{"a": 2}'},
        {"nested_run": True},
        {"run_name": "n", "description": "d"},
        {"logging_dir": "l", "experiment_name": "e"},
    ],
    environment=[
        {},
        {"MLFLOW_EXPERIMENT_NAME": "env"},
        {"MLFLOW_RUN_ID": "env"},
        {"MLFLOW_TAGS": '{"x": "y"}'},
        {"MLFLOW_NESTED_RUN": "True"},
    ],
    known=[False, True],
)
def mlflow(given: dict[str, Any], environment: dict[str, str], known: bool) -> Any:
    os.environ.update(environment)
    with installed("mlflow", known=known) as calls:
        tracking.MLflowTracker(**given).start()
        return calls
