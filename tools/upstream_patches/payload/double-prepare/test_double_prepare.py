"""Preparing what is prepared already: one wrapper, one entry, one `state_dict` call, and a warning at the caller's line.

Every test of `DoublePrepareTest` holds for one process and for several; `TwoProcessTest` runs all of them on two, without a
GPU, by starting this file under `torch.distributed.run`.
"""

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import broadcast_object_list

IS_WORKER = "TORCHELASTIC_RUN_ID" in os.environ
WARNING_PARTS = ("already prepared", "is prepared, but", "Another live Accelerator")


class CountedModel(nn.Module):
    """A small model that counts how often its state is requested."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return self.layer(x)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Count the call."""
        self.calls += 1
        return super().state_dict(*args, **kwargs)


class DoublePrepareTest(unittest.TestCase):
    """What `prepare` returns, what it lists and whether it warns, for each kind of object that it may get again."""

    def setUp(self) -> None:
        """Build an `Accelerator`, in a separate state unless the process group has to live on."""
        if not IS_WORKER:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        self.distributed = self.accelerator.num_processes > 1
        assert self.distributed == IS_WORKER

    def tearDown(self) -> None:
        """Release everything that was prepared."""
        self.accelerator.free_memory()
        gc.collect()

    @contextlib.contextmanager
    def assert_warns(self, count: int, *fragments: str) -> Iterator[None]:
        """Require so many of our warnings, each with these fragments and at a line of this file."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        ours = [w for w in caught if any(part in str(w.message) for part in WARNING_PARTS)]
        assert len(ours) == count, [str(w.message) for w in ours]
        for warning in ours:
            assert issubclass(warning.category, UserWarning)
            assert os.path.realpath(warning.filename) == os.path.realpath(__file__), warning.filename
            for fragment in fragments:
                assert fragment in str(warning.message), str(warning.message)

    def assert_listed(self, *models: nn.Module) -> None:
        """Require that exactly these models are listed, by identity and in this order."""
        assert [id(model) for model in self.accelerator._models] == [id(model) for model in models]

    def inner(self, model: nn.Module) -> nn.Module:
        """Return the module of a model that must have exactly the wrappers that the number of processes asks for."""
        assert isinstance(model, DistributedDataParallel) is self.distributed
        inner = model.module if self.distributed else model
        assert not isinstance(inner, DistributedDataParallel)
        return inner

    def shared_folder(self) -> str:
        """Return a new folder that every process knows."""
        folder = tempfile.mkdtemp() if self.accelerator.is_main_process else None
        return broadcast_object_list([folder])[0]

    def test_exact_model(self) -> None:
        """The prepared model is returned as it is."""
        model = CountedModel()
        with self.assert_warns(0):
            prepared = self.accelerator.prepare(model)
        with self.assert_warns(1, "already prepared", "module.module.", "free_memory"):
            assert self.accelerator.prepare(prepared) is prepared
        assert self.inner(prepared) is model
        self.assert_listed(model)

    def test_inner_module(self) -> None:
        """The bare module would train without synchronisation, so the wrapper is returned."""
        model = CountedModel()
        prepared = self.accelerator.prepare(model)
        for bare in (model, self.accelerator.unwrap_model(prepared)):
            with self.assert_warns(1, "already prepared"):
                assert self.accelerator.prepare(bare) is prepared
        self.assert_listed(model)

    def test_compiled_model(self) -> None:
        """What a compiled model was made from is known as well."""
        model = CountedModel()
        compiled = torch.compile(model, backend="eager")
        with self.assert_warns(0):
            prepared = self.accelerator.prepare(compiled)
        for known in (prepared, compiled, compiled._orig_mod):
            with self.assert_warns(1, "already prepared"):
                assert self.accelerator.prepare(known) is prepared
        assert len(self.accelerator._models) == 1

    def test_containing_module_and_part(self) -> None:
        """Both are prepared, and the warning names what is shared."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        prepared = self.accelerator.prepare(model)
        assert self.inner(prepared) is model
        with self.assert_warns(1, "shares '2' (Linear)"):
            part = self.accelerator.prepare(model[2])
        assert self.inner(part) is model[2]
        with self.assert_warns(1, "submodule 'body' (Sequential)"):
            whole = self.accelerator.prepare(nn.ModuleDict({"body": model, "head": nn.Linear(2, 1)}))
        self.inner(whole)
        assert len(self.accelerator._models) == 3

    def test_shared_activation(self) -> None:
        """What has no parameters may be shared."""
        activation = nn.ReLU()
        with self.assert_warns(0):
            self.accelerator.prepare(
                nn.Sequential(nn.Linear(2, 2), activation), nn.Sequential(nn.Linear(2, 2), activation)
            )

    def test_evaluation_then_training(self) -> None:
        """The entry is upgraded in its place, and the gradients are the same on every process."""
        first, model, last = CountedModel(), CountedModel(), CountedModel()
        self.accelerator.prepare(first)
        with self.assert_warns(0):
            assert self.accelerator.prepare_model(model, evaluation_mode=True) is model
        self.accelerator.prepare(last)
        with self.assert_warns(0):
            prepared = self.accelerator.prepare(model)
        assert self.inner(prepared) is model
        self.assert_listed(first, model, last)
        self.accelerator.backward(prepared(torch.full((2, 3), 1.0 + self.accelerator.process_index)).sum())
        gradients = self.accelerator.gather(model.layer.weight.grad[None])
        assert torch.equal(gradients[0], gradients[-1])
        with self.assert_warns(1, "already prepared"):
            assert self.accelerator.prepare(model) is prepared

    def test_training_then_evaluation(self) -> None:
        """An evaluation in between does not make the model forget its wrapper."""
        model = CountedModel()
        prepared = self.accelerator.prepare(model)
        self.accelerator.prepare_model(model, evaluation_mode=True)
        self.assert_listed(model)
        with self.assert_warns(1, "already prepared"):
            assert self.accelerator.prepare(model) is prepared

    def test_copy_of_a_model_for_evaluation(self) -> None:
        """A copy carries the marks of the original, but nobody has prepared it."""
        model = CountedModel()
        self.accelerator.prepare_model(model, evaluation_mode=True)
        duplicate = copy.deepcopy(model)
        with self.assert_warns(0):
            assert self.inner(self.accelerator.prepare(duplicate)) is duplicate

    def test_equal_models_and_copies(self) -> None:
        """Equal weights do not make two models one."""
        teacher, student = CountedModel(), CountedModel()
        student.load_state_dict(teacher.state_dict())
        with self.assert_warns(0):
            prepared = self.accelerator.prepare(teacher, student, copy.deepcopy(teacher))
        with self.assert_warns(0):
            duplicate = self.accelerator.prepare(copy.deepcopy(prepared[0]))
        assert len({id(self.inner(model)) for model in (*prepared, duplicate)}) == 4
        assert len({id(model) for model in self.accelerator._models}) == len(self.accelerator._models) == 4

    def test_other_accelerator(self) -> None:
        """Its model is adopted, silently where the settings agree."""
        model = CountedModel()
        prepared = self.accelerator.prepare(model)
        other = Accelerator(cpu=True)
        with self.assert_warns(0):
            assert other.prepare(model) is prepared
        third = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=3)])
        with self.assert_warns(1, "Another live Accelerator", "DistributedDataParallelKwargs", "bucket_cap_mb"):
            assert third.prepare(prepared) is prepared
        for accelerator in (self.accelerator, other, third):
            assert len(accelerator._models) == 1 and accelerator._models[0] is model
        other.free_memory()
        third.free_memory()

    def test_after_free_memory(self) -> None:
        """The objects are prepared again, silently and without a nested wrapper."""
        model = CountedModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for release in (self.accelerator.free_memory, self.accelerator.clear):
            with self.assert_warns(0):
                prepared, prepared_optimizer = self.accelerator.prepare(model, optimizer)
            assert self.inner(prepared) is model and prepared_optimizer.optimizer is optimizer
            release()
            assert not self.accelerator._models and not self.accelerator._optimizers
            with self.assert_warns(0):
                again, optimizer_again = self.accelerator.prepare(prepared, prepared_optimizer)
            assert self.inner(again) is model and optimizer_again.optimizer is optimizer
            self.assert_listed(model)
            release()

    def test_evaluation_free_memory_training(self) -> None:
        """An evaluation before a training leaves no trace that would keep the model unwrapped."""
        model = CountedModel()
        self.accelerator.prepare_model(model, evaluation_mode=True)
        self.accelerator.free_memory()
        with self.assert_warns(0):
            assert self.inner(self.accelerator.prepare(model)) is model

    def test_wrapper_that_is_gone(self) -> None:
        """A model whose wrapper was thrown away gets a new one, and is listed once."""
        model = CountedModel()
        self.accelerator.prepare(model)
        gc.collect()
        with self.assert_warns(0 if self.distributed else 1):
            assert self.inner(self.accelerator.prepare(model)) is model
        self.assert_listed(model)

    def test_optimizer_loader_scheduler(self) -> None:
        """The registered wrapper is returned for the bare object and for itself, and nothing is listed twice."""
        loader = torch.utils.data.DataLoader(torch.arange(24.0), batch_size=2)
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        given = (loader, optimizer, scheduler)
        with self.assert_warns(0):
            prepared = self.accelerator.prepare(*given)
        length = len(prepared[0])
        for bare, wrapper, word in zip(given, prepared, ("sharded", "stepped", "schedule"), strict=True):
            for obj in (bare, wrapper):
                with self.assert_warns(1, "already prepared", word):
                    assert self.accelerator.prepare(obj) is wrapper
        assert len(prepared[0]) == length
        for container in ("_dataloaders", "_optimizers", "_schedulers"):
            assert len(getattr(self.accelerator, container)) == 1

    def test_several_at_once(self) -> None:
        """New and known objects may come in one call; each keeps its place."""
        model, new = CountedModel(), CountedModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared = self.accelerator.prepare(model, optimizer)
        with self.assert_warns(2, "already prepared"):
            again = self.accelerator.prepare(optimizer, new, model)
        assert again[0] is prepared[1] and again[2] is prepared[0] and self.inner(again[1]) is new

    def test_stages_of_one_call(self) -> None:
        """Tensor parallelism prepares the optimizer first and hands it on to the later stages of the same call."""
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        self.accelerator._prepared_objects.begin_call()
        with self.assert_warns(0):
            prepared = self.accelerator._prepare_one(optimizer, first_pass=True)
            assert self.accelerator._prepare_one(prepared, first_pass=True) is prepared
            assert self.accelerator._prepare_one(prepared) is prepared
        assert len(self.accelerator._optimizers) == 1

    def test_one_state_dict_call(self) -> None:
        """Saving and loading ask once for the state, whatever was prepared again."""
        model = CountedModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        prepared, prepared_optimizer = self.accelerator.prepare(model, optimizer)
        for again in (prepared, model, self.accelerator.unwrap_model(prepared)):
            with self.assert_warns(1):
                self.accelerator.prepare(again)
        with self.assert_warns(2):
            self.accelerator.prepare(optimizer, prepared_optimizer)
        self.accelerator.backward(prepared(torch.ones(1, 3)).sum())
        prepared_optimizer.step()
        folder = self.shared_folder()
        model.calls = 0
        self.accelerator.save_state(folder)
        assert model.calls == 1, f"save_state: {model.calls} calls"
        self.accelerator.wait_for_everyone()
        model.calls = 0
        self.accelerator.load_state(folder)
        assert model.calls == 1, f"load_state: {model.calls} calls"
        prefix = "module." if self.distributed else ""
        assert list(prepared.state_dict()) == [f"{prefix}layer.weight", f"{prefix}layer.bias"]

    def test_pickle(self) -> None:
        """The `Accelerator` can still be pickled, and a copy of what it remembers knows the copied objects."""
        if self.distributed:
            return  # a process group cannot be copied
        model = self.accelerator.prepare(CountedModel())
        assert pickle.dumps(self.accelerator)
        registry, model_copy = copy.deepcopy((self.accelerator._prepared_objects, model))
        assert registry.find(model_copy) is not None and registry.find(model) is None
        with self.assert_warns(1, "already prepared"):
            assert self.accelerator.prepare(model) is model

    def test_forward_is_wrapped_once(self) -> None:
        """Preparing again does not put one autocast over another."""
        if self.distributed:
            return  # the precision belongs to the state, which cannot be built again here
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, depths = CountedModel(), set()
        self.accelerator.prepare_model(model, evaluation_mode=True)
        for _ in range(3):
            self.accelerator.prepare(model)
            self.accelerator.free_memory()
            forward, depth = model.forward, 0
            while hasattr(forward, "__wrapped__"):
                forward, depth = forward.__wrapped__, depth + 1
            depths.add(depth)
            assert model._original_forward.__func__ is CountedModel.forward
            assert model(torch.ones(1, 3)).dtype == torch.float32
        assert len(depths) == 1


@unittest.skipUnless(torch.distributed.is_available() and torch.distributed.is_gloo_available(), "needs gloo")
class TwoProcessTest(unittest.TestCase):
    """The same on two processes."""

    def test_on_two_processes(self) -> None:
        """Run this file under `torch.distributed.run`."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    # The processes have to leave together: one that continues after a failure would wait for the other one for ever.
    program = unittest.main(defaultTest="DoublePrepareTest", failfast=True, exit=False)
    if program.result.wasSuccessful():
        torch.distributed.barrier()
    sys.stderr.flush()
    # Not `sys.exit`: threads of the gloo backend may abort a process that is being torn down.
    os._exit(not program.result.wasSuccessful())
