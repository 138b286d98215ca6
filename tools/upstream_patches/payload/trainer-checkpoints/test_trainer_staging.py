"""Checkpoints of the Trainer are complete or not there.

The same file is the program whose processes are killed in the middle of a save, or are the two ranks of a Trainer.
"""

import fnmatch
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest.mock import patch

import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer_staging
from transformers.testing_utils import require_accelerate, require_torch
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_torch_available

if is_torch_available():
    import torch

STATE = "trainer_state.json"
# What a Trainer on one process writes, in this order
MOMENTS = ["weights", "optimizer.pt", "scheduler.pt", "rng_state.pth", STATE, "rename"]


def line() -> "torch.nn.Module":
    """Return a model that learns one number."""

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: "torch.Tensor", labels: "torch.Tensor") -> dict:
            return {"loss": ((self.weight * x - labels) ** 2).mean()}

    return Line()


def trainer(folder: str, kind: type = Trainer, callbacks: tuple = (), **options: object) -> Trainer:
    """Return a Trainer of six steps on the CPU that saves after every second one."""
    defaults = {"output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 6}
    defaults |= {"save_steps": 2, "learning_rate": 0.1, "per_device_train_batch_size": 1, "logging_strategy": "no"}
    rows = [{"x": torch.tensor([1.0 + index]), "labels": torch.tensor([3.0])} for index in range(12)]
    arguments = TrainingArguments(**{**defaults, **options})
    return kind(line(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))


def run(*programs: dict) -> list[int]:
    """Start this file, which forks once for each program, and return how they ended.

    A program has the `folder` of its Trainer, the `variables` of its environment, and the moment when it is `killed` or the
    `options` of its arguments.
    """
    paths = [str(Path(transformers.__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment = {**clean, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    codes = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else [1]
    if max(codes) > 0:
        raise AssertionError(done.stdout + done.stderr)
    return codes


def names(folder: str) -> list[str]:
    """Return the folders of a run."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


@require_torch
@require_accelerate
class TrainerStagingTest(unittest.TestCase):
    """One process."""

    def setUp(self) -> None:
        """Have a folder, and an environment that is restored."""
        environment = patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, *words: str) -> str:
        """Return a path in the folder."""
        return os.path.join(self.folder, *words)

    def test_killed_in_a_save(self) -> None:
        """Wherever it is killed in its second save, the run continues from the first, and ends as one that was not."""
        wanted = trainer(self.path("straight"))
        wanted.train()
        codes = run(*[{"folder": self.path(moment), "killed": moment} for moment in MOMENTS])
        self.assertEqual(codes, [-signal.SIGKILL] * len(MOMENTS))
        for moment in MOMENTS:
            with self.subTest(killed_at=moment):
                folder = self.path(moment)
                left = names(folder)
                self.assertEqual(left[1:], ["checkpoint-2"])
                self.assertTrue(left[0].startswith("_saving-checkpoint-4"))
                self.assertEqual(get_last_checkpoint(folder), os.path.join(folder, "checkpoint-2"))
                resumed = trainer(folder)
                resumed.train(resume_from_checkpoint=True)
                self.assertEqual(names(folder), ["checkpoint-2", "checkpoint-4", "checkpoint-6"])
                self.assertEqual(resumed.model.weight.item(), wanted.model.weight.item())

    def test_killed_while_an_older_one_is_replaced(self) -> None:
        """Between the two renames neither has its name; the new one gets it, from a resume and from the next save."""
        for asked in ("resume", "save"):
            with self.subTest(asked=asked):
                folder = self.path(asked)
                trainer(folder, max_steps=4).train()
                Path(folder, "checkpoint-4", "older").touch()
                self.assertEqual(run({"folder": folder, "killed": "replaced"}), [-signal.SIGKILL])
                self.assertNotIn("checkpoint-4", names(folder))
                if asked == "resume":
                    self.assertEqual(get_last_checkpoint(folder), os.path.join(folder, "checkpoint-4"))
                    trainer(folder).train(resume_from_checkpoint=True)
                else:
                    trainer(folder, max_steps=2).train()
                self.assertNotIn("older", os.listdir(os.path.join(folder, "checkpoint-4")))
                wanted = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
                self.assertEqual(names(folder), wanted if asked == "resume" else wanted[:2])

    def test_half_written_folders_are_passed_over(self) -> None:
        """One without a state and one with half of it each get a warning; the newest whole one is taken."""
        trainer(self.folder).train()
        os.remove(self.path("checkpoint-6", STATE))
        text = Path(self.path("checkpoint-4", STATE)).read_text(encoding="utf-8")
        Path(self.path("checkpoint-4", STATE)).write_text(text[: len(text) // 2], encoding="utf-8")
        with self.assertLogs("transformers.trainer_staging", "WARNING") as caught:
            self.assertEqual(get_last_checkpoint(self.folder), self.path("checkpoint-2"))
        said = [message.partition("Passed over ")[2].partition(",")[0] for message in caught.output]
        reason = f"it has no {STATE} that can be read"
        self.assertEqual(said, [f"{self.path(name)}: {reason}" for name in ("checkpoint-6", "checkpoint-4")])
        resumed = trainer(self.folder)
        resumed.train(resume_from_checkpoint=True)
        self.assertEqual(resumed.state.global_step, 6)
        self.assertEqual(get_last_checkpoint(self.folder), self.path("checkpoint-6"))

    def test_without_a_whole_one(self) -> None:
        """There is none to continue from, and it is said."""
        os.mkdir(self.path("checkpoint-2"))
        self.assertIsNone(get_last_checkpoint(self.folder))
        with self.assertRaisesRegex(ValueError, "No valid checkpoint"):
            trainer(self.folder).train(resume_from_checkpoint=True)

    def test_the_order_is_that_of_the_steps(self) -> None:
        """Ten comes after nine, and a warning is for those that are newer than the one that is taken."""
        for step in (8, 9, 10):
            os.mkdir(self.path(f"checkpoint-{step}"))
            Path(self.path(f"checkpoint-{step}", STATE)).write_text("{}", encoding="utf-8")
        os.remove(self.path("checkpoint-8", STATE))
        with patch.object(trainer_staging.logger, "warning") as warned:
            self.assertEqual(get_last_checkpoint(self.folder), self.path("checkpoint-10"))
        warned.assert_not_called()

    def test_rotation(self) -> None:
        """Nothing is removed before the new one is complete and in its place."""
        seen = []
        remove = shutil.rmtree

        def watched(path: str, *args: object, **options: object) -> None:
            seen.append((os.path.basename(path), os.path.basename(get_last_checkpoint(self.folder) or "")))
            remove(path, *args, **options)

        with patch.object(shutil, "rmtree", watched):
            trainer(self.folder, save_total_limit=1).train()
        removed = [(path, newest) for path, newest in seen if path.startswith("checkpoint-")]
        self.assertEqual(removed, [("checkpoint-2", "checkpoint-4"), ("checkpoint-4", "checkpoint-6")])
        self.assertEqual(names(self.folder), ["checkpoint-6"])

    def test_the_best_one_is_found_at_its_place(self) -> None:
        """What the state says of the best checkpoint is where it will be, not where it is written."""
        options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        trained = trainer(self.folder, save_total_limit=1, **options)
        trained.train()
        best = trained.state.best_model_checkpoint
        self.assertIn(best, [self.path(name) for name in names(self.folder)])
        with open(os.path.join(best, STATE), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["best_model_checkpoint"], best)

    def test_an_older_one_of_this_name_is_replaced(self) -> None:
        """Whole, and without what the older one had; the older one is there until the new one is written."""
        trainer(self.folder).train()
        Path(self.path("checkpoint-2", "older")).touch()
        seen = []

        class Watched(Trainer):
            def _save_rng_state(self, output_dir: str) -> None:
                super()._save_rng_state(output_dir)
                seen.append(sorted(os.listdir(os.path.join(self.args.output_dir, "checkpoint-2"))))

        trainer(self.folder, Watched, max_steps=2).train()
        after = sorted(os.listdir(self.path("checkpoint-2")))
        self.assertEqual(seen, [sorted([*after, "older"])])
        self.assertEqual(names(self.folder), ["checkpoint-2", "checkpoint-4", "checkpoint-6"])

    def test_a_disk_without_renames(self) -> None:
        """It is copied, and what says that it is complete comes last; a run that is killed meanwhile has an unfinished one."""
        trainer(self.folder, max_steps=2).train()
        Path(self.path("checkpoint-2", "older")).touch()
        copied = []
        copy = shutil.copyfile

        def watched(source: str, target: str, **options: object) -> None:
            with self.assertLogs("transformers.trainer_staging", "WARNING"):
                self.assertIsNone(get_last_checkpoint(self.folder))
            copied.append(os.path.basename(target))
            copy(source, target, **options)

        with patch.object(os, "rename", side_effect=OSError(95, "not supported")):
            with patch.object(shutil, "copyfile", watched):
                trainer(self.folder, max_steps=2).train()
        self.assertEqual(copied[-1], STATE)
        self.assertNotIn("older", os.listdir(self.path("checkpoint-2")))
        self.assertEqual(names(self.folder), ["checkpoint-2"])
        trainer(self.folder).train(resume_from_checkpoint=True)

    def test_the_other_name(self) -> None:
        """It is no checkpoint for those who list them, and a push to the Hub leaves it out."""
        seen = []

        class Seen(Trainer):
            def _save_rng_state(self, output_dir: str) -> None:
                super()._save_rng_state(output_dir)
                seen.append(output_dir)

        trainer(self.folder, Seen, max_steps=2).train()
        (staged,) = seen
        self.assertEqual(os.path.dirname(staged), self.folder)
        self.assertEqual(glob.glob(self.path("checkpoint-*")), [self.path("checkpoint-2")])
        self.assertTrue(fnmatch.fnmatch(f"{os.path.basename(staged)}/{STATE}", "_*"))

    def test_callbacks_find_it(self) -> None:
        """`on_save` comes when the checkpoint has its name, and may add to it."""

        class Adds(TrainerCallback):
            def on_save(self, args: TrainingArguments, state: object, control: object, **kwargs: object) -> None:
                Path(args.output_dir, f"checkpoint-{state.global_step}", "added").touch(exist_ok=False)

        trainer(self.folder, callbacks=(Adds(),)).train()
        for name in names(self.folder):
            self.assertTrue(os.path.isfile(self.path(name, "added")) and os.path.isfile(self.path(name, STATE)))


@require_torch
@require_accelerate
class DistributedTrainerStagingTest(unittest.TestCase):
    """Two processes. Rank 1 is slow, so whoever does not wait for it publishes without its part."""

    def test_two_processes(self) -> None:
        """On one node, on two that share a disk, and on two with disks of their own; `save_on_each_node` too."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            os.makedirs(path / "other/_saving-checkpoint-2")  # a killed run left it
            cases = [
                (path / "node", path / "node", [0, 1], False),
                (path / "shared", path / "shared", [0, 0], False),
                # A mistake, as the documentation says, which costs no checkpoint
                (path / "shared by mistake", path / "shared by mistake", [0, 0], True),
                (path / "one", path / "other", [0, 0], False),
                (path / "each one", path / "each other", [0, 0], True),
            ]
            programs = [program for case in cases for program in self.ranks(*case)]
            self.assertEqual(run(*programs), [0] * len(programs))
            for shared in ("node", "shared", "shared by mistake"):
                self.check(path / shared, (0, 1))
            # What the second node has is its part, as it was before, and nothing is left there.
            self.check(path / "one", (0,))
            self.check(path / "other", (1,), state=False)
            self.check(path / "each one", (0,))
            self.check(path / "each other", (1,))

    def ranks(self, one: Path, other: Path, local_ranks: list[int], each_node: bool) -> list[dict]:
        """Return the programs of both ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [
            {
                "folder": str((one, other)[rank]),
                "options": {"save_on_each_node": each_node},
                "variables": {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)},
            }
            for rank, local in enumerate(local_ranks)
        ]

    def check(self, folder: Path, ranks: tuple, state: bool = True) -> None:
        """The checkpoints are there with what these ranks wrote, and nothing is left next to them."""
        with self.subTest(folder=folder.name):
            self.assertEqual(names(folder), ["checkpoint-2", "checkpoint-4"])
            for name in names(folder):
                found = sorted(path.name for path in (folder / name).iterdir())
                wanted = [f"rng_state_{rank}.pth" for rank in ranks]
                self.assertEqual([file for file in found if "rng" in file], wanted)
                self.assertEqual(STATE in found, state)


class Killed(Trainer):
    """Kills its process in the second save, in the middle of a file or before the folder is renamed."""

    moment = ""

    def _save_checkpoint(self, *args: object, **options: object) -> None:
        if self.state.global_step == 4:
            self.arm()
        super()._save_checkpoint(*args, **options)

    def _save(self, output_dir: str, *args: object, **options: object) -> None:
        super()._save(output_dir, *args, **options)
        if self.state.global_step == 4 and self.moment == "weights":
            kill()

    def arm(self) -> None:
        """Let what writes the file end in the middle of it."""
        save = torch.save

        def cut(obj: object, path: str, *args: object, **options: object) -> None:
            save(obj, path, *args, **options)
            if os.path.basename(path) == self.moment:
                os.truncate(path, os.path.getsize(path) // 2)
                kill()

        def cut_state(path: str) -> None:
            Path(path).write_text('{"global_step": ', encoding="utf-8")
            kill()

        torch.save = cut
        if self.moment == STATE:
            self.state.save_to_json = cut_state
        if self.moment == "rename":
            os.rename = lambda *paths: kill()
        if self.moment == "replaced":
            rename = os.rename
            os.rename = lambda source, to: (rename(source, to), to.endswith("-replaced") and kill())


class Slow(Trainer):
    """Its second rank takes a while to write, and both look at what is published."""

    def _save_rng_state(self, output_dir: str) -> None:
        time.sleep(1.5 * self.args.process_index)
        super()._save_rng_state(output_dir)

    def _save_checkpoint(self, *args: object, **options: object) -> None:
        super()._save_checkpoint(*args, **options)
        place = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        assert os.path.isfile(os.path.join(place, f"rng_state_{self.args.process_index}.pth")), os.listdir(place)
        assert not glob.glob(os.path.join(self.args.output_dir, f"{trainer_staging.STAGING_PREFIX}*"))


def kill() -> None:
    """End this process as a scheduler or the kernel does."""
    os.kill(os.getpid(), signal.SIGKILL)


def work(program: dict) -> None:
    """What one process does."""
    os.environ.update(program.get("variables", {}))
    if "killed" in program:
        Killed.moment = program["killed"]
        trainer(program["folder"], Killed).train()
    else:
        trainer(program["folder"], Slow, max_steps=4, ddp_backend="gloo", **program["options"]).train()
        torch.distributed.destroy_process_group()


def main(programs: list[dict]) -> None:
    """Fork once for each program, two at a time, and print how they ended."""
    codes = []
    for start in range(0, len(programs), 2):
        children = []
        for program in programs[start : start + 2]:
            children.append(os.fork())
            if not children[-1]:
                work(program)
                os._exit(0)
        ended = {}
        while len(ended) < len(children):
            child, status = os.wait()
            ended[child] = os.waitstatus_to_exitcode(status)
            if ended[child] > 0:  # the other rank would wait for it
                for other in set(children) - set(ended):
                    os.kill(other, signal.SIGKILL)
        codes += [ended[child] for child in children]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
