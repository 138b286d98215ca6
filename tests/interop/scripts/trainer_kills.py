"""A Trainer that saves after every step, and continues where it was killed: `trainer_kills.py FOLDER WAY LIMIT [REFERENCE]`.

With REFERENCE it first trains there, without any save. Each rank appends the number and the exact loss of each of its steps to `losses_RANK.txt`. With `--kill SEED COUNT` in front the program
imports the libraries once, and starts and kills so many runs of one process, as forks, before it lets one come to its end.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import torch
from killing import fork, wait_and_kill, written
from tiny import Exact, TokenRows, causal_model, tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments

import transformers_patch
from transformers_patch.checkpoints import CheckpointMixin

STEPS = 10


class Written(Exact, Trainer):
    pass


class Own(CheckpointMixin, Written):
    pass


class Extra(TrainerCallback):
    """Takes time in each save, writes a separate file into the checkpoint, and rewrites one of the Trainer's in small pieces."""

    def on_save(self, args, state, control, **rest):
        time.sleep(0.02)  # or a busy machine does not see the save
        if state.is_world_process_zero:
            path = pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}", "extra.txt")
            path.write_text(str(state.global_step), "utf-8")
            state_file = path.with_name("trainer_state.json")
            text = state_file.read_text("utf-8")
            with open(state_file, "w", encoding="utf-8", buffering=1) as file:
                file.writelines(line + "\n" for line in text.splitlines())


def newest(folder, way):
    if way == "stock":
        from transformers.trainer_utils import get_last_checkpoint
    else:
        from transformers_patch.checkpoints import get_last_checkpoint
    return get_last_checkpoint(folder) or ""


def train(folder, way, limit):
    torch.set_num_threads(1)
    if way in ("apply", "async"):
        transformers_patch.apply(checkpoints="async" if way == "async" else True)
    os.makedirs(folder, exist_ok=True)
    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=STEPS, save_steps=1, save_total_limit=int(limit) or None,
        learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        save_strategy="no" if way == "reference" else "steps",
    )  # fmt: skip
    kind = Own if way == "mixin" else Written
    callbacks = [] if way == "async" else [Extra()]  # which would let the saves wait
    trainer = kind(
        causal_model(), arguments, train_dataset=TokenRows(16), processing_class=tokenizer(), callbacks=callbacks
    )
    last = newest(folder, way)
    # The stock Trainer takes one more step where it has nothing left to do.
    if not last.endswith(f"checkpoint-{STEPS}"):
        trainer.train(resume_from_checkpoint=bool(last))
    if trainer.is_world_process_zero():
        pathlib.Path(folder, "done.json").write_text(json.dumps({"from": last}), "utf-8")


def kill_forks(seed, count, folder, way, limit):
    log, reference = (os.path.join(os.path.dirname(folder), name) for name in ("log.txt", "reference"))
    assert os.waitpid(fork(log, train, reference, "reference", limit), 0)[1] == 0
    whole = written(reference, 0)
    draw, killed, in_saves, starts = random.Random(int(seed)), 0, 0, 0
    while True:
        pid, starts = fork(log, train, folder, way, limit), starts + 1
        ended = []

        def runs(pid=pid, ended=ended):
            found, status = os.waitpid(pid, os.WNOHANG) if not ended else (0, 0)
            ended.extend([status] if found else [])
            return not ended

        if killed < int(count):
            kill, in_a_save = lambda pid=pid: runs() and os.kill(pid, signal.SIGKILL), killed % 3 != 2
            in_saves += wait_and_kill(folder, draw, kill, runs, in_a_save)
        status = ended[0] if ended else os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status):
            raise SystemExit(pathlib.Path(log).read_text()[-6000:])
        elif killed < int(count):  # it came to its end: begin again, so that there is something to kill
            compare(folder, whole)
            os.rename(folder, f"{folder}_{starts}")
        else:
            break
    compare(folder, whole)
    print(json.dumps({"killed": killed, "in_saves": in_saves, "starts": starts}))


def compare(folder, whole):
    """Make sure that every step, of every start, had the loss of the run that was never stopped."""
    assert written(folder, 0) == whole and len(whole) == STEPS, (folder, whole)


if __name__ == "__main__":
    if sys.argv[1] == "--kill":
        _, _, seed, count, folder, way, limit = sys.argv
        kill_forks(seed, count, folder, way, limit)
    else:
        if sys.argv[4:]:
            train(sys.argv[4], "reference", 0)
        train(*sys.argv[1:4])
