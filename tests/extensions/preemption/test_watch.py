"""Signals after which a run saves itself: who receives them, when it leaves, where it saves, and who handles them then."""

import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpoint.storage import storage_of
from accelerate.comm.in_step import uneven_ends
from accelerate.config.project import ProjectConfiguration
from accelerate.extensions.hang import status
from accelerate.extensions.hang.hang import Watcher
from accelerate.extensions.preemption import watch as preemption

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """Handlers of the test's own, so that a signal that is not watched cannot end the tests; it lists those heard."""
    seen: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}
    yield seen
    if preemption._installed is not None:
        preemption._installed.close()
    for number, handler in before.items():
        signal.signal(number, handler)


class Run:
    def __init__(self, folder: Path, signals=("SIGTERM", "SIGUSR1"), batches: int = 6, steps: int = 1, **options):
        self.accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(str(folder), save_on_signal=signals, **options),
            gradient_accumulation_steps=steps,
        )
        model = nn.Linear(1, 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(batches, 1), batch_size=1)
        )
        self.seen = 0

    def learn(self, batch: torch.Tensor, *, told_at: int | None = None) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seen += 1
        if self.seen == told_at:
            tell(signal.SIGTERM)

    def train(self, told_at: int, epochs: int = 2) -> preemption.Preempted:
        with pytest.raises(preemption.Preempted) as caught:
            for _ in range(epochs):
                for batch in self.loader:
                    self.learn(batch, told_at=told_at)
        return caught.value


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("given", ["SIGNAL", 12345, True, None, 3.5, "KILL", "SIGCHLD", signal.SIGSEGV])
def test_what_cannot_be_watched_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match="save_on_signal got"):
        Run(tmp_path, [given])


def test_a_folder_and_the_main_thread_are_needed(tmp_path):
    with pytest.raises(ValueError, match=r"save_on_signal=\['SIGTERM'\].*project_dir"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_signal=["SIGTERM"]))
    project = ProjectConfiguration(save_on_signal=["SIGTERM"])
    Accelerator(cpu=True, project_dir="somewhere", project_config=project)
    with ThreadPoolExecutor(thread_name_prefix="builder") as pool:
        with pytest.raises(ValueError, match="'builder_0'.*main thread"):
            pool.submit(Run, tmp_path).result()


def test_the_first_signal_is_noted_and_a_later_one_goes_to_the_former_handler(tmp_path, heard, monkeypatch):
    run = Run(tmp_path)
    assert not run.accelerator.should_stop
    for _ in range(3):  # the launcher and the scheduler send the same one
        tell(signal.SIGTERM)
    assert run.accelerator.should_stop and heard == []
    tell(signal.SIGUSR1)
    assert heard == [], "another signal is no second one"
    monkeypatch.setattr(preemption, "REPEAT_S", 0.0)
    tell(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    tell(signal.SIGTERM)
    assert heard == [signal.SIGTERM] * 2


def test_handlers_come_back(tmp_path, heard):
    former = signal.getsignal(signal.SIGTERM)
    run = Run(tmp_path)
    assert signal.getsignal(signal.SIGTERM) != former and signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
    run.accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is former
    run = Run(tmp_path)
    run = Run(tmp_path)  # in place of the one before
    assert signal.getsignal(signal.SIGTERM) != former
    del run
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is former
    run = Run(tmp_path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run.accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "a handler that was set later stays"


def test_what_was_told_before_is_known_afterwards(tmp_path):
    run = Run(tmp_path)
    tell(signal.SIGTERM)
    again = Run(tmp_path)  # a smaller batch size, say
    assert again.accelerator.should_stop
    again.accelerator.end_training()
    assert again.accelerator.should_stop, "a program may ask for it after the end"
    del run
    assert not Run(tmp_path).accelerator.should_stop


def test_an_accelerator_that_was_made_before_prepares_objects_that_are_watched(tmp_path):
    former = Accelerator(cpu=True)
    run = Run(tmp_path)
    model, _ = former.prepare(nn.Linear(1, 1), DataLoader(torch.ones(2, 1)))
    assert former.extensions.of_kind(preemption.Preemption)
    run.accelerator.end_training()
    later = Accelerator(cpu=True)
    later.prepare(model)
    assert not later.extensions.of_kind(preemption.Preemption)


def test_forked_processes_have_the_former_handlers(tmp_path):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run = Run(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM and not run.accelerator.should_stop


def test_it_leaves_when_the_next_batch_is_asked_for(tmp_path, caplog, heard, monkeypatch):
    monkeypatch.setattr(preemption, "REPEAT_S", 0.0)
    run = Run(tmp_path)
    pickle.dumps(run.accelerator.gradient_state)  # a copy does not watch
    finished = []
    run.accelerator.trackers = [SimpleNamespace(name="mine", finish=lambda: finished.append(1))]
    ending = run.train(told_at=2)
    assert isinstance(ending, SystemExit) and ending.code == 75 and ending.number == signal.SIGTERM
    assert run.seen == 2 and run.accelerator.should_stop and finished == [1]
    assert vars(pickle.loads(pickle.dumps(ending))) == vars(ending)
    assert storage_of(ending.location).state().kind == "complete"
    assert Path(ending.location) == tmp_path / "checkpoints" / "checkpoint_0"
    (line,) = [record.getMessage() for record in caplog.records if "SIGTERM came" in record.getMessage()]
    assert ending.location in line and "75" in line
    tell(signal.SIGTERM)
    assert heard == [], "signals are ignored while it leaves"
    other = Run(tmp_path)
    assert str(other.accelerator.load_state(latest=True, missing_ok=True)) == ending.location
    assert sum(1 for _ in other.loader) == 4


def test_what_follows_an_epoch_is_done_first(tmp_path):
    run = Run(tmp_path)
    done = []
    with pytest.raises(preemption.Preempted):
        for epoch in range(3):
            for batch in run.loader:
                run.learn(batch, told_at=6)
            done.append(epoch)
    assert run.seen == 6 and done == [0]
    other = Run(tmp_path)
    other.accelerator.load_state(latest=True)
    assert other.loader.iteration == 1 and len(list(other.loader)) == 6


def test_after_the_last_epoch_or_without_a_step_the_run_goes_on(tmp_path):
    run = Run(tmp_path)
    for batch in run.loader:
        run.learn(batch, told_at=6)
    assert run.accelerator.should_stop and not (tmp_path / "checkpoints").exists()
    run = Run(tmp_path)
    tell(signal.SIGTERM)
    assert len(list(run.loader)) == 6
    assert run.accelerator.check_stop()


def test_evaluations_are_not_cut_off(tmp_path):
    run = Run(tmp_path)
    evaluation = run.accelerator.prepare(DataLoader(torch.ones(4, 1)))
    evaluated = 0
    with pytest.raises(preemption.Preempted):
        for batch in run.loader:
            run.learn(batch, told_at=2)
            for _ in evaluation:
                evaluated += 1
    assert (run.seen, evaluated) == (2, 8)


def test_loaders_that_are_read_together(tmp_path):
    run = Run(tmp_path)
    other = run.accelerator.prepare(DataLoader(torch.ones(6, 1)))
    with pytest.raises(preemption.Preempted):
        for batch, _ in zip(run.loader, other, strict=True):
            run.learn(batch, told_at=2)
    positions = [loader.state_dict()["accelerate_position"]["batches"] for loader in (run.loader, other)]
    assert run.seen == 2 and positions == [2, 2]


def test_a_rest_of_an_epoch_and_a_dispatched_loader(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(preemption.Preempted):
        for batch in run.accelerator.skip_first_batches(run.loader, 2):
            run.learn(batch, told_at=2)
    assert run.loader.batches_yielded == 4
    run = Run(tmp_path)
    run.loader = run.accelerator.prepare(DataLoader(torch.utils.data.ChainDataset([Numbers()])))
    run.train(told_at=2)
    assert run.seen == 2 and type(run.loader).__name__ == "DataLoaderDispatcher"


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(5, 1))


def test_ranks_that_are_at_different_steps_do_not_vote(tmp_path):
    run = Run(tmp_path)
    with uneven_ends():
        for batch in run.loader:
            run.learn(batch, told_at=1)
    assert run.seen == 6


@pytest.mark.parametrize("automatic", [False, True])
def test_numbers_go_on_after_those_that_are_there(tmp_path, automatic):
    for count in range(3):
        run = Run(
            tmp_path, automatic_checkpoint_naming=automatic
        )  # begins again each time, and must save all the same
        assert run.train(told_at=1).location.endswith(f"checkpoint_{count}")
    run = Run(tmp_path, automatic_checkpoint_naming=automatic)
    assert str(run.accelerator.load_state(latest=True)).endswith("checkpoint_2")


def test_a_failing_save_is_an_error(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setattr(run.accelerator, "save_state", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for batch in run.loader:
            run.learn(batch, told_at=1)


def test_a_save_that_failed_before_is_no_reason_not_to_save_now(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path)
    real, calls = os.fsync, []

    def full_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", full_once)
    run.accelerator.save_state(tmp_path / "earlier", blocking=False)
    left = run.train(told_at=2)
    assert left.code == 75 and Path(left.location, "accelerate_manifest.json").exists()
    assert "No space left" in caplog.text and not (tmp_path / "earlier").exists()


def note(folder: Path, worker: int) -> None:
    (folder / "worker").write_text(str(os.getpid()))


def test_workers_outlive_the_signal_and_obey_their_parent(tmp_path):
    run = Run(tmp_path)
    noted = functools.partial(note, tmp_path)
    # Named, because Python 3.14 begins them otherwise, and pytest's modules cannot be imported there.
    plain = DataLoader(torch.ones(4, 1), num_workers=1, worker_init_fn=noted, multiprocessing_context="fork")
    loader = run.accelerator.prepare(plain)
    batches = iter(loader)
    next(batches)
    worker = int((tmp_path / "worker").read_text())
    stranger = os.fork()
    if stranger == 0:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker, number)
        os._exit(0)
    os.waitpid(stranger, 0)
    assert len(list(batches)) == 3


def test_what_starts_processes_for_others_does_not_keep_signals_blocked(tmp_path):
    """A fork server that starts while they are blocked would keep them blocked in every process that it ever starts."""
    program = """
import multiprocessing, signal, time
import torch
from torch.utils.data import DataLoader
from accelerate.extensions.preemption import workers

def wait():
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    loader = DataLoader(torch.arange(4), num_workers=1, multiprocessing_context=context)
    with workers.masked_start(loader, (signal.SIGTERM,)):
        batches = iter(loader)
    assert len(list(batches)) == 4
    other = context.Process(target=wait)
    other.start()
    other.terminate()
    other.join(30)
    assert other.exitcode == -signal.SIGTERM, other.exitcode
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def agreements(monkeypatch) -> Iterator[list[preemption.StopStep]]:
    """Two ranks of this process, that agree through one store."""
    monkeypatch.setattr(status, "INTERVAL_S", 0.02)
    store = dist.HashStore()
    watchers = [Watcher(store, rank, 2) for rank in range(2)]
    for watcher in watchers:
        watcher.start()
    yield [preemption.StopStep(watcher, 0) for watcher in watchers]
    for watcher in watchers:
        watcher.stop()


def test_a_rank_that_has_left_is_not_waited_for(agreements):
    stays, leaves = agreements
    leaves.count(0)
    leaves.watcher.end()
    assert [stays.count(signal.SIGTERM) for _ in range(2)] == [0, signal.SIGTERM]


def test_a_lost_process_is_an_error(agreements):
    agreements[0].watcher.stop()
    with pytest.raises(RuntimeError, match="A process was lost"):
        agreements[0].count(signal.SIGTERM)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron_lm"])
def test_the_steps_of_engines_count(engine):
    """They are taken elsewhere; without a step that has ended, a signal would never be followed by a save."""
    module = importlib.import_module(f"accelerate.utils.{engine}")
    wrapper = getattr(module, "DeepSpeedOptimizerWrapper" if engine == "deepspeed" else "MegatronLMOptimizerWrapper")
    Accelerator(cpu=True)
    parameter = nn.Parameter(torch.ones(1))
    optimizer, seen = wrapper(torch.optim.SGD([parameter], lr=1.0)), []
    optimizer._extensions = SimpleNamespace(step_begins=(), step_ends=(seen.append,))
    optimizer.step()
    assert seen == [optimizer] and parameter.item() == 1.0


def test_the_stop_is_behind_a_rank_that_reports_between_two_requests_of_another():
    store, watcher = dist.HashStore(), SimpleNamespace(errands=[], world_size=2)
    first, second = preemption.StopStep(watcher, 0), preemption.StopStep(watcher, 0)
    first._steps, second._steps = 5, 6

    class Slow:
        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, *words):
            second._report(store)
            return store.add(*words)

    first._report(Slow())
    assert store.get("step") == b"7"
