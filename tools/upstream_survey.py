"""Surveys the package `accelerate` that Python finds, by importing and running it, and prints the facts as JSON.

    PYTHONPATH=wheel HF_HOME=empty python tools/upstream_survey.py

A fact is a subject with its parts, such as `accelerate.utils.gather(tensor=)` with `kind` and `default`. `follow_upstream.py` runs
this program on two wheels and compares the facts. The text of the package is not read: help texts and messages become digests.
"""

import argparse
import contextlib
import dataclasses
import enum
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import pathlib
import pkgutil
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Facts = Iterator[tuple[str, dict[str, str]]]

# Programs, menus, and a module that needs Megatron-LM: importing or calling them is not an interface.
SKIPPED_MODULES = re.compile(r"accelerate\.(test_utils\.scripts|commands\.menu|utils\.megatron_lm)\b.*|.*\.__main__")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
LAUNCH = ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"]
# Each switches on a part of the command line whose options become environment variables.
LAUNCH_MODES = {
    "plain": ["--mixed_precision", "no"],
    "compile": ["--mixed_precision", "bf16", "--dynamo_backend", "inductor"],
    "fp8": ["--mixed_precision", "fp8", "--fp8_backend", "te"],
    "FSDP": ["--mixed_precision", "no", "--use_fsdp"],
    "Megatron-LM": ["--mixed_precision", "no", "--use_megatron_lm"],
    "parallelism": ["--mixed_precision", "no", "--use_parallelism_config"],
}
USE_FLAGS = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)


class Parsed(Exception):
    """Carries the parser that a command line program was about to use."""


def digest(text: object) -> str:
    """Return a short digest, so that a changed text is noticed and its words are not kept."""
    return hashlib.sha256(str(text).encode()).hexdigest()[:8]


def spell(value: object) -> str:
    """Write a value without addresses and without folders of this machine."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = re.sub(r" at 0x\w+", "", repr(value))
    for folder, name in (
        (os.environ["HF_HOME"], "HF_HOME"),
        (tempfile.gettempdir(), "<tmp>"),
        (str(pathlib.Path.home()), "~"),
    ):
        text = text.replace(folder, name)
    return text


def is_of_package(value: object) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] == "accelerate"


def modules(warned: list[warnings.WarningMessage]) -> Facts:
    """Import each module, and yield its names, the shapes of its definitions and what it warns of."""
    import accelerate

    found = [
        "accelerate",
        *(info.name for info in pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda _: None)),
    ]
    for path in found:
        if SKIPPED_MODULES.fullmatch(path):
            continue
        try:
            module = importlib.import_module(path)
        except Exception as error:
            yield f"module {path}", {"raises": type(error).__name__}
            continue
        yield f"module {path}", {}
        for name, value in vars(module).items():
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                yield from named(path, name, value)
    for message in warned:
        if "accelerate" in pathlib.Path(message.filename).parts:
            file = message.filename.partition("/accelerate/")[2]
            yield f"warning at import: {message.category.__name__} from {file}", {"text": digest(message.message)}


def named(path: str, name: str, value: object) -> Facts:
    """Yield the facts of a public name of a module: a definition, an import of one, or a constant."""
    subject = f"{path}.{name}"
    if is_of_package(value):
        if value.__module__ == path and getattr(value, "__qualname__", name) == name:
            yield from shape(subject, value)
        else:
            yield f"import {subject}", {"from": str(value.__module__)}
    elif not callable(value) and getattr(type(value), "__module__", "") != "typing":
        yield subject, {"value": spell(value)} if name.isupper() else {"type": type(value).__name__}


def shape(subject: str, obj: Any) -> Facts:
    """Yield a function with its parameters, or a class with its bases, values and members."""
    parts = {"kind": "class" if inspect.isclass(obj) else "function"}
    if getattr(obj, "__deprecated__", None):
        parts["deprecated"] = "yes"
    if not inspect.isclass(obj):
        yield subject, parts
        yield from parameters(subject, obj)
        return
    yield subject, {**parts, "bases": ", ".join(base.__name__ for base in obj.__mro__[1:-1])}
    if issubclass(obj, enum.Enum):
        yield from ((f"{subject}.{member.name}", {"value": spell(member.value)}) for member in obj)
        return
    yield from parameters(subject, obj)
    fields = {field.name for field in dataclasses.fields(obj)} if dataclasses.is_dataclass(obj) else set()
    for name, value in vars(obj).items():
        if name.startswith("__") or name in fields:
            continue
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        kind = type(value).__name__
        yield (
            f"{subject}.{name}",
            {"kind": kind} if callable(function) or isinstance(value, property) else {"value": spell(value)},
        )
        if callable(function):
            yield from parameters(f"{subject}.{name}", function)


def parameters(subject: str, obj: Callable) -> Facts:
    """Yield each parameter; one that can be passed by position names the one before it."""
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return
    before = "nothing"
    for name, parameter in signature.parameters.items():
        parts = {"kind": parameter.kind.description}
        if parameter.default is not parameter.empty:
            parts["default"] = spell(parameter.default)
        if parameter.kind in POSITIONAL:
            parts["follows"], before = before, name
        yield f"{subject}({name}=)", parts


def instances() -> Facts:
    """Yield the public attributes of an instance of each class that needs no arguments, with plain values."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = {
        value
        for path, module in sorted(sys.modules.items())
        if path.partition(".")[0] == "accelerate" and not SKIPPED_MODULES.fullmatch(path)
        for name, value in list(vars(module).items())
        if inspect.isclass(value) and is_of_package(value) and not name.startswith("_")
        if not issubclass(value, enum.Enum) and not SKIPPED_MODULES.fullmatch(value.__module__)
    }
    for cls in sorted(classes, key=spell):
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._shared_state.clear()
        try:
            attributes = vars(cls())
        except BaseException as error:
            yield f"{spell(cls)}()", {"raises": type(error).__name__}
            continue
        for name, value in attributes.items():
            if not name.startswith("_"):
                plain = isinstance(value, (str, int, float, enum.Enum, type(None), tuple, list, dict))
                yield f"{spell(cls)}().{name}", {"value": spell(value)} if plain else {"type": type(value).__name__}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the `accelerate` program, caught where the program would parse."""

    def caught(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(self)

    main = importlib.import_module("accelerate.commands.accelerate_cli").main
    original, sys.argv = argparse.ArgumentParser.parse_args, ["accelerate"]
    argparse.ArgumentParser.parse_args = caught  # type: ignore[assignment]
    try:
        main()
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise RuntimeError("The program `accelerate` parsed nothing.")


def options(parser: argparse.ArgumentParser, name: str) -> Facts:
    """Yield each spelling of each option of a command, and of the commands below it."""
    headings = {action: group.title for group in parser._action_groups for action in group._group_actions}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                yield f"command {name} {command}", {"help": digest(inner.description)}
                yield from options(inner, f"{name} {command}")
        elif not isinstance(action, argparse._HelpAction):
            parts = {
                part: spell(getattr(action, part)) for part in ("nargs", "default", "required", "choices", "type")
            }
            parts |= {
                "action": type(action).__name__,
                "heading": str(headings.get(action)),
                "help": digest(action.help),
            }
            for spelling in action.option_strings or [action.dest]:
                yield f"{name} {spelling}", parts


def launch_variables() -> Facts:
    """Yield the environment variables that `accelerate launch` sets for a program, in each of its modes."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    for mode, words in LAUNCH_MODES.items():
        given = launch_command_parser().parse_args([*LAUNCH, *words, "program.py"])
        for prepare in ("prepare_simple_launcher_cmd_env", "prepare_multi_gpu_env"):
            try:
                made = getattr(launch, prepare)(given)
            except Exception as error:
                yield f"{prepare} ({mode})", {"raises": type(error).__name__}
                continue
            environment = made[-1] if isinstance(made, tuple) else made
            for name, value in environment.items():
                if os.environ.get(name) != value and not name.endswith("_PORT"):
                    yield f"launch sets {name} ({mode})", {"value": spell(value)}


@contextlib.contextmanager
def variables_read() -> Iterator[set[str]]:
    """Collect the environment variables that code of the package reads meanwhile."""
    names: set[str] = set()
    original = os._Environ.__getitem__

    def read(self: os._Environ, key: str) -> str:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in ("os", "collections.abc"):
            frame = frame.f_back
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "accelerate":
            names.add(key)
        return original(self, key)

    os._Environ.__getitem__ = read  # type: ignore[method-assign]
    try:
        yield names
    finally:
        os._Environ.__getitem__ = original  # type: ignore[method-assign]


def config_file(folder: pathlib.Path) -> Facts:
    """Yield the entries of the configuration file that the package writes without questions."""
    import yaml

    from accelerate.utils import write_basic_config

    write_basic_config(mixed_precision="no", save_location=str(folder / "basic.yaml"))
    for name, value in yaml.safe_load((folder / "basic.yaml").read_text("utf-8")).items():
        yield f"configuration file: {name}", {"value": spell(value)}


def checkpoint(folder: pathlib.Path) -> Facts:
    """Yield the files and keys of a checkpoint of one process, and of a saved model."""
    import torch

    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(scheduler)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
    accelerator.save_state(str(folder / "state"), safe_serialization=True)
    accelerator.save_state(str(folder / "pickled"), safe_serialization=False)
    accelerator.save_model(model, str(folder / "model"))
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        yield f"file {name}", {}
        with contextlib.suppress(Exception):  # a format that is not known here is still a file
            yield from ((f"file {name}: {key}", {"type": kind}) for key, kind in keys(content(file)))


def content(file: pathlib.Path) -> Any:
    """Return what a file of a checkpoint holds."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            return {**{key: opened.get_tensor(key) for key in opened.keys()}, "metadata": opened.metadata()}  # noqa: SIM118
    if file.suffix == ".json":
        return json.loads(file.read_text("utf-8"))
    import torch

    return torch.load(file, weights_only=False)  # this program has written it


def keys(value: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths of the keys of nested mappings, with the types of their values."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from keys(inner, f"{above}[{key!r}]")
    else:
        yield above, type(value).__name__


def distribution() -> Facts:
    """Yield what the wheel says of itself: Python, requirements, programs, and files that are not Python."""
    import accelerate

    root = pathlib.Path(accelerate.__file__).resolve().parents[1]
    for found in importlib.metadata.distributions(name="accelerate", path=[str(root)]):
        yield "requires Python", {"value": str(found.metadata["Requires-Python"])}
        yield from ((f"requires {line}", {}) for line in found.requires or ())
        yield from ((f"program {point.name}", {"value": point.value}) for point in found.entry_points)
    for file in sorted((root / "accelerate").rglob("*")):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            yield f"file of the package {file.relative_to(root).as_posix()}", {}


def survey(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """Return all facts; a part that fails is a fact, too.

    Args:
        folder: is empty, and is filled with files that the package writes.
    """
    facts: dict[str, dict[str, str]] = {}
    with warnings.catch_warnings(record=True) as warned, variables_read() as names:
        warnings.simplefilter("always")
        at_import = list(modules(warned))
        facts |= at_import
        parts: dict[str, Callable[[], Facts]] = {
            "instances": instances,
            "options": lambda: options(command_line(), "accelerate"),
            "launch": launch_variables,
            "configuration file": lambda: config_file(folder),
            "checkpoint": lambda: checkpoint(folder / "checkpoint"),
            "distribution": distribution,
        }
        for part, yields in parts.items():
            try:
                facts |= yields()
            except Exception as error:
                facts[f"survey of {part}"] = {"raises": f"{type(error).__name__}: {error}"}
        for name in USE_FLAGS:
            os.environ[name] = "true"
            list(instances())
            del os.environ[name]
    return facts | {f"reads the variable {name}": {} for name in names}


def main() -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):  # modules may print
        facts = survey(pathlib.Path(name))
    print(json.dumps(facts), flush=True)
    os._exit(0)  # without waiting for threads and hooks of what was imported


if __name__ == "__main__":
    main()
