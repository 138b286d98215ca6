"""Finding a batch size."""

import gc
import weakref

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.extensions.ema.averages import Ema
from accelerate.runtime import storage
from accelerate.utils import memory


@pytest.fixture(autouse=True)
def few_objects():
    """Each attempt collects garbage; omit what a long test session has alive, which takes half a second a time."""
    gc.freeze()
    yield
    gc.unfreeze()


def out_of_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def test_sizes_shrink_by_a_tenth_down_to_zero():
    tried = []

    @memory.find_executable_batch_size
    def train(batch_size):
        tried.append(batch_size)
        out_of_memory()

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero.*`train`"):
        train()
    assert tried[:6] == [128, 115, 103, 92, 82, 73] and tried[-3:] == [3, 2, 1]


def test_passing_the_batch_size_is_refused_before_anything_runs_and_other_errors_pass():
    @memory.find_executable_batch_size
    def train(batch_size, rate):
        raise ValueError("something else")

    @memory.find_executable_batch_size
    def nothing():
        raise AssertionError("must not run")

    with pytest.raises(TypeError, match="`train`.*`train\\(0.1\\)`"):
        train(8, 0.1)
    with pytest.raises(TypeError, match="`nothing`"):
        nothing()
    with pytest.raises(ValueError, match="something else"):
        train(0.1)


def test_a_retry_is_logged_and_what_the_failed_try_built_is_freed_before(caplog, monkeypatch):
    monkeypatch.setitem(storage.process.current, "num_processes", 2)
    monkeypatch.setitem(storage.process.current, "process_index", 1)
    alive = []

    class Big:
        pass

    @memory.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        assert all(reference() is None for reference in alive)
        big = Big()
        alive.append(weakref.ref(big))
        if batch_size > 1:
            out_of_memory()

    train()
    assert len(alive) == 2
    assert "Retrying `train` with batch size 1" in caplog.text and "Rank 1 retries without the others" in caplog.text


def test_keeping_the_global_batch_halves_and_needs_the_accelerator():
    with pytest.raises(ValueError, match="keep_global_batch=True needs `accelerator`"):
        memory.find_executable_batch_size(keep_global_batch=True)
    accelerator, tried = Accelerator(cpu=True, gradient_accumulation_steps=3), []

    @memory.find_executable_batch_size(starting_batch_size=5, accelerator=accelerator, keep_global_batch=True)
    def train(batch_size):
        tried.append((batch_size, accelerator.gradient_accumulation_steps, torch.rand(1).item()))
        if batch_size > 1:
            out_of_memory()

    train()
    drawn = tried[0][2]
    assert tried == [(5, 3, drawn), (2, 8, drawn), (1, 15, drawn)]


def test_a_try_after_one_that_ran_out_of_memory_begins_as_the_first(halves):
    accelerator, _, trained = halves
    failed = []

    @memory.find_executable_batch_size(starting_batch_size=2, accelerator=accelerator)
    def train(size):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.ema(model, decay=0.5)
        accelerator.register_for_checkpointing(nn.Linear(1, 1))
        accelerator.throughput(samples=size)
        if size == 2:
            failed.append(weakref.ref(model))
            trained(model, optimizer, 98)
            raise RuntimeError("CUDA out of memory.")
        assert trained(model, optimizer, 1, 1) == 0.0

    train()
    assert failed[0]() is None
    registries = accelerator._models, accelerator.extensions.of_kind(Ema), accelerator._custom_objects
    assert [len(registry) for registry in registries] == [1, 1, 1]
    accelerator.free_memory()  # which ends the measurement
