"""One state for an `Accelerator` and a `Trainer`, with and without `transformers_patch`.

    accelerate launch --cpu --num_processes 2 examples/share_state.py                  # shared: the patch is applied
    accelerate launch --cpu --num_processes 2 examples/share_state.py --without-patch  # upstream's behaviour: a reset in between

A tiny network learns y = 3x - 1 with a Trainer, next to an Accelerator that was there first and is used before and after.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import transformers_patch
from accelerate import Accelerator
from accelerate.utils import set_seed


class Line(nn.Module):
    """A line, in the shape that Trainer asks for: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean squared error and the predictions for a batch of points, each of shape (1,)."""
        guess = self.layer(x)
        return {"loss": nn.functional.mse_loss(guess, labels), "logits": guess}


def main() -> None:
    """Train, and say who shares a state with whom."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--without-patch", action="store_true", help="leave transformers as it is")
    if not parser.parse_args().without_patch:
        transformers_patch.apply()

    accelerator = Accelerator(cpu=True)
    set_seed(7)
    points = [{"x": [x / 8], "labels": [3 * x / 8 - 1]} for x in range(-8, 8)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            num_train_epochs=30,
            learning_rate=0.3,
            per_device_train_batch_size=4,
            ddp_find_unused_parameters=False,
            disable_tqdm=True,
        )
        whole = hasattr(accelerator.state, "distributed_type")  # upstream's Accelerator loses it without the patch
        trainer = Trainer(Line(), arguments, train_dataset=points)
        shared = trainer.accelerator.state.__dict__ is accelerator.state.__dict__
        accelerator.print(f"the Accelerator kept its state             : {whole}")
        accelerator.print(f"the Trainer shares the Accelerator's state : {shared}")
        trainer.train()

    weight = accelerator.gather(accelerator.unwrap_model(trainer.model).layer.weight.detach())
    accelerator.print(f"learned y = {weight[0].item():.1f}x, on {accelerator.num_processes} process(es)")
    accelerator.print(f"the same on all of them                    : {bool((weight == weight[0]).all())}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
