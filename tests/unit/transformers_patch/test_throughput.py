"""`ThroughputCallback` where there is nothing to measure with; what it measures is in tests/interop."""

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState

import transformers_patch
from accelerate import Accelerator
from transformers_patch import ThroughputCallback
from transformers_patch.arguments import TrainingArguments


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def trainer_of(build, rows, kind=Trainer, collate=None, **options):
    arguments = build(TrainingArguments, save_strategy="no", disable_tqdm=True, **options)
    return kind(Line(), arguments, train_dataset=rows, data_collator=collate, callbacks=[ThroughputCallback])


def entries_of(trainer):
    trainer.train()
    assert not {"log", "training_step"} & vars(trainer).keys()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def trained(build, **options):
    rows = [{"x": [1.0], "labels": [2.0]}] * 16
    return entries_of(trainer_of(build, rows, max_steps=6, per_device_train_batch_size=2, logging_steps=2, **options))


def samples_of_a_step(entry):
    return entry["throughput/samples_per_second"] * entry["throughput/step_seconds"]


def test_without_a_trainer_it_says_so_and_does_nothing(build):
    callback, control = ThroughputCallback(), TrainerControl(should_log=True)
    arguments, state = build(TrainingArguments), TrainerState()
    with pytest.warns(UserWarning, match="adds nothing to the logs: no Trainer was found"):
        callback.on_train_begin(arguments, state, control)
    for event in ("on_step_end", "on_save", "on_evaluate", "on_epoch_end", "on_train_end"):
        getattr(callback, event)(arguments, state, control)


def test_beside_another_accelerate_it_says_so_and_the_trainer_trains(build, monkeypatch):
    monkeypatch.delattr(Accelerator, "throughput")
    with pytest.warns(UserWarning, match="another accelerate is installed"):
        entries = trained(build)
    assert len(entries) == 3 and not any(name.startswith("throughput/") for entry in entries for name in entry)


def test_rows_without_tokens_are_counted_as_samples(build):
    entries = trained(build)
    assert len(entries) == 3
    for entry in entries:
        assert entry["throughput/samples_per_second"] > 0 and "throughput/tokens_per_second" not in entry
        assert "throughput/mfu" not in entry  # of an unknown device


def test_a_batch_that_is_a_list_of_rows_is_counted(build):
    class OfRows(Trainer):
        def compute_loss(self, model, inputs, *args, **options):
            return model(**{name: torch.stack([row[name] for row in inputs]) for name in inputs[0]})["loss"]

    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 32
    trainer = trainer_of(build, rows, OfRows, list, logging_steps=2, max_steps=4, remove_unused_columns=False)
    assert samples_of_a_step(entries_of(trainer)[-1]) == pytest.approx(trainer.args.train_batch_size)


def test_where_the_log_goes_by_epochs_it_has_it_too(build):
    entries = trained(build, logging_strategy="epoch")
    assert entries and all("throughput/samples_per_second" in entry for entry in entries)


def test_a_training_that_has_failed_leaves_nothing_behind(build, monkeypatch):
    trainer = trainer_of(build, [{"x": [1.0], "labels": [2.0]}] * 64, max_steps=4, logging_steps=1)
    monkeypatch.setattr(Line, "forward", lambda self, x, labels: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    monkeypatch.undo()
    # Counted once: a second counter around the first would give twice as many in the same time.
    assert samples_of_a_step(entries_of(trainer)[-1]) == pytest.approx(trainer.args.train_batch_size)


def test_the_package_lists_it():
    assert "ThroughputCallback" in dir(transformers_patch)
