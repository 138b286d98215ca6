"""Seeds, memory, versions and small helpers."""

import contextlib
import gc
import random

import numpy as np
import torch
from packaging.version import Version

from accelerate import Accelerator
from accelerate.utils import memory
from accelerate.utils import random as seeds
from interop.differential.core import BOTH, RANK, attempt, call, probe, words


def drawn():
    return random.random(), float(np.random.rand()), torch.rand(2)


@probe(
    "utils.random:set_seed", processes=BOTH,
    seed=[0, 42, 2**31, 2**32 - 1, 2**32, 10**30, -1, True, None, 1.5, "1", np.int64(3), torch.tensor(4)],
    device_specific=[False, True],
)  # fmt: skip
def set_seed(seed, device_specific):
    Accelerator(cpu=True)
    yield "returned", seeds.set_seed(seed, device_specific)
    yield "drawn", drawn()
    yield "seed of torch", torch.initial_seed()


GENERATORS = {"None": lambda: None, "generator": lambda: torch.Generator().manual_seed(RANK + 5)}
RNG = words("torch generator cuda xla npu xpu mps hpu mlu sdaa musa neuron python numpy TORCH Generator random", "")  # fmt: skip


def synchronized(call, generator):
    Accelerator(cpu=True)
    seeds.set_seed(RANK + 1)
    yield "result", attempt(call)
    yield "drawn", drawn()
    yield "generator", torch.rand(2, generator=generator) if generator is not None else None


@probe("utils.random:synchronize_rng_state", processes=BOTH, rng_type=RNG, generator=GENERATORS)
def synchronize_rng_state(rng_type, generator):
    from accelerate.utils import RNGType

    kind = next((member for member in RNGType if member.value == rng_type), rng_type)
    yield from synchronized(lambda: seeds.synchronize_rng_state(kind, generator), generator)


@contextlib.contextmanager
def uncollected():
    """Omit the collections of garbage, which take longer than all the rest."""
    collect = gc.collect
    gc.collect = lambda *_: 0
    try:
        yield
    finally:
        gc.collect = collect


MESSAGES = [
    "CUDA out of memory. Tried to allocate 2 GiB", "out of memory", "OUT OF MEMORY", "XPU out of memory. Tried",
    "MPS backend out of memory (MPS allocated: 9 GB)", "HIP out of memory.", "HPU out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
    "DefaultCPUAllocator: can't allocate memory: you tried", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size", "shape mismatch", "",
]  # fmt: skip
KINDS = [RuntimeError, ValueError, MemoryError, torch.OutOfMemoryError, Exception, AssertionError, NotImplementedError]


@probe("utils.memory:should_reduce_batch_size", message=MESSAGES, kind=KINDS)
def should_reduce_batch_size(message, kind):
    return memory.should_reduce_batch_size(kind(message))


@probe("utils.memory:find_executable_batch_size", starting=[-4, None, "16"])
def starting_badly(starting):
    with uncollected():
        return memory.find_executable_batch_size(lambda size: size, starting)()


@probe("utils.memory:find_executable_batch_size", function=[None, 1, "text", len])
def find_executable_batch_size_of(function):
    made = memory.find_executable_batch_size(function)
    return callable(made) if function is None else made()


OPERATIONS = words("== != > >= < <=")
call(
    "utils.versions:compare_versions", "compare_parsed_versions",
    library=[Version("1.2.3"), Version("1.2.3.dev0"), Version("2.0+cpu"), None, 1, ""],
    operation=[*OPERATIONS, "=", None, 1, "GE"], version=["1.2.3", "2.0", Version("1.2.3"), None, "1.2.3rc1"],
)  # fmt: skip
