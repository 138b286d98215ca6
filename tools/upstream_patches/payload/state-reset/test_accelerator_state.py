"""An accelerator state that exists before the training arguments is kept, or reset where they say so.

The same file is the program that the test with two processes starts.
"""

import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest.mock import patch

import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.testing_utils import require_accelerate, require_torch
from transformers.utils import is_accelerate_available, is_torch_available

if is_torch_available():
    import torch

if is_accelerate_available():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

BESIDE_THE_STATE = "transformers.utils.accelerator_state"


def build(folder: str, **options: object) -> TrainingArguments:
    """Return training arguments on the CPU, for which no tracker is started."""
    return TrainingArguments(**{"output_dir": folder, "use_cpu": True, "report_to": [], **options})


def forget_states() -> None:
    """Reset every state that accelerate shares in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@require_torch
@require_accelerate
class AcceleratorStateTest(unittest.TestCase):
    """One process."""

    def setUp(self) -> None:
        """Start without a state, and with an environment that is restored."""
        environment = patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        forget_states()
        self.addCleanup(forget_states)

    def test_a_live_accelerator_keeps_its_state(self) -> None:
        """The program of the report: the accelerator works after the arguments as it did before."""
        accelerator = Accelerator(cpu=True)
        before = dict(AcceleratorState._shared_state)
        arguments = build(self.folder)
        self.assertEqual(accelerator.state.distributed_type, before["distributed_type"])
        self.assertEqual(AcceleratorState._shared_state, before)
        self.assertEqual((accelerator.num_processes, accelerator.process_index), (1, 0))
        self.assertEqual(accelerator.gather(torch.tensor([3])).tolist(), [3])
        self.assertEqual(arguments.device, accelerator.device)
        self.assertEqual(arguments.distributed_state.num_processes, 1)

    def test_it_survives_several_arguments(self) -> None:
        """Two in a row, as a hyperparameter search or a notebook builds them."""
        accelerator = Accelerator(cpu=True)
        for name in ("one", "two"):
            self.assertEqual(build(os.path.join(self.folder, name)).world_size, 1)
            accelerator.wait_for_everyone()

    def test_the_flag_resets(self) -> None:
        """`preserve_accelerator_state=False` is what every TrainingArguments did before."""
        Accelerator(cpu=True, mixed_precision="bf16")
        arguments = build(self.folder, preserve_accelerator_state=False)
        self.assertEqual(AcceleratorState._shared_state, {})
        self.assertEqual(arguments.device.type, "cpu")
        self.assertEqual(Accelerator(cpu=True, mixed_precision="no").mixed_precision, "no")

    def test_without_a_state_nothing_changes(self) -> None:
        """The arguments build the process state, and nothing more."""
        for kept in (True, False):
            with self.subTest(preserve_accelerator_state=kept):
                forget_states()
                arguments = build(self.folder, preserve_accelerator_state=kept)
                self.assertEqual(AcceleratorState._shared_state, {})
                self.assertIs(arguments.distributed_state._shared_state, PartialState._shared_state)
                self.assertEqual(Accelerator(cpu=True).device, arguments.device)

    def test_a_configured_state_is_still_asked_for(self) -> None:
        """`use_configured_state` raises without a state, and takes one that exists, whatever the flag says."""
        config = {"use_configured_state": True}
        for kept in (True, False):
            with self.subTest(preserve_accelerator_state=kept):
                forget_states()
                options = {"accelerator_config": dict(config), "preserve_accelerator_state": kept}
                with self.assertRaisesRegex(ValueError, "use_configured_state"):
                    build(self.folder, **options)
                accelerator = Accelerator(cpu=True)
                build(self.folder, **{**options, "accelerator_config": dict(config)})
                self.assertEqual(accelerator.num_processes, 1)

    def test_another_device_raises(self) -> None:
        """On a machine with a GPU, a state on the CPU is not what `use_cpu=False` asks for, and the other way round."""
        Accelerator(cpu=True)
        with patch(f"{BESIDE_THE_STATE}._accelerator_type", return_value="cuda"):
            with self.assertRaisesRegex(ValueError, "'cuda'.* 'cpu'.*preserve_accelerator_state=False"):
                build(self.folder, use_cpu=False)
        with patch.dict(PartialState._shared_state, device=torch.device("cuda", 0)):
            with self.assertRaisesRegex(ValueError, "'cpu'.* 'cuda:0'.*use_cpu=False"):
                build(self.folder)

    def test_another_precision_raises(self) -> None:
        """Both precisions are named, and so are the ways out; arguments that agree pass."""
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        with self.assertRaisesRegex(ValueError, "'no'.*'bf16'.*bf16=True.*preserve_accelerator_state=False"):
            build(self.folder)
        build(self.folder, bf16=True)
        self.assertEqual(accelerator.mixed_precision, "bf16")

    def test_a_process_state_has_no_precision_yet(self) -> None:
        """Nothing is decided before an Accelerator was built, so the arguments may choose."""
        PartialState(cpu=True)
        self.assertTrue(build(self.folder, bf16=True).bf16)

    def test_deepspeed_needs_its_own_state(self) -> None:
        """A DeepSpeed configuration cannot be applied to a state that was made without one."""
        accelerator = Accelerator(cpu=True)
        with self.assertRaisesRegex(RuntimeError, "DeepSpeed"):
            build(self.folder, deepspeed={"train_batch_size": 1})
        self.assertEqual(accelerator.num_processes, 1)

    def test_the_flag_on_the_command_line(self) -> None:
        """It is parsed as every other switch is."""
        words = ["--output_dir", self.folder, "--use_cpu", "--report_to", "none"]
        for extra, expected in ([], True), (["--preserve_accelerator_state", "False"], False):
            (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words, *extra])
            self.assertIs(arguments.preserve_accelerator_state, expected)

    def test_a_trainer_trains_on_the_state(self) -> None:
        """A Trainer uses the state that is there, and the caller's accelerator works next to it."""

        class Line(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def forward(self, x: "torch.Tensor", labels: "torch.Tensor") -> dict:
                return {"loss": ((self.weight * x - labels) ** 2).mean()}

        accelerator = Accelerator(cpu=True)
        rows = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(4)]
        for _ in range(2):
            arguments = build(self.folder, max_steps=1, save_strategy="no", disable_tqdm=True)
            trainer = Trainer(Line(), arguments, train_dataset=rows)
            trainer.train()
            self.assertEqual(trainer.accelerator.device, accelerator.device)
        self.assertEqual(accelerator.gather(torch.tensor([1])).tolist(), [1])


@require_torch
@require_accelerate
class DistributedAcceleratorStateTest(unittest.TestCase):
    """Two processes, started from here."""

    def test_two_processes(self) -> None:
        """Every check of `main` holds on both ranks."""
        source = str(Path(transformers.__file__).resolve().parents[1])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc_per_node=2",
                    __file__,
                    folder,
                ],
                env={**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=300,
            )
        self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-4000:])
        self.assertIn("both ranks are right", done.stdout)


def check_they_meet(accelerator: "Accelerator") -> None:
    """The accelerator knows both ranks, and its collectives work."""
    assert accelerator.num_processes == 2, accelerator.num_processes
    gathered = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert gathered.tolist() == [0, 1], gathered
    accelerator.wait_for_everyone()


def main(folder: str) -> None:
    """What each of the two processes does."""
    accelerator = Accelerator(cpu=True)
    before = dict(AcceleratorState._shared_state)
    for _ in range(2):
        arguments = build(folder)
        assert AcceleratorState._shared_state == before, AcceleratorState._shared_state
        assert (arguments.world_size, arguments.process_index) == (2, accelerator.process_index)
        check_they_meet(accelerator)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            build(folder, ddp_timeout=77)
    told = [str(warning.message) for warning in caught if "ddp_timeout=77" in str(warning.message)]
    assert len(told) == int(accelerator.is_local_main_process), told

    try:
        build(folder, bf16=True)
    except ValueError as error:
        assert "'bf16'" in str(error) and "'no'" in str(error), error
    else:
        raise AssertionError("another precision has to raise on every rank")
    check_they_meet(accelerator)

    # The environment says which precision the last arguments asked for; a new accelerator is told its own.
    assert build(folder, preserve_accelerator_state=False).world_size == 2
    assert AcceleratorState._shared_state == {}
    check_they_meet(Accelerator(cpu=True, mixed_precision="no"))
    if PartialState().is_main_process:
        print("both ranks are right")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
