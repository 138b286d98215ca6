"""A Trainer with `ThroughputCallback`: what is in its log. On several ranks the last one reads slowly. `trainer_throughput.py FOLDER`."""

import sys
import time
import warnings

import torch
from tiny import TokenRows, causal_model, report
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from transformers_patch import ThroughputCallback

ROWS, TOKENS, ACCUMULATION, STEPS, SLOW_S = 4, 12, 2, 16, 0.05


class Seen(TrainerCallback):
    """Keeps what trackers are given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **rest):
        self.logs.append(sorted(logs))


class LogsAlone(TrainerCallback):
    """Logs on one rank alone, which the others must not wait for."""

    trainer = None

    def on_substep_end(self, args, state, control, **rest):
        if state.is_world_process_zero:
            self.trainer.log({"mine": 1.0})


def main():
    torch.set_num_threads(1)
    seen, alone = Seen(), LogsAlone()
    arguments = TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATION, max_steps=STEPS,
        logging_steps=4, eval_strategy="steps", eval_steps=6, save_steps=7, report_to=[], use_cpu=True, disable_tqdm=True,
        learning_rate=1e-3, seed=3,
    )  # fmt: skip

    def collate(rows):
        if trainer.args.process_index and trainer.model.training:
            time.sleep(SLOW_S)
        return default_data_collator(rows)

    trainer = Trainer(
        causal_model(), arguments, train_dataset=TokenRows(64), eval_dataset=TokenRows(8, seed=1), data_collator=collate,
        callbacks=[ThroughputCallback(peak_flops=1e12), seen, alone],
    )  # fmt: skip
    alone.trainer = trainer
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    first = [entry for entry in trainer.state.log_history if "loss" in entry]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    again = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    report(
        entries=first, slow_step=SLOW_S * ACCUMULATION, again=again, told=[str(one.message) for one in told if "ThroughputCallback" in str(one.message)],
        others=[entry for entry in trainer.state.log_history if "mine" in entry][:1],
        seen=[names for names in seen.logs if "loss" in names], seconds=seconds,
        left=[name for name in ("log", "training_step") if name in vars(trainer)],
        units={"tokens": ROWS * TOKENS * ACCUMULATION, "samples": ROWS * ACCUMULATION},
    )  # fmt: skip


if __name__ == "__main__":
    main()
