"""Differential probes: the same calls on this package and on the wheel of 1.15.0, their results as plain JSON.

A probe is a function that calls the public interface and returns what a caller sees. `@probe(names, **axes)` runs it once for every
combination of its axes' values; each result, or the kind of exception, is one comparison. This file and the probes import
nothing of this package but `accelerate`, so that the same program runs on both:

    python -m interop.differential.core --out results.json          one process
    torchrun --nproc_per_node 2 -m interop.differential.core ...    the probes for two processes
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import datetime
import enum
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
RECORD = HERE.parents[1] / "architecture" / "record"
LIMIT_S = 300
BOTH = (1, 2)
RANK = int(os.environ.get("RANK", 0))
PROBES: "list[Probe]" = []


class Words(list):
    """An axis that holds the words a string parameter may take: which of them are accepted is recorded."""


def words(text: str, *more: Any) -> Words:
    """Return the words of a text, and values that are none."""
    return Words([*text.split(), *more])


@dataclasses.dataclass(frozen=True)
class Probe:
    """One probed behaviour.

    Attributes:
        name: area and function, the beginning of its cases' names.
        covers: recorded definitions it calls, such as `accelerate.utils.other:save`.
        run: the function; a generator yields (label, value) pairs, each of them a comparison.
        axes: parameter -> list of values (each case gets a deep copy), or label -> factory.
        processes: the world sizes it is run with.
        slow: it is left to the whole run.
        quick: the quick run takes this many of its cases, spread over all of them.
    """

    name: str
    covers: tuple[str, ...]
    run: Callable[..., Any]
    axes: dict[str, Any]
    processes: tuple[int, ...]
    slow: bool
    quick: int

    def cases(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the name and the arguments of each combination; factories are called when the case runs."""
        labelled = []
        for axis, values in self.axes.items():
            if isinstance(values, dict):
                labelled.append([(axis, label, make) for label, make in values.items()])
            else:
                labelled.append([(axis, label_of(v), functools.partial(copy.deepcopy, v)) for v in values])
        for combination in itertools.product(*labelled):
            words = ", ".join(f"{axis}={label}" for axis, label, _ in combination)
            yield f"{self.name}({words})", {axis: make for axis, _, make in combination}


@functools.cache
def record(name: str) -> Any:
    """Read a part of the recorded interface of 1.15.0."""
    return json.loads((RECORD / f"{name}-1.15.0.json").read_text("utf-8"))


def recorded(module: str, pattern: str) -> list[str]:
    """Return the recorded definitions of a module whose names match a regular expression."""
    names = (name.partition(":") for name in record("accelerate")["definitions"])
    return [name for where, _, name in names if where == f"accelerate.{module}" and re.fullmatch(pattern, name)]


def properties(definition: str) -> list[str]:
    """Return the recorded properties of a class."""
    members = record("accelerate")["definitions"][f"accelerate.{definition}"]["members"]
    return [name for name, member in members.items() if member["kind"] == "property"]


def probe(
    *covers: str, processes: tuple[int, ...] | int = 1, slow: bool = False, quick: int = 6, **axes: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a probe; `covers` names recorded definitions without `accelerate.`, as `utils.other:save`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        sizes = (processes,) if isinstance(processes, int) else processes
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        PROBES.append(Probe(name, tuple(f"accelerate.{c}" for c in covers), function, axes, sizes, slow, quick))
        return function

    return register


def call(cover: str, label: str = "", /, **more: Any) -> None:
    """Register a probe that calls the function it covers, with its axes by name where they are its parameters, else in order."""
    module, _, name = cover.partition(":")

    def run(**given: Any) -> Any:
        function = getattr(importlib.import_module(f"accelerate.{module}"), name)
        by_name = given.keys() <= inspect.signature(function).parameters.keys()
        return function(**given) if by_name else function(*given.values())

    run.__name__, run.__module__ = label or name, sys._getframe(1).f_globals["__name__"]
    probe(cover, **more)(run)


def short(name: str, run: Callable[..., Any], /, *covers: str, **more: Any) -> None:
    """Register a probe that is one expression."""
    run.__name__ = name
    probe(*covers, **more)(run)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a call returns, or the exception."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def label_of(value: object) -> str:
    """Spell a value in a case's name."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return re.sub(r" at 0x\w+", "", repr(value))[:120]


def number(value: float) -> Any:
    """Round to six digits, so that another order of additions is no difference."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def array(kind: str, value: np.ndarray, more: dict[str, Any]) -> dict[str, Any]:
    """Describe the elements of a tensor or array: all of up to 64, of larger ones the first and a sum."""
    flat = value.reshape(-1)
    listed = [describe(item) for item in flat[:64].tolist()]
    tail = [] if flat.size <= 64 else [number(float(np.abs(flat.astype(np.float64)).sum()))]
    return {kind: str(value.dtype), "shape": list(value.shape), "values": listed + tail, **more}


def tensor(value: torch.Tensor) -> dict[str, Any]:
    """Describe a tensor by its elements, dtype, kind of device and whether gradients flow to it."""
    more = {
        "device": value.device.type, "dtype": str(value.dtype), "grad": value.requires_grad,
        "class": type(value).__name__,
    }  # fmt: skip
    if value.is_meta:
        return {"tensor": str(value.dtype), "shape": list(value.shape), **more}
    plain = value.detach()
    if hasattr(plain, "full_tensor"):
        plain = plain.full_tensor()
    if plain.is_sparse or plain.is_quantized or plain.dtype.itemsize < 1:
        plain = plain.to_dense()
    if plain.is_floating_point() and plain.dtype is not torch.float64:
        plain = plain.float()
    return array("tensor", plain.cpu().numpy(), more)


def describe(value: Any, depth: int = 0) -> Any:
    """Turn a result into JSON that is equal where a caller sees the same."""
    if value is None or isinstance(value, (bool, int)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, float):
        return number(value)
    if depth > 8:
        return "..."
    inner = functools.partial(describe, depth=depth + 1)
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, np.ndarray):
        return array("array", value, {}) if value.dtype != object else {"array": [inner(v) for v in value.tolist()]}
    if isinstance(value, np.generic):
        return {f"numpy.{type(value).__name__}": inner(value.item())}
    if isinstance(value, BaseException):
        return {"exception": [c.__name__ for c in type(value).__mro__ if c not in (BaseException, object)]}
    if isinstance(value, type):
        return f"class {value.__name__}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        return {type(value).__name__: [[inner(k), inner(v)] for k, v in value.items()]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {type(value).__name__: [[f, inner(v)] for f, v in zip(value._fields, value, strict=True)]}
    if isinstance(value, (list, tuple, collections.deque)):
        return {type(value).__name__: [inner(v) for v in value]}
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: sorted((inner(v) for v in value), key=repr)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: inner(getattr(value, f.name, "<absent>")) for f in dataclasses.fields(value) if f.repr}
        return {f"dataclass {type(value).__name__}": fields}
    if isinstance(value, (torch.dtype, torch.device, bytes, complex, range, slice, datetime.timedelta)):
        return scrub(repr(value))
    if isinstance(value, pathlib.PurePath):
        return {"path": scrub(str(value))}
    if isinstance(value, argparse.Namespace):
        return {"Namespace": {k: inner(v) for k, v in sorted(vars(value).items())}}
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"{type(value).__name__} {value.__name__}"
    return f"object {type(value).__name__}"


def scrub(text: str) -> str:
    """Take this case's folder and addresses out of a text."""
    folder = os.getcwd()
    return re.sub(r"0x[0-9a-f]{6,}", "0x", text.replace(os.path.realpath(folder), "<tmp>").replace(folder, "<tmp>"))


def reset() -> None:
    """Start every case from no state, the same random numbers and the environment of the program."""
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import imports

    getattr(imports, "_found", set()).clear()  # ours looks a package that it has found, a faked one too, up no more
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


_empty: list[str] = []


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run a case in a folder, an environment and states of its own, without a word on the terminal."""
    before, here, argv = dict(os.environ), os.getcwd(), list(sys.argv)
    folder = _empty.pop() if _empty else tempfile.mkdtemp()  # to make and remove one takes longer than most cases
    os.chdir(folder)
    reset()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        os.chdir(here)
        sys.argv[:] = argv
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if os.path.isdir(folder) and not os.listdir(folder):
            _empty.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def results_of(item: Probe, name: str, makers: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, Any]]:
    """Run one case and return its comparisons."""
    with isolated():
        try:
            given = {axis: make() for axis, make in makers.items()}
            result = item.run(**given)
            if isinstance(result, types.GeneratorType):
                for label, value in result:
                    yield f"{name} {label}", describe(value)
                return
            yield name, describe(result)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # an exit is a result of a command as well
            kinds = [c.__name__ for c in type(error).__mro__ if c not in (BaseException, object)]
            yield name, {"raises": kinds, "message": scrub(f"{error}")[:200]}


def load() -> list[Probe]:
    """Import every module of probes."""
    if not PROBES:
        for path in sorted((HERE / "probes").glob("[a-z]*.py")):
            importlib.import_module(f"interop.differential.probes.{path.stem}")
    return PROBES


def execute(processes: int, whole: bool, only: str = "") -> dict[str, Any]:
    """Run the probes for a world size; return case -> result.

    Args:
        processes: the world size that the program was started with.
        whole: run every case, also of the slow probes.
        only: a regular expression that names of probes must contain.
    """
    results: dict[str, Any] = {}
    for item in load():
        if processes not in item.processes or item.slow and not whole or not re.search(only, item.name):
            continue
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
        gc.freeze()  # collections are many, and pass over what imports and former probes have left
        cases = list(item.cases())
        step = 1 if whole else math.ceil(len(cases) / item.quick)
        for name, makers in cases[::step]:
            for label, result in results_of(item, name, makers):
                assert label not in results, f"two cases are called {label!r}"
                results[label] = result
            if processes > 1:
                torch.distributed.barrier()
    faulthandler.cancel_dump_traceback_later()
    return results


def main() -> None:
    """Run the probes on the package that Python finds as `accelerate`, and write the results of each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the rank's number is put before the suffix")
    parser.add_argument("--whole", action="store_true", help="run every case, also of the slow probes")
    parser.add_argument("--only", default="", help="a regular expression for names of probes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if processes > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    results = execute(processes, options.whole, options.only)
    options.out.with_suffix(f".{rank}.json").write_text(json.dumps(results), "utf-8")
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Probes register with the module by its name, which is not the one that runs as a program.
    from interop.differential.core import main as run

    run()
