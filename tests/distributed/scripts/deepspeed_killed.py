"""Kills a DeepSpeed job while it saves, again and again: the checkpoint of that name is complete each time, and the next run continues from it.

DeepSpeed is imported once; each run is forked. The ranks say in a pipe when a save begins and ends, so that kills fall within saves.
"""

import argparse
import itertools
import logging
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import deepspeed
import torch
from check_deepspeed import engines, prepared, train
from crash_points import die_with_parent

from accelerate.checkpoint.manifest import problems
from accelerate.checkpoint.storage import storage_of
from accelerate.extensions.deepspeed import zero

WORLD, LIMIT_S = 2, 120


def save_until_killed(stage: int, path: Path, saying: int) -> None:
    """Load what is there, then train and save without end, in the background and not."""
    accelerator = engines(stage)
    model, optimizer, scheduler = prepared(accelerator)
    accelerator.load_state(path, missing_ok=True)
    weights = accelerator.get_state_dict(model)
    if path.exists() and accelerator.process_index == 0:
        assert model.global_steps == steps_of(path)
        whole = zero.ZeroLayout().open(str(path / "pytorch_model"), "model")
        assert all(value.equal(weights[name]) for name, value in whole.read(whole.state).items())
    for blocking in itertools.cycle((False, True)):
        train(accelerator, model, optimizer, scheduler, updates=range(1))
        accelerator.wait_for_everyone()
        if accelerator.process_index == 0:
            os.write(saying, b"b")
        accelerator.save_state(path, blocking=blocking)
        if not blocking:
            train(accelerator, model, optimizer, scheduler, updates=range(1))
            accelerator.wait_for_checkpoint()
        if accelerator.process_index == 0:
            os.write(saying, b"e")


def steps_of(path: Path) -> int:
    """Verify the checkpoint without DeepSpeed; the step that all its files tell of."""
    state = storage_of(path).state()
    assert state.kind == "complete", state
    assert not problems(str(path), state.manifest, deep=True)
    folder = zero.Folder(str(path / "pytorch_model"))
    assert len(folder.shards) == WORLD
    count = folder.head["global_steps"]
    optimizer = folder.optimizer()
    counted = optimizer.read(optimizer.state)["state"].values()
    assert {int(values["step"]) for values in counted} == {count}
    return count


def seen(path: Path) -> int:
    """Return what `steps_of` finds in a fork: it has threads, with which this process could not fork any more."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(writing, str(steps_of(path)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as told:
        return int(told.read())


def fork(stage: int, path: Path, rank: int, port: int, saying: int, log: Path) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ.update(
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, **{k: str(v) for k, v in ranks.items()}
        )
        torch.manual_seed(0)
        save_until_killed(stage, path, saying)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def kill_one(stage: int, path: Path, log: Path, draw: random.Random, took: list[float]) -> None:
    """Run a job, and kill all of it within one of its first saves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    heard, saying = os.pipe()
    running = [fork(stage, path, rank, port, saying, log) for rank in range(WORLD)]
    os.close(saying)
    # The first save of all is not killed: it says how long one takes.
    left, deadline = draw.randint(0, 2) if took else 1, time.monotonic() + LIMIT_S
    try:
        while True:
            said = os.read(heard, 1) if select.select([heard], [], [], deadline - time.monotonic())[0] else b""
            assert said == b"b", log.read_text()[-6000:]
            begun = time.monotonic()
            within = draw.random() * min(took) if left <= 0 else LIMIT_S
            if not select.select([heard], [], [], within)[0]:
                return  # it is saving
            assert os.read(heard, 1) == b"e", log.read_text()[-6000:]
            took.append(time.monotonic() - begun)
            left -= 1
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid in running:
            os.waitpid(pid, 0)
        os.close(heard)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    # A job that is killed while it builds this operator would leave a lock in a cache, for which every later job waits.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for stage in (2, 3):
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        path, draw, took = folder / "saved", random.Random(options.seed + stage), []
        steps = [0]
        for number in range(options.kills):
            kill_one(stage, path, folder / f"run_{number}.log", draw, took)
            steps.append(seen(path))
            assert steps[-1] >= steps[-2]
        kept = len(set(steps)) - 1
        print(
            f"stage {stage}: {options.kills} kills within saves of {min(took):.2f} s, all whole, at {kept} steps",
            flush=True,
        )
