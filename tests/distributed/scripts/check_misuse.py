"""Ranks that save or load otherwise than all together: what each of them hears, and after how long."""

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from expect import logged, raised
from harness import fresh_accelerator, shared_folder
from torch import nn

from accelerate.checkpoint import ranks as checkpoint_ranks
from accelerate.checkpoint.ranks import CollectiveMisuse, Group, Ranks, default_store
from accelerate.extensions.hang import hang

LIMIT_S = 15


class Run:
    """A model in training, and meetings in the place of saves."""

    def __init__(self):
        self.accelerator = fresh_accelerator()
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        hang.watch(default_store(), self.rank, self.size)
        self.model = self.accelerator.prepare(nn.Linear(4, 1))
        self.step()

    def step(self):
        self.accelerator.backward(self.model(torch.ones(2, 4, device=self.accelerator.device)).sum())
        assert next(self.model.parameters()).grad.sum().item() != 0

    def meet(self, location="/run/first", kind="save_state"):
        gathered = Ranks(Group(self.rank, self.size, 0, False, True), default_store())
        gathered.agree(kind, location)
        return gathered

    def save(self):
        gathered = self.meet()
        assert gathered.share(f"from {self.rank}", root=self.size - 1) == f"from {self.size - 1}"
        gathered.leave()

    def misuse(self, *fragments, **call):
        began = time.monotonic()
        with raised(CollectiveMisuse, *fragments):
            self.meet(**call)
        took = time.monotonic() - began
        print(f"rank {self.rank} heard after {took:.2f} s", flush=True)
        assert took < LIMIT_S


@contextlib.contextmanager
def reporting(after_s=5.0):
    """Let waiting ranks report earlier; yields their lines, and whether some rank has reported."""
    checkpoint_ranks.REPORT_AFTER_S = after_s
    with shared_folder() as folder, logged(checkpoint_ranks.logger.name) as lines:
        flag, handler = Path(folder, "reported"), logging.Handler()
        handler.emit = lambda record: flag.touch()
        checkpoint_ranks.logger.addHandler(handler)
        yield lines, flag
        checkpoint_ranks.logger.removeHandler(handler)


def saves_on_main():
    run = Run()
    if run.rank == 0:
        others = "1" if run.size == 2 else f"1-{run.size - 1}"
        run.misuse(
            f"rank {others} will not call it",
            "rank 0 called save_state('/run/first') at ",
            "check_misuse.py:",
            f"rank {others} did not call it: it is at ",
            "in step",
        )
    run.step()
    # Who continues after the error meets the others as if nothing had been.
    run.save()


def waits_for_slow_main():
    run = Run()
    with reporting() as (lines, flag):
        if run.rank == 0:
            while not flag.exists():
                time.sleep(0.01)
        run.save()
        run.step()
        if run.rank == 1:
            assert len(lines) == 1 and "waits for other ranks: rank 0 is at " in lines[0], lines


def waits_for_two_that_wait_for_each_other():
    """Rank 1 stands still in a collective for rank 2, which is slow; rank 0 has nothing to do with that."""
    run = Run()
    pair = dist.new_group([1, 2])
    value = torch.ones(1, device=run.accelerator.device)
    with reporting() as (_, flag):
        if run.rank == 2:
            while not flag.exists():
                time.sleep(0.01)
        if run.rank > 0:
            dist.all_reduce(value, group=pair)
        run.save()
        # The same with a message between the two.
        run.step()
        flag.unlink(missing_ok=True)
        run.accelerator.wait_for_everyone()
        if run.rank == 1:
            dist.recv(value, 2)
        if run.rank == 2:
            while not flag.exists():
                time.sleep(0.01)
            dist.send(value, 1)
        run.save()


def dies_while_saving():
    """A rank is killed while it writes; no launcher takes the others down."""
    checkpoint_ranks.ASK_WRITERS_AFTER_S, checkpoint_ranks.ASK_WRITERS_AGAIN_S = 1, 1
    run = Run()
    gathered = run.meet()
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with raised(RuntimeError, "rank 1 was killed"):
        gathered.share()
    print(f"rank {run.rank} heard after {time.monotonic() - began:.2f} s", flush=True)
    Path(f"heard-{run.rank}").touch()
    while run.rank == 0 and not Path("heard-2").exists():
        time.sleep(0.01)  # rank 0 takes the store along when it ends
    os._exit(0)  # a group that has lost a rank cannot be left in peace


def ends_after_main():
    """The rank that holds the store ends first."""
    run = Run()
    run.save()
    if run.rank > 0:
        while not Path("main-has-ended").exists():
            time.sleep(0.01)
        hang._watcher._thread.join(LIMIT_S)
        assert not hang._watcher._thread.is_alive()


if __name__ == "__main__":
    for case in sys.argv[1:]:
        globals()[case]()
        if len(sys.argv) > 2:
            Run().accelerator.wait_for_everyone()
    # One write: with PYTHONUNBUFFERED set, print writes the line's end by itself, and ranks share the pipe.
    sys.stdout.write("ok all\n")
    sys.stdout.flush()
