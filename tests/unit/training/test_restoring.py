"""What is loaded is complete, and is loaded in full or not at all."""

import logging
import os
import random
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.config.project import ProjectConfiguration
from accelerate.data import resume
from accelerate.runtime import generators
from cases import cases

CPU = torch.device("cpu")


class Counter:
    """A registered object that may refuse its state, after it has changed."""

    def __init__(self) -> None:
        self.count, self.refuses = 0, False

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        if self.refuses:
            raise ValueError("this counter takes no state")


class Particular(nn.Linear):
    """A module that loads in its own way and may fail in the middle."""

    refuses = False

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        if self.refuses:
            raise ValueError("this module takes no state")


class Run:
    def __init__(self, seed: int = 1, **options) -> None:
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        self.accelerator = Accelerator(cpu=True, **options)
        self.plain, self.particular = nn.Linear(3, 2), Particular(2, 1)
        optimizer = torch.optim.AdamW([*self.plain.parameters(), *self.particular.parameters()], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        data = DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=2, shuffle=True)
        self.models = self.accelerator.prepare(self.plain, self.particular)
        self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(optimizer, scheduler, data)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def steps(self, number: int) -> None:
        for _, (batch,) in zip(range(number), self.loader, strict=False):
            self.accelerator.backward(self.models[1](self.models[0](batch)).pow(2).sum())
            self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
            self.counter.count += 1

    def everything(self) -> str:
        states = [self.plain.state_dict(), self.particular.state_dict(), self.optimizer.state_dict()]
        states += [self.scheduler.state_dict(), self.counter.count, self.loader._progress, self.loader.iteration]
        generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        return repr(states + generators)


def numbered(folder, **options) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)


@pytest.fixture
def saved(tmp_path):
    first = Run()
    first.steps(3)
    first.accelerator.save_state(tmp_path / "c")
    other = Run(seed=2)
    other.steps(2)
    return tmp_path / "c", first, other


@pytest.mark.parametrize("who", ["counter", "module", "optimizer", "scheduler", "loader"])
def test_one_that_refuses_its_state_leaves_all_as_they_were(saved, who, monkeypatch):
    folder, first, other = saved
    places = {
        "optimizer": (other.optimizer.optimizer, "load_state_dict"),
        "scheduler": (other.scheduler.scheduler, "load_state_dict"),
        "loader": (resume, "restore"),
    }
    if who in places:
        real, calls = getattr(*places[who]), []

        def refuse_once(*args, **options):
            real(*args, **options)  # after it has taken the state: that is the worst moment
            calls.append(1)
            if len(calls) == 1:
                raise ValueError(f"this {who} takes no state")

        monkeypatch.setattr(*places[who], refuse_once)
    other.counter.refuses, other.particular.refuses = who == "counter", who == "module"
    before = other.everything()
    with pytest.raises(ValueError, match=f"this {who} takes no state"):
        other.accelerator.load_state(folder)
    other.counter.refuses = other.particular.refuses = False  # the counter refuses its former state as well
    assert other.everything() == before
    if who in ("counter", "module"):
        assert other.accelerator.load_state(folder) == folder
        assert torch.equal(other.plain.weight, first.plain.weight) and other.counter.count == 3


def refuse_in_hook(module, keys):
    raise RuntimeError("the hook refuses")


@cases(
    "hook, options, error",
    (None, {"stict": False}, "does not take .'stict'.*nothing was loaded"),
    (refuse_in_hook, {}, "the hook refuses"),
)
def test_a_model_that_fails_last_leaves_the_others_alone(tmp_path, hook, options, error):
    run = Run()
    run.accelerator.save_state(tmp_path / "c", safe_serialization=False)
    run.steps(2)
    before = run.everything()
    if hook is not None:
        run.particular.register_load_state_dict_post_hook(hook)
    with pytest.raises((TypeError, RuntimeError), match=error):
        run.accelerator.load_state(tmp_path / "c", **options)
    assert run.everything() == before


def test_what_a_hook_has_loaded_is_given_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(2, 2), Particular(2, 2))
    accelerator.save_state(tmp_path / "c")
    second.refuses = True
    with torch.no_grad():
        first.weight.fill_(5.0)

    def hook(models, folder):
        models.pop(0).load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
        assert not first.weight.eq(5).any()

    accelerator.register_load_state_pre_hook(hook)
    with pytest.raises(ValueError, match="takes no state"):
        accelerator.load_state(tmp_path / "c")
    assert first.weight.eq(5).all()


def test_what_a_hook_has_loaded_of_a_replaced_checkpoint_is_given_back(tmp_path):
    accelerator, calls = Accelerator(cpu=True), []
    first, second = accelerator.prepare(nn.Linear(2, 2), Particular(2, 2))
    accelerator.save_state(tmp_path / "c")
    second.refuses = True
    with torch.no_grad():
        first.weight.fill_(5.0)

    def hook(models, folder):
        calls.append(first.weight.eq(5).all().item())
        models.pop(0).load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
        os.utime(os.path.join(folder, "accelerate_manifest.json"), ns=(len(calls), min(len(calls), 2)))

    accelerator.register_load_state_pre_hook(hook)
    with pytest.raises(ValueError, match="takes no state"):
        accelerator.load_state(tmp_path / "c")
    assert calls == [True, True, True] and first.weight.eq(5).all()


def beside(run, publish, times=1):
    """Let something be saved by others while a run reads a checkpoint: after its optimizers, before its models."""
    calls = []

    def hook(models, folder):
        calls.append(folder)
        if len(calls) <= times:
            publish()

    run.accelerator.register_load_state_pre_hook(hook)
    return calls


def test_a_load_beside_saves_to_its_place_takes_one_of_them(saved):
    folder, first, other = saved
    first.steps(1)
    calls = beside(other, lambda: first.accelerator.save_state(folder))
    assert other.accelerator.load_state(folder) == folder
    assert len(calls) == 2 and other.counter.count == other.optimizer.state_dict()["state"][0]["step"] == 4
    assert torch.equal(other.plain.weight, first.plain.weight)


def test_the_newest_is_searched_again_where_a_run_prunes_beside_the_load(tmp_path, caplog):
    first = Run(project_config=numbered(tmp_path, total_limit=1))
    other = Run(seed=2, project_config=numbered(tmp_path))
    first.steps(1)
    first.accelerator.save_state()

    def publish():
        first.steps(1)
        first.accelerator.save_state()

    beside(other, publish, times=3)
    with caplog.at_level(logging.WARNING):
        assert other.accelerator.load_state(latest=True).name == "checkpoint_3"
    assert other.counter.count == 4 and "Passed over" not in caplog.text
    other.accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_3", "checkpoint_4"]


@pytest.mark.slow
def test_a_place_that_never_rests_is_an_error_that_changes_nothing(saved):
    folder, first, other = saved
    before = other.everything()
    calls = beside(other, lambda: first.accelerator.save_state(folder), times=1000)
    with pytest.raises(RuntimeError, match=r"took its place 100 times while it was read; nothing was loaded"):
        other.accelerator.load_state(folder)
    assert len(calls) == 100 and other.everything() == before


def test_what_somebody_else_has_put_there_is_not_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    save_file(model.state_dict(), tmp_path / "c" / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="model.safetensors is not in the manifest"):
        accelerator.load_state(tmp_path / "c")
    assert model.weight.eq(2).all()


def test_the_newest_whole_one_is_taken_and_the_others_are_named(tmp_path, caplog):
    run = Run(project_config=numbered(tmp_path))
    for _ in range(4):
        run.steps(1)
        run.accelerator.save_state()
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "checkpoint_3" / "optimizer.bin").unlink()
    data = bytearray((checkpoints / "checkpoint_2" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoints / "checkpoint_2" / "model.safetensors").write_bytes(data)
    with caplog.at_level(logging.WARNING):
        loaded = run.accelerator.load_state(latest=True)
    assert loaded == checkpoints / "checkpoint_1" and run.counter.count == 2
    assert "checkpoint_3: optimizer.bin is missing" in caplog.text
    assert "checkpoint_2: model.safetensors has changed" in caplog.text
    fresh = Run(seed=5)
    assert fresh.accelerator.load_state(checkpoints, latest=True) == loaded
    assert fresh.accelerator.load_state(checkpoints / "checkpoint_0", latest=True).name == "checkpoint_0"


def test_nothing_to_load(tmp_path):
    run = Run(project_config=numbered(tmp_path))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        run.accelerator.load_state()
    run.accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"passed over .*optimizer\.bin is missing"):
        run.accelerator.load_state()
    # What is there, and cannot be read, is not "no checkpoint yet": a run would begin again and save over it.
    with pytest.raises(FileNotFoundError, match=r"passed over .*optimizer\.bin is missing"):
        run.accelerator.load_state(latest=True, missing_ok=True)
    with pytest.raises(FileNotFoundError, match=r"passed over .*optimizer\.bin is missing"):
        run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0", latest=True, missing_ok=True)
    (tmp_path / "empty").mkdir()
    assert run.accelerator.load_state(tmp_path / "empty", latest=True, missing_ok=True) is None
    with pytest.raises(ValueError, match="no input_dir"):
        Run().accelerator.load_state()
    assert Run().accelerator.load_state(tmp_path / "none", latest=True, missing_ok=True) is None
    with pytest.raises(ValueError, match="no such folder"):
        run.accelerator.load_state(tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"no such folder\. To load the newest checkpoint, call load_state\(latest=True\)"
    ):
        run.accelerator.load_state(tmp_path / "latest")


def test_each_generator_is_restored_apart_and_a_failure_names_its_cause(caplog):
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    states = generators.collect(CPU)
    expected = [random.random(), torch.rand(1).item()]
    kind, words, *rest = states["numpy_random_seed"]
    generators.restore({**states, "numpy_random_seed": (kind, words[:100], *rest)}, CPU, "here")
    assert [random.random(), torch.rand(1).item()] == expected
    assert "numpy in here could not be restored" in caplog.text and "could not be restored" in caplog.text
    caplog.clear()
    generators.restore({}, CPU, "there")
    assert caplog.text.count("could not be restored") == 3 and "KeyError: 'random_state'" in caplog.text


SHORTENED = """
import os, sys, torch
from accelerate import Accelerator

folder, path = sys.argv[1], os.path.join(*sys.argv[1:])

class Shortens:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        os.truncate(path, os.path.getsize(path) // 2)

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1100, 1100)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
model(torch.ones(1, 1100)).sum().backward()
optimizer.step()
accelerator.register_for_checkpointing(Shortens())
accelerator.save_state(folder)
accelerator.load_state(folder)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end the process")
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin"])
def test_a_file_that_is_truncated_while_it_is_loaded_does_not_end_the_process(tmp_path, file):
    """A registered object truncates it during its own load; a copy from a mapped file would end the process by SIGBUS."""
    command = [sys.executable, "-c", SHORTENED, str(tmp_path / "c"), file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and re.search("changed while it was loaded: .* became shorter", done.stderr), done


def test_load_before_prepare_is_an_error(saved):
    folder = saved[0]
    (folder / "custom_checkpoint_0.pkl").unlink()  # which has a separate error
    (folder / "accelerate_manifest.json").unlink()
    before = torch.get_rng_state()
    with pytest.raises(
        RuntimeError, match=r"nothing is prepared.*model 1 \(model_1.safetensors\), optimizer 0 .*scheduler 0"
    ):
        Accelerator(cpu=True).load_state(folder)
    assert torch.equal(torch.get_rng_state(), before)


@cases(
    "prepared, left",
    ("model", ["model 1 (model_1.safetensors)", "optimizer 0 (optimizer.bin)", "scheduler 0", "data loader 0"]),
    ("models", ["optimizer 0", "scheduler 0 (scheduler.bin)", "data loader 0"]),
    ("all but the scheduler", ["scheduler 0"]),
    ("all", []),
)
def test_states_that_no_object_takes_are_named(tmp_path, prepared, left):
    run = Run()
    run.accelerator._custom_objects.clear()
    run.steps(2)
    run.accelerator.save_state(tmp_path / "c")
    other = Run(seed=2)
    registry = other.accelerator
    registry._custom_objects.clear()
    keep_models = 1 if prepared == "model" else 2
    del registry._models[keep_models:]
    if "all" not in prepared:
        registry._optimizers.clear(), registry._dataloaders.clear()
    if prepared != "all":
        registry._schedulers.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.accelerator.load_state(tmp_path / "c")
    text = " ".join(str(item.message) for item in caught if "did not restore" in str(item.message))
    assert bool(text) == bool(left) and all(name in text for name in left), text
    if prepared == "all but the scheduler":
        assert "optimizer" not in text
    assert torch.equal(other.plain.weight, run.plain.weight), "an evaluation loads its model"


class Conjugates(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("second", self.first.conj())


@pytest.mark.parametrize("safe", [True, False])
def test_conjugates_of_one_memory_come_back(tmp_path, safe):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Conjugates())
    values = model.first.clone()
    accelerator.save_state(tmp_path / "c", safe_serialization=safe)
    model.first.zero_()
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.first, values) and torch.equal(model.second.resolve_conj(), values.conj().resolve_conj())


def test_a_lazy_module_takes_its_shape_from_a_checkpoint(tmp_path):
    accelerator = Accelerator(cpu=True)
    weight = accelerator.prepare(nn.Linear(2, 3)).weight.detach().clone()
    accelerator.save_state(tmp_path / "c")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.LazyLinear(3))
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.weight, weight)
