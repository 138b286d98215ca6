"""The throughput of a Trainer's run, in its logs: how fast it is, where its time goes, and the rank that the others wait for."""

import sys
import warnings
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


class ThroughputCallback(TrainerCallback):
    """Adds the values of ``Accelerator.throughput_report`` to each entry of the Trainer's log with a loss, and so to its trackers.

    The keys are those of the report's ``values()``: ``throughput/tokens_per_second`` and ``samples_per_second`` of all ranks
    together, ``mfu``, ``share_data``, ``share_forward`` and the other parts of a step, ``step_seconds``, ``slowest_rank`` (-1:
    none). The first step counts FLOPs, and is not measured, like a step after a save or an evaluation. It needs this fork's
    accelerate; with another one it warns, and adds nothing.

    Collective: call on every rank.

    Args:
        peak_flops: Of a device, per second, for the MFU; None uses a known GPU's dense bfloat16 figure.

    Example:
        >>> from transformers_patch import ThroughputCallback
        >>> trainer = Trainer(model, arguments, callbacks=[ThroughputCallback()])  # doctest: +SKIP
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops
        self._trainer: Any = None
        self._replaced: dict[str, Any] = {}
        self._values: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start to measure."""
        self.on_train_end(args, state, control)  # of a training that has failed
        trainer = _calling_trainer()
        try:
            if not hasattr(getattr(trainer, "accelerator", None), "throughput"):
                raise ValueError("no Trainer was found" if trainer is None else "another accelerate is installed")
            trainer.accelerator.throughput()
        except ValueError as error:
            # For example, a second `train` of a Trainer on several ranks trains a model that its Accelerator has released.
            warnings.warn(f"ThroughputCallback adds nothing to the logs: {error}", UserWarning, stacklevel=2)
            return
        self._trainer, self._values, self._interrupted = trainer, {}, False
        # The step that ends next counts FLOPs.
        self._tokens, self._samples, self._measured = 0.0, 0.0, -1
        for name, replacement in (("training_step", self._training_step), ("log", self._log)):
            self._replaced[name] = vars(trainer).get(name)
            setattr(trainer, name, partial(replacement, getattr(trainer, name)))

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Leave the Trainer as it was."""
        for name, former in self._replaced.items():
            vars(self._trainer).pop(name)
            vars(self._trainer).update({} if former is None else {name: former})
        self._replaced, self._trainer = {}, None

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """End the measurement of a step."""
        if self._trainer is None:
            return
        # The measured step includes work before it, and a save is not fully over when `on_save` is called.
        numbers = () if self._interrupted else (self._tokens or None, self._samples or None)
        self._trainer.accelerator.throughput(*numbers)
        self._measured += not self._interrupted
        self._tokens, self._samples, self._interrupted = 0.0, 0.0, False
        self._report(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Report, where the Trainer logs by epochs."""
        self._report(control)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Remember that a save or an evaluation came between two steps."""
        self._interrupted = True

    on_evaluate = on_save

    def _report(self, control: Any) -> None:
        # Here and not in `on_log`, because all ranks report together, and a program may log on one rank only.
        if self._trainer is not None and control.should_log and self._measured > 0:
            self._values = self._trainer.accelerator.throughput_report(self.peak_flops).values()
            self._measured = 0

    def _log(self, log: Any, logs: dict[str, float], *args: Any, **options: Any) -> Any:
        """Log the measurements with the loss of the same steps."""
        if self._values and "loss" in logs:
            logs, self._values = {**logs, **self._values}, {}
        return log(logs, *args, **options)

    def _training_step(self, step: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Count a micro-batch."""
        named = inputs if hasattr(inputs, "items") else {"": inputs}  # some Trainers get a list of rows
        batch = {str(name): rows for name, rows in named.items() if isinstance(rows, list) or getattr(rows, "ndim", 0)}
        ids = [rows for name, rows in batch.items() if name.endswith("input_ids") and isinstance(rows, torch.Tensor)]
        layout = getattr(self._trainer.accelerator, "parallelism_config", None)
        # Ranks that share a batch count a part of it each.
        sharing = layout.tp_size * layout.cp_size if layout is not None else 1
        self._tokens += sum(tensor.numel() for tensor in ids) / sharing
        self._samples += len(next(iter([*ids, *batch.values()]), ())) / sharing
        return step(model, inputs, *args, **options)


def _calling_trainer() -> Any:
    """Return the Trainer whose loop calls; transformers does not tell its callbacks."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
