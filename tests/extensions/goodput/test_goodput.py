"""Goodput: every second has a cause, over restarts too; and a run that does not ask for it has nothing of it."""

import json
import os
import random

import pytest
import torch

from accelerate import Accelerator
from accelerate.extension import Extension
from accelerate.extensions.goodput.goodput import Goodput, Ledger
from accelerate.extensions.goodput.record import CAUSES, Heartbeat, Record, read_lines, report_of
from distributed.conftest import done, launch_command, plain_environment


class Clock:
    """A clock that the test sets."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def seconds_of(report):
    return {cause: round(seconds, 6) for cause, seconds in report.seconds.items() if seconds}


def steps(ledger, clock, *lengths):
    for length in lengths:
        clock.now += length
        ledger.step_ended()


def test_an_attempt_is_divided_by_cause():
    clock = Clock()
    ledger = Ledger(None, process=970.0, launcher=960.0, clock=clock)
    clock.now += 5.0
    ledger.interrupt()
    clock.now += 3.0
    ledger.resume("load")
    steps(ledger, clock, 20.0, 2.0, 2.0)
    clock.now += 0.5
    ledger.interrupt()
    clock.now += 7.0
    ledger.resume("save")
    steps(ledger, clock, 1.5, 12.0)
    clock.now += 1.0
    expected = {"start": 10, "imports": 30, "load": 3, "setup": 5 + 20 - 2, "save": 7, "waiting": 10}
    # The first step counts as long as the second; the last one takes ten seconds more than the median; one is under way.
    report = ledger.report()
    assert seconds_of(report) == {**expected, "productive": 2 + 2 + 2 + 2 + 2 + 1}
    assert report.wall == pytest.approx(clock.now - 960.0) and report.fraction == pytest.approx(11 / report.wall)
    assert (report.steps, report.recomputed_steps, report.attempts) == (5, 0, 1)
    assert report.values()["goodput/waiting_seconds"] == 10 and "waiting" in str(report)


def test_a_killed_attempt_is_accounted_for_by_the_next_one(tmp_path):
    path, clock = str(tmp_path / "runs" / "goodput.jsonl"), Clock()
    first = Ledger(Record(path), process=990.0, launcher=980.0, clock=clock)
    steps(first, clock, 5.0, 1.0, 1.0, 1.0)  # and the process is killed

    clock.now += 9.0
    second = Ledger(Record(path), process=clock.now - 4.0, launcher=980.0, clock=clock)
    second.restored(2)
    steps(second, clock, 3.0, 1.0, 1.0)
    report = second.report()
    assert (report.steps, report.recomputed_steps, report.attempts) == (5, 2, 2)
    expected = {"start": 10, "imports": 10 + 4, "failure": 5, "setup": 4 + 2, "productive": 4 + 1, "recomputed": 2}
    assert seconds_of(report) == expected and report.wall == pytest.approx(clock.now - 980.0)

    clock.now += 0.25
    second.close()
    clock.now += 100.0
    third = Ledger(Record(path), process=clock.now - 2.0, launcher=clock.now - 5.0, clock=clock)
    report = third.report()
    assert seconds_of(report) == {**expected, "waiting": 0.25, "down": 95, "start": 13, "imports": 16}
    assert [attempt.number for attempt in read_lines(path)] == [0, 1]
    assert third.attempt.furthest == 5


def test_the_causes_add_up_whatever_happens(tmp_path):
    numbers, path, clock = random.Random(0), str(tmp_path / "goodput.jsonl"), Clock()
    launcher = clock.now - 3.0
    for attempt in range(12):
        if numbers.random() < 0.3 and attempt:
            launcher = clock.now + numbers.random()  # a new job
        clock.now += numbers.random() * 4
        process = clock.now - numbers.random() * 6  # it may have waited since before the failure
        ledger = Ledger(Record(path), process, launcher, clock)
        for _ in range(numbers.randrange(40)):
            clock.now += numbers.random() ** 6 * 5
            event = numbers.choice(["step", "step", "save", "load"])
            if event == "step":
                ledger.step_ended()
                continue
            ledger.interrupt()
            clock.now += numbers.random()
            ledger.resume(event)
            if event == "load":
                ledger.restored(numbers.randint(0, ledger.attempt.step))
        report = ledger.report()
        assert report.wall == pytest.approx(clock.now - 997.0)
        assert min(report.seconds.values()) >= 0
        assert report.steps == ledger.attempt.furthest
        if numbers.random() < 0.5:
            ledger.close()
    lines = Record(path).attempts
    assert all(before.end == after.begin for before, after in zip(lines, lines[1:], strict=False))
    assert report_of(lines).wall == pytest.approx(lines[-1].end - lines[0].begin)


def test_a_clock_that_is_set_back_takes_no_time_away(tmp_path):
    path, clock = str(tmp_path / "goodput.jsonl"), Clock()
    steps(Ledger(Record(path), 1000.0, 1000.0, clock), clock, 5.0, 5.0)
    clock.now = 400.0
    ledger = Ledger(Record(path), process=390.0, launcher=350.0, clock=clock)
    steps(ledger, clock, 2.0, 2.0)
    assert seconds_of(ledger.report()) == {"productive": 5 + 5, "recomputed": 2 + 2}
    assert ledger.report().wall == pytest.approx(14.0)


def test_a_heartbeat_that_was_cut_off_leaves_the_one_before(tmp_path):
    path, clock = str(tmp_path / "goodput.jsonl"), Clock()
    ledger = Ledger(Record(path), 1000.0, 1000.0, clock)
    steps(ledger, clock, 1.0, 1.0)
    file = tmp_path / "goodput.jsonl.now"
    data = bytearray(file.read_bytes())
    half = (len(data) - 8) // 2
    invalid = 8 + half * (1 - data[0])
    data[invalid : invalid + half] = os.urandom(half)
    file.write_bytes(data)
    assert Heartbeat.read(str(file)) == ledger.attempt
    file.write_bytes(b"")
    assert Heartbeat.read(str(file)) is None and Record(path).attempts == []


def test_a_line_that_was_cut_off_is_removed_and_another_file_is_refused(tmp_path):
    path, clock = str(tmp_path / "goodput.jsonl"), Clock()
    Ledger(Record(path), 1000.0, 1000.0, clock).close()
    with open(path, "a") as file:
        file.write('{"number": 1, "beg')
    assert len(Record(path).attempts) == 1
    Ledger(Record(path), 1001.0, 1000.0, clock).close()
    assert [attempt.number for attempt in read_lines(path)] == [0, 1]
    for line in ('{"loss": 1}', '{"number": 2, "begin": 0, "end": 0, "seconds": {}}', "text"):
        (tmp_path / "log.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=r"Line 1 of .*log.jsonl' is not an attempt.*Name another file"):
            Record(str(tmp_path / "log.jsonl"))


# -- a run ---------------------------------------------------------------------------------------------------------------

RUN = """
import json, os, signal, sys
import torch
from accelerate import Accelerator

accelerator, model = Accelerator(cpu=True, project_dir="runs"), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
second, first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
if second:
    accelerator.load_state("checkpoint")
    first = 4
accelerator.throughput(samples=2, flops=1.0)
for step in range(first, 10):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.throughput(samples=2, flops=1.0)
    if step == 3 and not second:
        accelerator.save_state("checkpoint")
    if step == 6 and not second and accelerator.process_index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
report, both = accelerator.goodput(), accelerator.throughput_report()
assert "Goodput" in str(both) and both.values()["goodput/recomputed_steps"] == 3
assert (report.attempts, report.steps, report.recomputed_steps) == (2, 10, 3), report
accelerator.end_training()
"""


def test_a_run_whose_rank_0_was_killed_counts_the_steps_that_it_repeats(tmp_path):
    (tmp_path / "train.py").write_text(RUN)
    environment = plain_environment(tmp_path, ACCELERATE_GOODPUT="1", OMP_NUM_THREADS="1")
    command = [*launch_command(2, cpu=True), "--max_restarts", "1", "--monitor_interval", "0.1", "train.py"]
    ended = done(command, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    first, second = map(json.loads, (tmp_path / "runs" / "goodput.jsonl").read_text().splitlines())
    assert (first["steps"], first["furthest"], second["step"], second["furthest"]) == (7, 7, 10, 10)
    for attempt in (first, second):
        assert sum(attempt["seconds"].values()) == pytest.approx(attempt["end"] - attempt["begin"])
    assert second["begin"] == first["end"] and not (tmp_path / "runs" / "goodput.jsonl.now").exists()
    gained = {cause for cause in CAUSES if second["seconds"][cause] > 0}
    assert {"failure", "imports", "load", "recomputed", "productive"} <= gained and "start" not in gained
    assert first["seconds"]["start"] > 0 and first["seconds"]["save"] > 0


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return what builds an Accelerator with a measurement, whose file is given back."""
    path = tmp_path / "goodput.jsonl"
    monkeypatch.setenv("ACCELERATE_GOODPUT", str(path))
    yield lambda: Accelerator(cpu=True)
    Goodput._ledgers.clear()


def train(accelerator, count=3):
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    take_steps(accelerator, model, optimizer, count)
    return model, optimizer


def take_steps(accelerator, model, optimizer, count):
    for _ in range(count):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()


def test_two_accelerators_of_a_process_are_one_attempt(measured, tmp_path):
    train(measured())
    accelerator = measured()
    prepared = train(accelerator, 2)
    assert (accelerator.goodput().attempts, accelerator.goodput().steps) == (1, 5)
    accelerator.goodput(step=4)  # the state of a checkpoint that other code has loaded
    take_steps(accelerator, *prepared, 2)
    assert (accelerator.goodput().steps, accelerator.goodput().recomputed_steps) == (6, 1)
    accelerator.end_training()
    assert len(read_lines(str(tmp_path / "goodput.jsonl"))) == 1
    with pytest.raises(RuntimeError, match="end_training"):
        accelerator.goodput()


def test_only_the_steps_of_one_optimizer_count(measured):
    accelerator = measured()
    models = [torch.nn.Linear(4, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    for model, optimizer in ((models[0], first), (models[1], second)) * 3:
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    assert accelerator.goodput().steps == 3


def test_a_refused_checkpoint_leaves_the_step_and_one_without_a_step_begins_at_zero(measured, tmp_path):
    accelerator = measured()
    train(accelerator)
    with pytest.raises(ValueError, match="no such folder"):
        accelerator.load_state(str(tmp_path / "none"))
    part = accelerator.extensions.of_kind(Goodput)[0]
    assert part.ledger.attempt.step == 3
    os.environ["ACCELERATE_GOODPUT"] = ""
    other = Accelerator(cpu=True)
    train(other, 1)
    other.save_state(str(tmp_path / "plain"))
    accelerator.load_state(str(tmp_path / "plain"))
    assert part.ledger.attempt.step == 0 and accelerator.goodput().seconds["load"] > 0


def test_a_load_that_an_extension_refuses_leaves_the_step(measured, tmp_path):
    class Refusing(Extension):
        order = 90

        def loading(self, folder):
            raise ValueError("refused")

    accelerator = measured()
    _, optimizer = train(accelerator, 2)
    accelerator.save_state(str(tmp_path / "saved"))
    optimizer.step()
    accelerator.extensions.add(Refusing(accelerator))
    with pytest.raises(ValueError, match="refused"):
        accelerator.load_state(str(tmp_path / "saved"))
    assert accelerator.extensions.of_kind(Goodput)[0].ledger.attempt.step == 3


def test_a_run_that_does_not_ask_has_nothing_of_it(monkeypatch):
    for value in (None, "", "0", "false"):
        if value is not None:
            monkeypatch.setenv("ACCELERATE_GOODPUT", value)
        accelerator = Accelerator(cpu=True)
        kinds = [type(extension) for extension in accelerator.extensions.attached]
        assert not any(kind.__module__.startswith("accelerate.extensions.goodput") for kind in kinds)
        assert accelerator.extensions.step_ends == () and accelerator.extensions.phase_begins == ()
        with pytest.raises(RuntimeError, match="Set ACCELERATE_GOODPUT"):
            accelerator.goodput()


def test_wrong_settings_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_GOODPUT", "1")
    with pytest.raises(ValueError, match="ACCELERATE_GOODPUT='1' needs a folder.*Pass Accelerator"):
        Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_GOODPUT", str(tmp_path))
    with pytest.raises(ValueError, match="the record of the run cannot be used.*directory"):
        Accelerator(cpu=True)
