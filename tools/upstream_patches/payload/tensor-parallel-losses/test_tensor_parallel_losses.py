"""Tokens and gradients count once under tensor parallelism, with accumulation too.

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
from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments, set_seed
from transformers.testing_utils import require_accelerate, require_torch
from transformers.utils import is_torch_available

if is_torch_available():
    import torch
    from transformers import Qwen3ForCausalLM

WORDS, LENGTH, STEPS = 32, 12, 2
# How many tokens of each row count
COUNTED = (12, 5, 9, 7)


def qwen() -> "Qwen3ForCausalLM":
    """Return the same small model each time; it has norms of heads."""
    set_seed(7)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2))


def rows() -> list[dict]:
    """Return rows of which each is a micro-batch."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for counted in COUNTED:
        ids = torch.randint(3, WORDS, (1, LENGTH), generator=generator)
        found.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) >= counted, -100)})
    return found


def norms(model: "Qwen3ForCausalLM") -> list[float]:
    """Return the norms of the gradients of the norms of heads after each micro-batch, in two steps."""
    found = []
    for _ in range(STEPS):
        for row in rows():
            model(**row).loss.backward()
            named = sorted(model.named_parameters(), key=lambda pair: pair[0])
            found += [param.grad.norm().item() for name, param in named if "q_norm" in name or "k_norm" in name]
        model.zero_grad()
    return found


def launched(folder: str) -> list[float]:
    """Return what two processes find that share the model of a folder."""
    paths = [str(Path(transformers.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    done = subprocess.run([*command, folder], env=variables, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))


@require_torch
@require_accelerate
class TensorParallelLossesTest(unittest.TestCase):
    def counted(self, tp_size: int, world_size: int = 1, **options: object) -> float:
        """Return what the Trainer divides a loss by, on one of the ranks that have the same rows."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, use_cpu=True, report_to=[], **options)
            trainer = Trainer(qwen(), arguments)

        def gather(value: "torch.Tensor") -> "torch.Tensor":
            return value.repeat(world_size)

        ranks = patch.object(TrainingArguments, "world_size", world_size)
        with patch.object(trainer, "get_tp_size", lambda: tp_size), ranks:
            with patch.object(trainer.accelerator, "gather", gather):
                return float(trainer._get_num_items_in_batch(rows(), torch.device("cpu")))

    def test_tokens_of_one_rank_are_not_divided(self):
        counted = sum(count - 1 for count in COUNTED)  # the first token is not predicted
        for tp_size in (1, 2, 4):
            with self.subTest(tp_size=tp_size):
                self.assertEqual(self.counted(tp_size, 4, average_tokens_across_devices=False), counted)

    def test_tokens_of_all_ranks_are_divided(self):
        counted = sum(count - 1 for count in COUNTED)
        for tp_size in (1, 2, 4):
            with self.subTest(tp_size=tp_size):
                found = self.counted(tp_size, 4, average_tokens_across_devices=True)
                self.assertEqual(found, counted * 4 / tp_size)

    def test_accumulated_gradients_are_those_of_one_process(self):
        with tempfile.TemporaryDirectory() as folder:
            qwen().save_pretrained(folder)
            expected = norms(qwen().train())
            found = launched(folder)
        for value, wanted in zip(found, expected, strict=True):
            self.assertLess(abs(value / wanted - 1), 1e-4)


if __name__ == "__main__":
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    config = DistributedConfig(tp_size=2)
    with patch("torch.accelerator.is_available", lambda: False):
        figures = norms(AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=config).train())
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()
