"""Seeds, memory, versions and small helpers."""

import contextlib
import gc
import io
import os
import platform
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from accelerate import Accelerator, PartialState
from accelerate.utils import memory, torch_xla, versions
from accelerate.utils import random as seeds
from interop.differential.core import Words, probe
from interop.differential.probes.nested import outcome

BOTH = (1, 2)
RANK = int(os.environ.get("RANK", 0))


def drawn() -> Any:
    """Draw a number from each generator."""
    return random.random(), float(np.random.rand()), torch.rand(2)


# Random numbers


@probe(
    "utils.random:set_seed",
    processes=BOTH,
    seed=[0, 42, 2**31, 2**32 - 1, 2**32, 10**30, -1, True, None, 1.5, "1", np.int64(3), torch.tensor(4)],
    device_specific=[False, True],
)
def set_seed(seed: Any, device_specific: bool) -> Iterator[tuple[str, Any]]:
    Accelerator(cpu=True)
    yield "returned", seeds.set_seed(seed, device_specific)
    yield "drawn", drawn()
    yield "seed of torch", torch.initial_seed()


@probe("utils.random:set_seed", deterministic=[False, True], seed=[0, 7])
def set_seed_deterministic(deterministic: bool, seed: int) -> Iterator[tuple[str, Any]]:
    try:
        seeds.set_seed(seed, deterministic=deterministic)
        yield (
            "algorithms",
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )
        yield "drawn", drawn()
        yield "benchmark", torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


GENERATORS: dict[str, Any] = {"None": lambda: None, "generator": lambda: torch.Generator().manual_seed(RANK + 5)}
RNG = Words(
    [
        "torch",
        "generator",
        "cuda",
        "xla",
        "npu",
        "xpu",
        "mps",
        "hpu",
        "mlu",
        "sdaa",
        "musa",
        "neuron",
        "python",
        "numpy",
        "TORCH",
        "Generator",
        "",
        "random",
    ]
)


def synchronized(call: Any, generator: Any) -> Iterator[tuple[str, Any]]:
    """Seed each rank differently, synchronise, and draw."""
    Accelerator(cpu=True)
    seeds.set_seed(RANK + 1)
    yield "result", outcome(call)
    yield "drawn", drawn()
    yield "generator", torch.rand(2, generator=generator) if generator is not None else None


@probe("utils.random:synchronize_rng_state", processes=BOTH, rng_type=RNG, generator=GENERATORS)
def synchronize_rng_state(rng_type: str, generator: Any) -> Iterator[tuple[str, Any]]:
    from accelerate.utils import RNGType

    kind = next((member for member in RNGType if member.value == rng_type), rng_type)
    yield from synchronized(lambda: seeds.synchronize_rng_state(kind, generator), generator)


@probe(
    "utils.random:synchronize_rng_state",
    processes=BOTH,
    rng_type=[None, "torch", "generator", "nothing", 1],
    generator=GENERATORS,
)
def synchronize_rng_state_by_name(rng_type: Any, generator: Any) -> Iterator[tuple[str, Any]]:
    yield from synchronized(lambda: seeds.synchronize_rng_state(rng_type, generator), generator)


@probe(
    "utils.random:synchronize_rng_states",
    processes=BOTH,
    rng_types=[
        *([], ["torch"], ("torch", "generator"), ["generator"], ["generator", "torch"], ["cuda"], ["torch", "torch"]),
        *("torch", ["TORCH"], ["nothing"], ["torch", "nothing"], [None], {"torch"}, [""]),
    ],
    generator=GENERATORS,
)
def synchronize_rng_states(rng_types: Any, generator: Any) -> Iterator[tuple[str, Any]]:
    yield from synchronized(lambda: seeds.synchronize_rng_states(rng_types, generator), generator)


# Memory


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Leave out the collections of garbage, which take longer than all the rest."""
    collect = gc.collect
    gc.collect = lambda *_: 0
    try:
        yield
    finally:
        gc.collect = collect


@probe("utils.memory:clear_device_cache", garbage_collection=[False, True, None])
def clear_device_cache(garbage_collection: Any) -> Any:
    with uncollected():
        return memory.clear_device_cache(garbage_collection)


@probe(
    "utils.memory:release_memory",
    objects=[[], [None], [1, "a"], [torch.ones(2), [torch.ones(2)]], [torch.nn.Linear(1, 1), {}, ()]],
)
def release_memory(objects: Any) -> Any:
    with uncollected():
        return memory.release_memory(*objects), objects


MESSAGES = [
    *("CUDA out of memory. Tried to allocate 2 GiB", "CUDA out of memory.", "out of memory", "OUT OF MEMORY"),
    *(
        "MPS backend out of memory (MPS allocated: 9 GB)",
        "XPU out of memory. Tried",
        "NPU out of memory",
        "HIP out of memory.",
    ),
    *(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
        "cuDNN error",
    ),
    *(
        "DefaultCPUAllocator: can't allocate memory: you tried",
        "DefaultCPUAllocator: not enough memory",
        "can't allocate memory",
    ),
    *(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
        "device-side assert triggered",
        "shape mismatch",
        "",
        "MLU out of memory.",
    ),
    *(
        "HPU out of memory",
        "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size",
        "MUSA out of memory.",
    ),
    "SDAA out of memory.",
]
KINDS = [RuntimeError, ValueError, MemoryError, torch.OutOfMemoryError, Exception, AssertionError, NotImplementedError]


@probe("utils.memory:should_reduce_batch_size", message=MESSAGES, kind=KINDS)
def should_reduce_batch_size(message: str, kind: Any) -> bool:
    return memory.should_reduce_batch_size(kind(message))


@probe("utils.memory:should_reduce_batch_size", kind=KINDS, arguments=[(), ("CUDA out of memory.", 1), (1,), (None,)])
def should_reduce_batch_size_of(kind: Any, arguments: Any) -> bool:
    return memory.should_reduce_batch_size(kind(*arguments))


@probe("utils.memory:should_reduce_batch_size", value=[None, "CUDA out of memory.", 1])
def should_reduce_batch_size_for_others(value: Any) -> bool:
    return memory.should_reduce_batch_size(value)


@probe(
    "utils.memory:find_executable_batch_size",
    starting=[128, 16, 1, 0, 7, 1000, 8.0],
    limit=[200, 20, 3, 0],
    kind=[RuntimeError, torch.OutOfMemoryError, ValueError],
    halve=[False, True],
)
def find_executable_batch_size(starting: Any, limit: int, kind: Any, halve: bool) -> Iterator[tuple[str, Any]]:
    tried: list[Any] = []

    def smaller() -> int:
        return tried[-1] // 2

    @memory.find_executable_batch_size(starting_batch_size=starting, reduce_batch_size_fn=smaller if halve else None)
    def train(batch_size: Any, *args: Any, **kwargs: Any) -> Any:
        tried.append(batch_size)
        if batch_size > limit:
            raise kind("CUDA out of memory.")
        return batch_size, args, kwargs

    with uncollected():
        yield "first", outcome(lambda: train(1, b=2))
        yield "second", outcome(lambda: train())
    yield "tried", tried


@probe(
    "utils.memory:find_executable_batch_size",
    form=["bare", "called", "keyword", "lambda", "method"],
    given=[(), (1,), (1, 2), (128, 1, 2)],
    keywords=[{}, {"rate": 1}, {"batch_size": 3}, {"unknown": 1}],
)
def decorate_for_batch_size(form: str, given: Any, keywords: Any) -> Any:
    def train(batch_size: int, rate: float = 0.5, other: Any = None) -> Any:
        return batch_size, rate, other

    class Trainer:
        def train(self, batch_size: int, rate: float = 0.5, other: Any = None) -> Any:
            return batch_size, rate, other

    search = memory.find_executable_batch_size
    made = {
        "bare": lambda: search(train),
        "called": lambda: search()(train),
        "keyword": lambda: search(function=train, starting_batch_size=2),
        "lambda": lambda: search(lambda size, rate=1: (size, rate), 4),
        "method": lambda: search(Trainer().train),
    }[form]()
    with uncollected():
        return made(*given, **keywords)


@probe("utils.memory:find_executable_batch_size", starting=[-4, None, "16"])
def starting_badly(starting: Any) -> Any:
    with uncollected():
        return memory.find_executable_batch_size(lambda size: size, starting)()


@probe("utils.memory:find_executable_batch_size", function=[None, 1, "text", len])
def find_executable_batch_size_of(function: Any) -> Any:
    made = memory.find_executable_batch_size(function)
    return callable(made) if function is None else made()


# Versions

OPERATIONS = Words(["==", "!=", ">", ">=", "<", "<="])


@probe(
    "utils.versions:compare_versions",
    library=[Version("1.2.3"), Version("1.2.3.dev0"), Version("2.0+cpu"), None, 1, ""],
    operation=[*OPERATIONS, "=", None, 1, "GE"],
    version=["1.2.3", "2.0", Version("1.2.3"), None, "1.2.3rc1"],
)
def compare_parsed_versions(library: Any, operation: Any, version: Any) -> bool:
    return versions.compare_versions(library, operation, version)


@probe(
    "utils.versions:is_torch_version",
    operation=OPERATIONS,
    version=["2.13.0+cpu", "2.13.0.dev1", "0", "1!1", Version("2.0"), None, "2.13.0rc1"],
)
def compare_torch_version(operation: str, version: Any) -> bool:
    return versions.is_torch_version(operation, version)


# Progress bars and torch_xla


def bar(call: Any) -> Iterator[tuple[str, Any]]:
    """Make a bar, use it up and say how it is configured."""
    PartialState(cpu=True)
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        made = call()
        yield "options", (made.disable, made.total, made.desc or "", made.n, made.leave)
        yield "items", list(made) if made.iterable is not None else made.update(2)
        made.close()
    yield "spoke", bool(shown.getvalue())


@probe(
    "utils.tqdm:tqdm",
    processes=BOTH,
    args=[(), ([1, 2],), (range(3), "text"), ({"a": 1},), ("ab",), (None,)],
    main_process_only=["left out", True, False, None, 1],
    keywords=[
        {},
        {"disable": True},
        {"disable": False},
        {"disable": None},
        {"desc": "d", "total": 7},
        {"leave": False},
    ],
)
def tqdm(args: Any, main_process_only: Any, keywords: Any) -> Iterator[tuple[str, Any]]:
    from accelerate.utils import tqdm as progress

    choice = {} if main_process_only == "left out" else {"main_process_only": main_process_only}
    yield from bar(lambda: progress(*args, **choice, **keywords))


@probe(
    "utils.tqdm:tqdm",
    args=[(True, [1]), (False, [1]), (True,), (1,), (1, [2]), (None, [1])],
    keywords=[{}, {"iterable": [1]}, {"unknown": 1}],
)
def tqdm_badly(args: Any, keywords: Any) -> Iterator[tuple[str, Any]]:
    from accelerate.utils import tqdm as progress

    yield from bar(lambda: progress(*args, **keywords))


@probe("utils.tqdm:tqdm")
def tqdm_names() -> Iterator[tuple[str, Any]]:
    import accelerate.utils
    import accelerate.utils.tqdm as module

    yield "function", (callable(accelerate.utils.tqdm), accelerate.utils.tqdm.__name__)
    yield "module", isinstance(sys.modules["accelerate.utils.tqdm"], types.ModuleType)
    yield "import as", callable(module)


@probe("utils.torch_xla:install_xla", upgrade=[False, True, None, "yes"], colab=[False, True])
def install_xla(upgrade: Any, colab: bool) -> Iterator[tuple[str, Any]]:
    """No command is run: it is recorded."""
    ran: list[Any] = []

    def record(command: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    kept = {name: getattr(subprocess, name) for name in ("run", "check_call", "call", "check_output", "Popen")}
    shell = os.system
    if colab:
        module = types.ModuleType("IPython")
        shell_class = type("Shell", (), {"__module__": "google.colab._shell"})
        module.get_ipython = shell_class  # type: ignore[attr-defined]
        sys.modules["IPython"] = module
    try:
        for name in kept:
            setattr(subprocess, name, record)
        os.system = record  # type: ignore[assignment]
        yield "result", outcome(lambda: torch_xla.install_xla(upgrade))
    finally:
        for name, function in kept.items():
            setattr(subprocess, name, function)
        os.system = shell
        if colab:
            del sys.modules["IPython"]
    yield "ran something", bool(ran)


@probe(
    "utils.other:check_os_kernel",
    system=["Linux", "Darwin", "Windows"],
    release=["5.4.0", "5.5.0", "4.19.1-generic", "6.1", "5.15.0-azure", "odd", "5.4.99", "10.0"],
)
def check_os_kernel(system: str, release: str) -> Iterator[tuple[str, Any]]:
    import logging

    from accelerate.utils import other

    PartialState(cpu=True)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("accelerate.utils.other")
    kept, propagate = platform.uname, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    platform.uname = lambda: types.SimpleNamespace(
        system=system, release=release, machine="x", version="", node="", processor=""
    )  # type: ignore
    try:
        yield "result", outcome(other.check_os_kernel)
    finally:
        platform.uname = kept
        logger.removeHandler(handler)
        logger.propagate = propagate
    yield "said", [record.levelname for record in records]
