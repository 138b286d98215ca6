"""Runs that are told to stop: all ranks leave after the same step, and continue as if nothing had happened.

A run that leaves raises `Preempted` here, which is caught; so one launch does many cases. Real endings are in
`preempted_run.py`.
"""

import gc
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch
from expect import raised
from harness import everywhere, fresh_accelerator, learn, shared_folder, world
from resume_run import READER_SEED, WRITER_SEED, Case, Job, stir
from torch.utils.data import DataLoader

from accelerate import PartialState
from accelerate.extensions.preemption import watch as preemption
from accelerate.utils import ProjectConfiguration
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

SIGNALS = [signal.SIGTERM, "SIGUSR1"]


def latest(step):
    """The step at which all ranks know of a signal that came to one of them at `step`."""
    return step if world() == 1 else step + 2


class Steps(list):
    """The log of a run, in memory."""

    def write(self, **entry):
        self.append(entry)


def project(folder, **options):
    return ProjectConfiguration(str(folder), save_on_signal=SIGNALS, **options)


def interrupted(case, folder, stops, send, **options):
    """Run a case to its end, with a signal (`send`) after so many micro-batches (`stops`) of its parts; they are one log."""
    log = Steps()
    for part in range(len(stops) + 1):
        gc.collect()  # iterators with worker processes, which the exception held
        job = Job(case, READER_SEED + part if part else WRITER_SEED, project_config=project(folder, **options))
        if part:
            stir()
        loaded = job.accelerator.load_state(latest=True, missing_ok=True)
        assert (loaded is not None) is (part > 0), loaded
        before = len(log)

        def save(name, part=part, before=before):
            if part < len(stops) and len(log) - before == stops[part] and name.split("-")[1].isdigit():
                send(part)

        try:
            job.train(log, save, resume="load" if part else None)
        except preemption.Preempted as ending:
            assert ending.code == 75 and ending.number in (signal.SIGTERM, signal.SIGUSR1), ending
            assert Path(ending.location).is_dir() and job.accelerator.should_stop
            assert job.accelerator.step % case.accumulation == 0 or job.loader._progress.at_end
            steps = len(log) - before
            # Two more steps at most: the next one sees the signal, and all ranks stop after the one that follows.
            assert stops[part] <= steps <= stops[part] + 3 * case.accumulation, (case.name, steps, stops[part])
            assert everywhere(steps) == [steps] * world()
        else:
            assert part == len(stops) or len(log) > before, (case.name, part)
            if part < len(stops):
                return log  # it came too late
    return log


def to_one_rank(part):
    """Each part another rank gets a signal; twice, as from a scheduler and from a launcher."""
    if PartialState().process_index == part % world():
        number = (signal.SIGTERM, signal.SIGUSR1)[part % 2]
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)


def to_all_processes(part):
    """The rank and the worker processes of its loaders get it, as from a scheduler that signals all of a job."""
    if os.getpgid(0) != os.getpid():  # not started by the launcher
        os.setpgid(0, 0)
    # From a separate process: a worker obeys its parent.
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpid()}"], check=True, start_new_session=True)


def resumes_exactly(case, stops, send=to_one_rank, **options):
    whole = Steps()
    Job(case, WRITER_SEED).train(whole)
    with shared_folder() as folder:
        parts = interrupted(case, folder, stops, send, **options)
    assert parts == whole, (case.name, next((p, w) for p, w in zip(parts, whole, strict=False) if p != w))


def check_a_project_that_one_rank_cannot_list_is_refused_by_all():
    def checkpoints():  # of the storage, which only the main process asks
        raise OSError("the store of checkpoints is away")

    away = SimpleNamespace(checkpoints=checkpoints, location="away")
    usual = preemption.storage_of
    preemption.storage_of = lambda path: SimpleNamespace(child=lambda name: away)
    try:
        with shared_folder() as folder, raised(RuntimeError, "the store of checkpoints is away"):
            preemption._save(fresh_accelerator(project_config=project(folder)))
    finally:
        preemption.storage_of = usual


def check_runs_go_on_exactly():
    resumes_exactly(Case("plain"), [1, 3])
    resumes_exactly(Case("seedable, named", sampler="seedable"), [2], automatic_checkpoint_naming=True, total_limit=1)
    # Six micro-batches an epoch and windows of four: the second window of each is a short one.
    resumes_exactly(Case("windows", accumulation=4, length=24), [1, 2, 3])
    resumes_exactly(Case("evaluation inside", evaluate=True), [2, 1])
    resumes_exactly(Case("dispatched", dispatch=True), [2])
    resumes_exactly(Case("stream", data="stream with state"), [3])
    if is_torchdata_stateful_dataloader_available():
        resumes_exactly(Case("stateful", stateful=True, noise=False), [2])
    # All processes of the ranks get the signal.
    resumes_exactly(Case("persistent workers", workers=2, persistent=True), [4], to_all_processes)
    resumes_exactly(Case("async"), [2, 1], async_save=True, automatic_checkpoint_naming=True)


def training(folder, loader, **options):
    gc.collect()  # the Accelerator of the check before
    accelerator = fresh_accelerator(project_config=project(folder), **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def check_loops_may_leave_by_themselves():
    for loaded in (True, False):
        with shared_folder() as folder:
            accelerator, model, optimizer, loader = training(folder, DataLoader(torch.ones(40, 1), batch_size=2))
            batches = loader if loaded else iter(torch.ones(9, 2, 1))
            for step, batch in enumerate(batches, start=1):
                learn(accelerator, model(batch).mean(), optimizer)
                if step == 2 and accelerator.is_last_process:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if accelerator.should_stop:
                    break
            assert everywhere(step) == [latest(2)] * accelerator.num_processes, step
            assert not Path(folder, "checkpoints").exists()
            del accelerator, model, optimizer, loader, batches


def check_loops_without_steps():
    with shared_folder() as folder:
        accelerator, *_ = training(folder, DataLoader(torch.ones(40, 1)))
        assert not accelerator.should_stop and not accelerator.check_stop()
        if accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)
        assert accelerator.check_stop() and accelerator.should_stop


def check_uneven_ranks_do_not_wait_for_each_other():
    with shared_folder() as folder:
        accelerator, model, optimizer, _ = training(folder, DataLoader(torch.ones(4, 1)))
        rows = torch.ones(3 + 2 * accelerator.process_index, 1)  # more batches on later ranks
        steps = 0
        with accelerator.join_uneven_inputs([model]):
            for row in rows:
                learn(accelerator, model(row).mean(), optimizer)
                steps += 1
                os.kill(os.getpid(), signal.SIGTERM)
                assert not accelerator.should_stop or accelerator.num_processes == 1
        for _ in range(2):
            learn(accelerator, model(rows[0]).mean(), optimizer)
        assert accelerator.should_stop


def check_several_optimizers_and_a_second_accelerator():
    with shared_folder() as folder:
        accelerator, model, optimizer, loader = training(folder, DataLoader(torch.ones(40, 1), batch_size=2))
        other = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        steps = 0
        with raised(preemption.Preempted):
            for batch in loader:
                accelerator.backward(model(batch).mean())
                optimizer.step()
                other.step()
                optimizer.zero_grad()
                steps += 1
                if steps == 2 and accelerator.is_main_process:
                    os.kill(os.getpid(), signal.SIGTERM)
        # Each step of an optimizer counts, and another rank may be one ahead of the rank that looks at its signal.
        assert everywhere(steps) == [steps] * accelerator.num_processes and steps in (2, 3, 4), steps


def check_ranks_that_run_ahead_stop_after_the_same_step():
    """Nothing is exchanged in these steps, so ranks are as far as they come."""
    for signalled in range(world()):
        with shared_folder() as folder:
            accelerator, *_ = training(folder, DataLoader(torch.ones(4, 1)))
            model = torch.nn.Linear(1, 1)
            optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(1, 1_000_000):
                for _ in range(1 + 2 * accelerator.process_index):  # later ranks are slower
                    model(torch.ones(1, 1)).mean().backward()
                optimizer.step()
                if step == 50 and accelerator.process_index == signalled:
                    os.kill(os.getpid(), signal.SIGTERM)
                if accelerator.should_stop:
                    break
            assert everywhere(step) == [step] * world() and step >= 50, everywhere(step)
            del accelerator, optimizer  # or the next one would know of the signal
