"""The auxiliary loss of a mixture of experts counts as its mean over micro-batches and processes.

The same file is the program of each of two processes.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import transformers
from transformers import MixtralConfig, Trainer, TrainingArguments, set_seed
from transformers.testing_utils import require_accelerate, require_torch
from transformers.utils import is_torch_available

if is_torch_available():
    import torch
    from transformers import MixtralForCausalLM

WEIGHT = 0.5  # so large that one auxiliary loss too many is seen
WORDS, LENGTH = 32, 12
# How many tokens of each row count
COUNTED = (12, 5, 9, 7)


def mixtral(**options: object) -> "MixtralForCausalLM":
    """Return the same small model each time."""
    set_seed(7)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    auxiliary = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **auxiliary, **options}))


def rows(alike: bool = False) -> list[dict]:
    """Return four rows with different numbers of tokens that count, or four times one row."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for counted in COUNTED:
        ids = torch.randint(3, WORDS, (LENGTH,), generator=generator)
        found.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) >= counted, -100)})
    return [found[0]] * len(found) if alike else found


def trained(
    data: list[dict], batch: int, window: int, loss: object = None, changes: dict | None = None, **options
) -> dict:
    """Return loss and norm of the gradients in one step of the Trainer over all data, and the loss of an evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        defaults |= {"max_steps": 1, "learning_rate": 0.0, "optim": "sgd", "gradient_accumulation_steps": window}
        sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
        arguments = TrainingArguments(folder, **defaults, **sizes, **options)
        data_of = {"train_dataset": data, "eval_dataset": data}
        trainer = Trainer(mixtral(**(changes or {})), arguments, compute_loss_func=loss, **data_of)
        trainer.train()
        step, evaluated = trainer.state.log_history[0], trainer.evaluate()["eval_loss"]
    return {"loss": step["loss"], "norm": step["grad_norm"], "evaluated": evaluated}


def by_hand(data: list[dict]) -> dict:
    """Return loss and norm when each row is a micro-batch."""
    model = mixtral().train()
    items = sum((row["labels"][1:] != -100).sum() for row in data)
    outputs = [model(**{name: value[None] for name, value in row.items()}, num_items_in_batch=items) for row in data]
    auxiliary = torch.stack([output.aux_loss for output in outputs])
    loss = sum(output.loss for output in outputs) - WEIGHT * auxiliary.sum() + WEIGHT * auxiliary.mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    return {"loss": loss.item(), "norm": norm.item()}


def mean_over_tokens(outputs: dict, labels: "torch.Tensor", num_items_in_batch: object) -> "torch.Tensor":
    """Return a loss that is not the model's."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@require_torch
@require_accelerate
class TrainerAuxiliaryLossTest(unittest.TestCase):
    def assert_near(self, found: dict, wanted: dict) -> None:
        for name, value in wanted.items():
            self.assertLess(abs(found[name] / value - 1), 1e-5, f"{name}: {found[name]}, not {value}")

    def test_accumulation_over_rows_that_are_alike(self):
        whole = trained(rows(alike=True), batch=4, window=1)
        for batch, window in ((2, 2), (1, 4), (1, 8)):  # of eight there are four
            self.assert_near(trained(rows(alike=True), batch, window), whole)

    def test_accumulation_over_rows_with_different_numbers_of_tokens(self):
        self.assert_near(trained(rows(), batch=1, window=4), by_hand(rows()))

    def test_two_processes(self):
        paths = [str(Path(transformers.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        alike, different = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
        self.assert_near(alike, trained(rows(alike=True), batch=4, window=1))
        self.assert_near(different, by_hand(rows()))

    def test_other_losses_stay(self):
        # Without an auxiliary loss, or with a loss that the model has not computed
        cases = [{"changes": {"output_router_logits": False}}, {"changes": {"router_aux_loss_coef": 0.0}}]
        cases += [{"loss": mean_over_tokens}, {"label_smoothing_factor": 0.1}]
        for case in cases:
            with self.subTest(**case):
                found = trained(rows(), batch=1, window=4, **case)
                with patch("transformers.trainer.average_auxiliary_loss", lambda *seen: seen[3]):
                    self.assertEqual(found, trained(rows(), batch=1, window=4, **case))


if __name__ == "__main__":
    figures = [trained(rows(alike), batch=1, window=2, ddp_backend="gloo") for alike in (True, False)]
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()
