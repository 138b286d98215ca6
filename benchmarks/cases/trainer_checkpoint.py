"""What a checkpoint costs a Trainer's training: the stall, the wall time and the bytes. One process, or under torchrun.

`--way stock` is transformers as it is, on the accelerate that is found first on the path; `ours` and `async` are `transformers_patch`.
The state is a model in float32 and AdamW's two moments of it.
"""

import argparse
import json
import os
import shutil
import stat
import statistics
import threading
import time
import warnings
from pathlib import Path

import torch
from device import CPU
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from accelerate import Accelerator

warnings.simplefilter("ignore")
torch.set_num_threads(1)
LAYERS, ROWS = 12, 8
# Of the steps from one save to the next: the save, five steps while it may be under way, and the others alone.
EVERY, BUSY = 10, 5


class Blocks(nn.Module):
    """Square layers of a third of so many bytes, which return a loss as the Trainer asks for it."""

    def __init__(self, megabytes):
        super().__init__()
        width = int((megabytes * 2**20 / 4 / 3 / LAYERS) ** 0.5)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        self.width = width

    def forward(self, scale):
        """Return how far from one is what the layers make of rows of a number."""
        return {"loss": (self.layers(scale.expand(-1, self.width)) - 1).square().mean()}


def sync(folder):
    """See to it that the disk has every file of a folder."""
    for path in [*(file for file in folder.rglob("*") if file.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def is_folder(place):
    """Return whether a path is a folder, and no link to one; both in one look."""
    try:
        return stat.S_ISDIR(os.lstat(place).st_mode)
    except FileNotFoundError:
        return False


class Timed(Trainer):
    """Notes when a save begins and returns, and, where asked, when the disk has it."""

    def _save_checkpoint(self, *arguments, **options):
        number = self.state.global_step // EVERY
        place = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        begun = time.perf_counter()
        super()._save_checkpoint(*arguments, **options)
        self.clock.saves[number] = {"returned": time.perf_counter() - begun}
        # Every second one of the stock Trainer: what it leaves in the page cache is brought to the disk, which would change the stall.
        if self.clock.way == "stock" and number % 2 == 0 and self.is_world_process_zero():
            sync(place)
            self.clock.saves[number]["durable"] = time.perf_counter() - begun
        elif self.clock.way != "stock":
            self.clock.watch(number, place, begun)

    # It reads no files. A project's method might, and then a save is not left to the background.
    _save_checkpoint.__module__ = Trainer.__module__


class Clock(TrainerCallback):
    """Notes when steps end, and lets the disk come to rest before those that are measured alone."""

    def __init__(self, way):
        self.way, self.ends, self.saves, self.watching, self.written = way, {}, {}, [], 0

    def watch(self, number, place, begun):
        """Note when a checkpoint is at its place: then the disk has it. While callbacks write, a link leads to what is staged."""

        def look():
            while not is_folder(place):
                time.sleep(0.002)
            self.saves[number]["durable"] = time.perf_counter() - begun

        self.watching.append(threading.Thread(target=look, daemon=True))
        self.watching[-1].start()

    def on_step_begin(self, args, state, control, **rest):
        """Wait until nothing is under way."""
        if state.global_step % EVERY == BUSY:
            for thread in self.watching:
                thread.join()
            os.sync()
            # What this step waits for is no part of it.
            self.ends.pop(state.global_step, None)
            folder = Path(args.output_dir, f"checkpoint-{state.global_step - BUSY}")
            self.written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def on_step_end(self, args, state, control, **rest):
        """Note the end of a step."""
        self.ends[state.global_step] = time.perf_counter()

    def figures(self):
        """Return medians; of the first save, which has to get the memory, nothing is told."""
        gaps = {
            step: self.ends[step + 1] - end
            for step, end in self.ends.items()
            if step + 1 in self.ends and step >= 2 * EVERY
        }
        alone = statistics.median(gap for step, gap in gaps.items() if step % EVERY > BUSY)
        after = statistics.median(gap for step, gap in gaps.items() if 0 < step % EVERY < BUSY)
        synced = {number for number, save in self.saves.items() if self.way == "stock" and "durable" in save}
        stalls = [gap - alone for step, gap in gaps.items() if step % EVERY == 0 and step // EVERY not in synced]
        measured = [save for number, save in self.saves.items() if number > 1]
        returned = [save["returned"] for save in measured]
        return {
            "a step alone (s)": alone,
            "stall of the step after a save (s)": statistics.median(stalls),
            "the save returns (s)": statistics.median(returned),
            "the save is on the disk (s)": statistics.median(s["durable"] for s in measured if "durable" in s),
            "a step soon after it (s)": after,
            "written (MB)": self.written / 2**20,
        }


def main():
    """Train, and print the figures of rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("stock", "ours", "async"), required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--twice", action="store_true", help="prepare the model with an Accelerator before the Trainer does"
    )
    arguments = parser.parse_args()
    if arguments.way != "stock":
        import transformers_patch

        transformers_patch.apply(checkpoints="async" if arguments.way == "async" else True)
    settings = TrainingArguments(
        output_dir=arguments.folder,
        max_steps=(arguments.repeats + 1) * EVERY + BUSY,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=1,
        per_device_train_batch_size=ROWS,
        max_grad_norm=0.0,
        logging_strategy="no",
        report_to=[],
        use_cpu=CPU,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    model = Blocks(arguments.megabytes)
    if arguments.twice:
        model = Accelerator(cpu=CPU).prepare(model)
    clock = Clock(arguments.way)
    trainer = Timed(model, settings, train_dataset=[{"scale": [1.0]}] * 4096, callbacks=[clock])
    trainer.clock = clock
    trainer.train()
    if trainer.is_world_process_zero():
        print(json.dumps(clock.figures()), flush=True)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
