"""Trackers by name, classes of the caller's own, and trackers of an accelerator."""

import contextlib
import json
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator, tracking
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from interop.differential.core import Words, attempt, probe
from interop.differential.probes.trackers import BOTH, PACKAGES


class Own(GeneralTracker):
    """A tracker of the caller's own."""

    name = "own"
    requires_logging_directory = False
    calls: list[Any] = []

    def __init__(self, run_name: str = "run", **kwargs: Any) -> None:
        super().__init__()
        self.calls.append(("init", run_name, kwargs))

    @property
    def tracker(self) -> Any:
        return "the object"

    def start(self) -> None:
        self.calls.append(("start",))

    def store_init_configuration(self, values: Any) -> None:
        self.calls.append(("config", values))

    def log(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append(("finish",))


WORDS = Words(
    [
        None, "all", "tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio",
        "ALL", "WandB", "nonsense", "",
    ],
)  # fmt: skip


def shown(items: Any) -> Any:
    return [item if isinstance(item, (str, LoggerType)) else type(item).__name__ for item in items]


ASK = """
from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from accelerate.state import PartialState
PartialState(cpu=True)
found = {}
for words in %r:
    for folder in (None, "logs"):
        try:
            found[repr((words, folder))] = [str(item) for item in filter_trackers(words, folder)]
        except Exception as error:
            found[repr((words, folder))] = type(error).__name__
accelerator = Accelerator(cpu=True, log_with=%r[:1] or None, project_dir="x")
print(json.dumps([[str(item) for item in get_available_trackers()], found, [str(item) for item in accelerator.log_with]]))
"""


@probe(
    "tracking:get_available_trackers", "tracking:filter_trackers", slow=True,
    packages=[[], ["wandb"], ["aim", "comet_ml"], PACKAGES],
)  # fmt: skip
def available(packages: list[str]) -> Iterator[tuple[str, Any]]:
    """A program that finds packages of these names when it starts."""
    for name in packages:
        version = "3.45.0" if name in ("aim", "comet_ml") else "99.0"
        pathlib.Path(f"{name}.py").write_text(f"__version__ = '{version}'")
        pathlib.Path(f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        pathlib.Path(f"{name}-{version}.dist-info/METADATA").write_text(text)
    words = [*WORDS, ["all"], ["wandb", "all"], ["trackio", "aim", "wandb"]]
    program = "import json, sys\nsys.path.insert(0, '.')" + ASK % (words, packages)
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    found, chosen, through = json.loads(output.splitlines()[-1])
    yield "found", found
    yield "through an accelerator", through
    yield from chosen.items()


def kind_of(**members: Any) -> type:
    """A class of a tracker with some of its members."""
    base = {
        "tracker": property(lambda self: None),
        "store_init_configuration": lambda s, v: None,
        "log": lambda s, v, step=None: None,
    }
    return type("Made", (GeneralTracker,), {**base, **members})


CLASSES = {
    "whole": lambda: kind_of(name="made", requires_logging_directory=False),
    "no name": lambda: kind_of(requires_logging_directory=False),
    "empty name": lambda: kind_of(name="", requires_logging_directory=False),
    "no folder": lambda: kind_of(name="made"),
    "no tracker": lambda: type("Made", (GeneralTracker,), {"name": "made", "requires_logging_directory": False}),
    "known name": lambda: kind_of(name="wandb", requires_logging_directory=False),
    "no tracker class": lambda: int,
    "an object": lambda: 3,
}


@contextlib.contextmanager
def registry_kept() -> Iterator[None]:
    """Put the table of trackers back, and what ours knows of their libraries."""
    registry = sys.modules.get("accelerate.trackers.registry")
    tables = [tracking.LOGGER_TYPE_TO_CLASS, getattr(registry, "_AVAILABLE", {})]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)


@probe("tracking:register_tracker_class", "tracking:GeneralTracker", "tracking:filter_trackers", kind=CLASSES)
def register(kind: Any) -> Iterator[tuple[str, Any]]:
    PartialState(cpu=True)
    with registry_kept(), warnings.catch_warnings():
        yield "registered", attempt(tracking.register_tracker_class, kind)
        yield "asked for", attempt(lambda: shown(tracking.filter_trackers([kind.name])))
        yield "built", attempt(lambda: type(kind()).__name__)
        yield "blank", attempt(lambda: type(kind(_blank=True)).__name__)


@probe(
    "accelerator:Accelerator", processes=BOTH, log_with=["own", "own class", "none", "two", "nonsense"],
    config=[None, {}, {"a": 1}, {"a": {"b": [1]}}], steps=[None, 3],
)  # fmt: skip
def through_accelerator(log_with: str, config: Any, steps: Any) -> Iterator[tuple[str, Any]]:
    """init_trackers, log, get_tracker and trackers of an accelerator."""
    Own.calls = []
    with registry_kept(), warnings.catch_warnings():
        if log_with == "own class":
            tracking.register_tracker_class(Own)
        given = {
            "own": lambda: Own(),
            "own class": lambda: "own",
            "none": lambda: None,
            "two": lambda: [Own(), Own()],
            "nonsense": lambda: "x",
        }
        accelerator = attempt(lambda: Accelerator(cpu=True, log_with=given[log_with]()))
        if isinstance(accelerator, Exception):
            yield "refused", accelerator
            return
        yield "before", attempt(accelerator.get_tracker, "own") if log_with != "none" else None
        yield "init", attempt(accelerator.init_trackers, "project", config=config, init_kwargs={"own": {"x": 1}})
        yield "log", attempt(accelerator.log, {"loss": 0.5}, step=steps, log_kwargs={"own": {"y": 2}})
        yield "count", len(accelerator.trackers)
        yield "calls", list(Own.calls)
        yield "tracker", type(attempt(accelerator.get_tracker, "own")).__name__
        yield "unwrapped", attempt(accelerator.get_tracker, "own", unwrap=True)
        yield "unknown", type(attempt(accelerator.get_tracker, "other")).__name__
        if not accelerator.use_distributed:
            Own.calls.clear()
            yield "end", attempt(accelerator.end_training)
            yield "afterwards", (list(Own.calls), len(accelerator.trackers))
