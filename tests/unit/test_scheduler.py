"""The prepared scheduler."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as lr

from accelerate import Accelerator, ParallelismConfig
from accelerate.checkpoint import apply
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration


def build(accelerator):
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return accelerator.prepare(inner, lr.ExponentialLR(inner, 0.5))


@pytest.mark.parametrize(("adjust", "counted"), [(True, 2), (False, 1)])
def test_it_waits_while_gradients_accumulate(adjust, counted):
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = build(accelerator)
    accelerator.gradient_state.plugin_kwargs["adjust_scheduler"] = adjust
    accelerator.sync_gradients = False
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0] and scheduler.scheduler._step_count == counted


@pytest.mark.parametrize(("split", "expected"), [(False, 0.5**4), (True, 0.5)])
def test_it_advances_once_per_data_parallel_replica(split, expected, monkeypatch):
    accelerator = Accelerator(cpu=True)
    optimizer, scheduler = build(accelerator)
    scheduler.split_batches = split
    monkeypatch.setitem(accelerator.state.__dict__, "num_processes", 4)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [expected]
    scheduler.split_batches = False
    shared = ParallelismConfig(dp_shard_size=2, tp_size=2)
    monkeypatch.setitem(accelerator.state.__dict__, "parallelism_config", shared)
    assert scheduler.steps_per_update == 2, "with a mesh, ranks that share a batch are one replica"
    shared = ParallelismConfig(sp_size=2)
    monkeypatch.setitem(accelerator.state.__dict__, "parallelism_config", shared)
    assert scheduler.steps_per_update == 2, "so are ranks that share sequences by DeepSpeed, which has no mesh"


SCHEDULES = {
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 80),
    "StepLR": lambda o: lr.StepLR(o, 20),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [20, 40]),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.95),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1, 80),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 42),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 80, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 20, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 80),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 20, 2),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1, 20), lr.CosineAnnealingLR(o, 60)], [20]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, 0.1, 1, 20), lr.ExponentialLR(o, 0.98)]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=7),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 1 - step / 80),
}


class Resumed:
    """A run on so many simulated replicas, with one optimizer and one schedule of each kind."""

    def __init__(self, monkeypatch, replicas, split=False, steps_with_optimizer=True, accumulation=1):
        self.accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(split_batches=split),
            step_scheduler_with_optimizer=steps_with_optimizer,
            gradient_accumulation_steps=accumulation,
        )
        optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in SCHEDULES]
        made = [make(optimizer) for make, optimizer in zip(SCHEDULES.values(), optimizers, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = self.accelerator.prepare(*optimizers, *made)
        self.optimizers, self.schedulers = prepared[: len(SCHEDULES)], prepared[len(SCHEDULES) :]
        steps = property(lambda scheduler: 1 if scheduler.split_batches else replicas)
        monkeypatch.setattr(AcceleratedScheduler, "steps_per_update", steps)

    def update(self, number):
        for micro_batch in range(number * self.accelerator.gradient_accumulation_steps):
            self.accelerator.sync_gradients = (micro_batch + 1) % self.accelerator.gradient_accumulation_steps == 0
            for name, optimizer, scheduler in zip(SCHEDULES, self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                if scheduler.step_with_optimizer or self.accelerator.sync_gradients:
                    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return {n: o.param_groups[0]["lr"] for n, o in zip(SCHEDULES, self.optimizers, strict=True)}

    def load(self, folder):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.accelerator.load_state(folder)
        return [str(item.message) for item in caught if "steps per optimizer step" in str(item.message)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_resuming_on_other_replicas_keeps_the_rates(tmp_path, monkeypatch, before, after, accumulation):
    expected = Resumed(monkeypatch, before, accumulation=accumulation).update(24)
    assert before != 2 or expected["CosineAnnealingLR"] == pytest.approx(0.0345492, abs=1e-6)
    first = Resumed(monkeypatch, before, accumulation=accumulation)
    first.update(10)
    first.accelerator.save_state(tmp_path / "a")
    second = Resumed(monkeypatch, after, accumulation=accumulation)
    messages = second.load(tmp_path / "a")
    assert len(messages) == 1, "only that of a function"
    expected_words = ("the function of LambdaLR", f"{before} steps", f"take {after}")
    assert all(words in messages[0] for words in expected_words)
    second.update(5)
    second.accelerator.save_state(tmp_path / "b")
    third = Resumed(monkeypatch, after, accumulation=accumulation)  # the steps are still those of the first run
    third.load(tmp_path / "b")
    assert third.update(9) == pytest.approx(expected)
    fourth = Resumed(monkeypatch, before, accumulation=accumulation)
    assert not fourth.load(tmp_path / "b"), "the first run's replicas again"
    assert fourth.update(9) == pytest.approx(expected)


def test_the_steps_of_schedules_that_the_program_steps_are_its_own(tmp_path, monkeypatch):
    expected = Resumed(monkeypatch, 1).update(24)
    first = Resumed(monkeypatch, 2, steps_with_optimizer=False)
    first.update(10)
    first.accelerator.save_state(tmp_path / "a")
    for again in (False, True):
        second = Resumed(monkeypatch, 4, steps_with_optimizer=again)
        second.load(tmp_path / "a")
        assert second.update(14) == pytest.approx(expected)
    followed = Resumed(monkeypatch, 2)
    followed.accelerator.save_state(tmp_path / "b")
    messages = Resumed(monkeypatch, 2, steps_with_optimizer=False).load(tmp_path / "b")
    assert len(messages) == len(SCHEDULES) and all("step() 2 times" in text for text in messages)


class Warmup:
    """A schedule whose state, unlike torch's, does not hold its length."""

    def __init__(self, length):
        self.length, self.last_epoch = length, 0

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


def test_a_length_that_no_state_holds_is_named():
    Accelerator(cpu=True)
    scheduler = AcceleratedScheduler(Warmup(40), [])
    assert scheduler.continue_from(1) is None
    message = scheduler.continue_from(2)
    assert "Warmup was saved with 2 steps" in message and "take 1" in message and "length of Warmup" in message


def test_a_checkpoint_without_the_record_counts_its_processes(tmp_path, monkeypatch):
    first = Resumed(monkeypatch, 2)
    first.update(10)
    monkeypatch.setattr(apply, "schedule_units", lambda common: None)  # as upstream writes it
    first.accelerator.save_state(tmp_path)
    (tmp_path / "accelerate_manifest.json").unlink()
    (tmp_path / "random_states_1.pkl").write_bytes((tmp_path / "random_states_0.pkl").read_bytes())
    second = Resumed(monkeypatch, 1)
    second.load(tmp_path)
    assert second.update(14)["CosineAnnealingLR"] == pytest.approx(0.0345492, abs=1e-6)


def test_split_batches_keep_one_step_on_any_number_of_replicas(tmp_path, monkeypatch):
    first = Resumed(monkeypatch, 2, split=True)
    first.update(3)
    first.accelerator.save_state(tmp_path)
    second = Resumed(monkeypatch, 1, split=True)
    assert not second.load(tmp_path) and second.update(1) == pytest.approx(first.update(1))
