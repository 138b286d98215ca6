"""A Trainer killed while saving and started again, with and without the patch.

    accelerate launch --cpu --num_processes 1 examples/trainer_killed.py

Two runs, each in a separate process: one with transformers as it is, one with `transformers_patch.apply(checkpoints=True)`. The kill
comes at the same place in both, when half of a checkpoint's `optimizer.pt` is written. A third run, which is never stopped, says which
losses are the right ones. The model is tiny and random; nothing is downloaded.
"""

import io
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import transformers_patch

STEPS, SAVE_EVERY, KILLED_IN = 8, 2, 4
# The libraries are imported once, where the system can fork.
PROCESSES = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


class Exact(Trainer):
    """Writes the loss of each step down as it is; the Trainer's log rounds it."""

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Train on a batch, as the Trainer does."""
        loss = super().training_step(*args, **options)
        with open(Path(self.args.output_dir, "losses.txt"), "a", encoding="utf-8") as file:
            file.write(f"{self.state.global_step + 1} {loss.item().hex()}\n")
        return loss


def kill_in_save() -> None:
    """See to it that this process is killed when half of the optimizer of a checkpoint is on the disk."""
    write = Trainer._save_optimizer_and_scheduler

    def half(self: Trainer, folder: str) -> None:
        if not folder.endswith(f"checkpoint-{KILLED_IN}"):
            write(self, folder)
            return
        torch.save(self.optimizer.state_dict(), whole := io.BytesIO())
        Path(folder, "optimizer.pt").write_bytes(whole.getvalue()[: whole.tell() // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Trainer._save_optimizer_and_scheduler = half


def train(folder: str, patched: bool = False, saves: bool = True, killed: bool = False, resume: bool = False) -> None:
    """Train in this process; what goes wrong is left in `error.txt`."""
    torch.set_num_threads(1)
    if patched:
        transformers_patch.apply(checkpoints=True)
    if killed:
        kill_in_save()
    set_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (32, 16)).tolist()]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        save_strategy="steps" if saves else "no",
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=4,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    try:
        Exact(GPT2LMHeadModel(config), arguments, train_dataset=rows).train(resume_from_checkpoint=resume or None)
    except Exception as error:
        Path(folder, "error.txt").write_text(f"{type(error).__name__}: {error}", "utf-8")


def run(folder: str, **options: bool) -> int | None:
    """Train in a separate process, and return its exit code; negative is the signal that has killed it."""
    os.makedirs(folder, exist_ok=True)
    process = PROCESSES.Process(target=train, args=(folder,), kwargs=options)
    process.start()
    process.join()
    return process.exitcode


def losses(folder: str) -> list[str]:
    """Return a line for each step that was trained, those that were trained twice included."""
    return Path(folder, "losses.txt").read_text("utf-8").splitlines()


def killed_and_resumed(folder: str, patched: bool, right: list[str]) -> str:
    """Train until the kill, start again, and say in a few words what came of it."""
    if run(folder, patched=patched, killed=True) != -signal.SIGKILL:
        return "was not killed"
    before = losses(folder)
    run(folder, patched=patched, resume=True)
    error, after = Path(folder, "error.txt"), losses(folder)[len(before) :]
    if error.exists():
        print(error.read_text("utf-8").splitlines()[0].replace(folder, "output"))
        return f"does not continue ({error.read_text('utf-8').partition(':')[0]})"
    if not after:
        return "does not continue"
    same = before == right[:KILLED_IN] and after == right[-len(after) :]
    return f"continues after step {STEPS - len(after)}, {'the same losses' if same else 'other losses'}"


def main() -> None:
    """Run all three, and report the results."""
    with tempfile.TemporaryDirectory() as folder:
        run(f"{folder}/straight", saves=False)
        right = losses(f"{folder}/straight")
        stock = killed_and_resumed(f"{folder}/stock", False, right)
        patched = killed_and_resumed(f"{folder}/patched", True, right)
    print(f"killed in the save of step {KILLED_IN} of {STEPS}, started again:")
    print(f"transformers as it is : {stock}")
    print(f"transformers patched  : {patched}")


if __name__ == "__main__":
    main()
