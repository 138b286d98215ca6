"""Lists the work that another release of upstream brings: its interface against the recorded one.

    python tools/follow_upstream.py 1.16.0            the wheel of this version, fetched into .cache/peer/1.16.0 once
    python tools/follow_upstream.py some.whl          a wheel that is there
    python tools/follow_upstream.py folder            a folder that a wheel was unpacked or installed into
    python tools/follow_upstream.py --json 1.16.0     the same for a program

The wheel is imported in a separate process, where it is first on the path, and inspected; its text is not read. `removed` and
`changed` are recorded facts that do not hold there, as `make interface` counts them, `added` is what the record does not have:
modules, names, parameters, members, fields, commands and options. Exit status 0 where there is no work, 1 where there is.
"""

import argparse
import contextlib
import dataclasses
import enum
import importlib
import inspect
import io
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # behind everything else: the wheel comes first

from architecture import check_api  # noqa: E402

KINDS = ("added", "removed", "changed")
# What the record omits: helpers of upstream's own tests and of its menus, and a module that needs Megatron-LM.
NOT_RECORDED = re.compile(r"accelerate\.(test_utils|commands\.menu|utils\.megatron_lm)\b.*|.*\.__main__")
# How a gap is worded whose subject is not there at all.
GONE = re.compile(r"(.+ )?is missing|ModuleNotFoundError: .*|its module does not import|lacks its default")
# What an option says of itself, but for its spellings.
OF_OPTION = ("action", "nargs", "default", "required", "choices")


class Parsed(Exception):
    """Carries the parser that a command line program was about to use."""


def unpacked(given: str, scratch: pathlib.Path) -> pathlib.Path:
    """Return a folder to put first on the path.

    Args:
        given: a folder, a wheel, or a version.
        scratch: where a wheel is unpacked; it must outlive the use of the folder.

    Raises:
        ValueError: when it is none of the three, or holds no package `accelerate`.
    """
    folder = pathlib.Path(given)
    if folder.is_file() and folder.suffix == ".whl":
        zipfile.ZipFile(folder).extractall(scratch)
        folder = scratch
    elif not folder.is_dir():
        if not re.fullmatch(r"\d+(\.\d+)+\w*", given):
            raise ValueError(f"{given!r} is no folder, no wheel and no version; give one, for instance 1.16.0.")
        folder = ROOT / ".cache/peer" / given
        if not (folder / "accelerate").is_dir():
            wanted = ["--no-deps", "--target", str(folder), f"accelerate=={given}"]
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
    if not (folder / "accelerate").is_dir():
        raise ValueError(f"{given!r} holds no package `accelerate`; give the folder that a wheel was unpacked into.")
    return folder


def inspect_wheel(folder: pathlib.Path, record: pathlib.Path = check_api.RECORD) -> dict[str, list[str]]:
    """Return the work in the three kinds, each a sorted list of lines, from a process that imports the wheel.

    Args:
        folder: holds the package `accelerate` of the wheel.
        record: the folder of the record.

    Raises:
        RuntimeError: with the end of what the process wrote, when it failed.
    """
    folder = folder.resolve()
    command = [sys.executable, __file__, "--record", str(record), "--inspect", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"The package in {folder} could not be inspected:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gaps(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each recorded fact that does not hold for the package that imports, as its kind and its line.

    Left out is what downstream libraries import: it is recorded as names, too, or depends on what is installed.
    """
    for fact in check_api.collect(list(record["modules"])):
        if fact.gap:
            yield ("removed" if GONE.fullmatch(fact.gap) else "changed"), str(fact)


def additions(record: dict[str, Any]) -> Iterator[str]:
    """Yield what the package that imports has, and the record has not."""
    import accelerate

    for found in pkgutil.walk_packages(accelerate.__path__, "accelerate.", onerror=lambda name: None):
        path = found.name
        known = record["modules"].get(path)
        if known is None and path not in record["not_importable_here"] and not NOT_RECORDED.fullmatch(path):
            yield f"module {path}"
    for path, known in record["modules"].items():
        try:
            module = importlib.import_module(path)
        except Exception:  # a gap, which `gaps` reports
            continue
        for name, value in vars(module).items():
            if name not in known and is_interface(module, name, value):
                yield f"{path}.{name}"
    for home, recorded in record["definitions"].items():
        path, name = home.split(":")
        with contextlib.suppress(Exception):  # what is not there is a gap
            yield from shape_additions(f"{path}.{name}", getattr(importlib.import_module(path), name), recorded)


def is_interface(module: types.ModuleType, name: str, value: object) -> bool:
    """Return whether a name counts: public, and made by this module or, in a package's front, by another one of `accelerate`."""
    if name.startswith("_"):
        return False
    if inspect.isclass(value) or inspect.isfunction(value):
        home = value.__module__
        return home == module.__name__ or (hasattr(module, "__path__") and home.split(".")[0] == "accelerate")
    return name.isupper() and not inspect.ismodule(value)


def shape_additions(subject: str, obj: Any, recorded: dict[str, Any]) -> Iterator[str]:
    """Yield the parameters of a function, or the members, fields and parameters of a class, that are not recorded."""
    yield from further_parameters(subject, obj, recorded.get("signature") or recorded.get("init"))
    if recorded["kind"] == "enum":
        yield from (f"{subject}.{member.name}" for member in obj if member.name not in recorded["members"])
    if not inspect.isclass(obj) or issubclass(obj, enum.Enum):
        return
    fields = {field.name for field in dataclasses.fields(obj)} if dataclasses.is_dataclass(obj) else set()
    yield from (f"{subject}.{field}" for field in fields - set(recorded.get("fields", {})))
    members = recorded.get("members", {})
    for name, value in vars(obj).items():
        callable_or_property = callable(value) or isinstance(value, (property, staticmethod, classmethod))
        if not name.startswith("_") and name not in {*members, *fields} and callable_or_property:
            yield f"{subject}.{name}"
        elif name in members:
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            yield from further_parameters(f"{subject}.{name}", function, members[name].get("signature"))


def further_parameters(subject: str, obj: object, recorded: list[dict[str, str]] | None) -> Iterator[str]:
    """Yield the parameters that a callable has beyond the recorded ones."""
    if recorded is None or not callable(obj):
        return
    known = {parameter["name"] for parameter in recorded}
    yield from (f"{subject}({name}=)" for name in inspect.signature(obj).parameters if name not in known)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the `accelerate` program, caught where the program would parse."""

    def caught(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parsed(self)

    main = importlib.import_module("accelerate.commands.accelerate_cli").main
    original, sys.argv = argparse.ArgumentParser.parse_args, ["accelerate"]
    argparse.ArgumentParser.parse_args = caught  # type: ignore[assignment]
    try:
        main()
    except Parsed as found:
        return found.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise RuntimeError("The program `accelerate` parsed nothing.")


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below one."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: inner for choices in found for name, inner in choices.items()}


def options(parser: argparse.ArgumentParser, recorded: dict[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """Yield the differences of a command's options, and of the commands below it, each as its kind and its line."""
    ours: dict[str, argparse.Action] = {
        spelling: action
        for action in parser._actions
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        for spelling in action.option_strings or [action.dest]
    }
    known = {spelling: entry for entry in recorded["arguments"] for spelling in entry["options"] or [entry["dest"]]}
    yield from (("added", f"{name} {spelling}") for spelling in ours if spelling not in known)
    yield from (("removed", f"{name} {spelling}") for spelling in known if spelling not in ours)
    for spelling in ours.keys() & known.keys():
        action, entry = ours[spelling], known[spelling]
        choices = list(action.choices) if action.choices else None
        now = [
            type(action).__name__.strip("_"),
            action.nargs,
            check_api.spell(action.default),
            action.required,
            choices,
        ]
        before = [entry[part] for part in OF_OPTION]
        for part, is_now, was in zip(OF_OPTION, now, before, strict=True):
            if is_now != was:
                yield "changed", f"{name} {spelling}: {part} is {is_now}, recorded {was}"
    below, known_below = subparsers(parser), recorded.get("subcommands", recorded.get("commands", {}))
    yield from (("added", f"command {name} {command}") for command in below if command not in known_below)
    yield from (("removed", f"command {name} {command}") for command in known_below if command not in below)
    for command in below.keys() & known_below.keys():
        yield from options(below[command], known_below[command], f"{name} {command}")


def inspect_here(folder: pathlib.Path) -> dict[str, list[str]]:
    """Compare the package that imports in this process, which must be the one in the folder."""
    import accelerate

    if folder not in pathlib.Path(accelerate.__file__).resolve().parents:
        raise RuntimeError(f"`accelerate` was imported from {accelerate.__file__}, not from {folder}.")
    work: dict[str, set[str]] = {kind: set() for kind in KINDS}
    record = check_api.load("accelerate-1.15.0.json")
    found: Iterable[tuple[str, str]] = [
        *gaps(record),
        *(("added", line) for line in additions(record)),
        *options(command_line(), {"arguments": [], **check_api.load("cli-1.15.0.json")}, "accelerate"),
    ]
    for kind, line in found:
        work[kind].add(line)
    return {kind: sorted(lines) for kind, lines in work.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", help="a version, a wheel, or a folder that a wheel was unpacked into")
    parser.add_argument("--record", type=pathlib.Path, default=check_api.RECORD, help="the folder of the record")
    parser.add_argument("--json", action="store_true", help="the three lists, for a program")
    parser.add_argument("--inspect", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    check_api.RECORD = given.record
    if given.inspect:
        with contextlib.redirect_stdout(io.StringIO()):  # modules may print while they are imported
            work = inspect_here(pathlib.Path(given.wheel))
        print(json.dumps(work))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            work = inspect_wheel(unpacked(given.wheel, pathlib.Path(scratch)), given.record)
        except ValueError as error:
            parser.error(str(error))
    if given.json:
        print(json.dumps(work))
    else:
        for kind in KINDS:
            print("\n".join([f"{kind}: {len(work[kind])}", *(f"  {line}" for line in work[kind])]))
    return any(work.values())


if __name__ == "__main__":
    sys.exit(main())
