"""A Trainer of which one rank stands still in the user's own code: `trainer_hangs.py FOLDER collator|callback`. See the `# rank 1` lines."""

import sys
import time

from tiny import TokenRows, causal_model
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

FOREVER_S = 600


class Notes(TrainerCallback):
    """Takes its time after the second step, on rank 1."""

    def on_step_end(self, args, state, control, **rest):
        if args.process_index == 1 and state.global_step == 2:
            time.sleep(FOREVER_S)  # rank 1, callback


class Collator:
    """Takes its time for the third batch, on rank 1."""

    calls = 0

    def __call__(self, rows):
        self.calls += 1
        if trainer.args.process_index == 1 and self.calls == 3:
            time.sleep(FOREVER_S)  # rank 1, collator
        return default_data_collator(rows)


folder, who = sys.argv[1:]
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=2, max_steps=6, save_strategy="no", logging_strategy="no", report_to=[],
    use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    causal_model(), arguments, train_dataset=TokenRows(32),
    data_collator=Collator() if who == "collator" else default_data_collator,
    callbacks=[Notes()] if who == "callback" else [],
)  # fmt: skip
trainer.train()
