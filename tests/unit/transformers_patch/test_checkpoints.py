"""The Trainer's checkpoints: whole or not there, chosen, rotated; on one process."""

import copy
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
import types
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint as stock_last

import transformers_patch
from accelerate.checkpoint import formats
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.save import unlisted
from transformers_patch import UnsupportedVersion, preempt, registry
from transformers_patch.checkpoints import CheckpointMixin, capture, choose, get_last_checkpoint, ranks, streams

STOCK = {"model.safetensors", "trainer_state.json", "training_args.bin"}
STOCK |= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
MANIFEST, RUN = "accelerate_manifest.json", "accelerate_run.json"


class Regression(torch.nn.Module):
    """Dropout, so that the loss depends on the generators, too."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        found = self.layers(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


def rows(count=32):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=draw)
    return [{"x": row, "labels": row.sum()} for row in x]


class Exact(Trainer):
    """Records each loss as it is; the Trainer's log rounds it."""

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        self.losses = [*getattr(self, "losses", []), loss.item().hex()]
        return loss


class Own(CheckpointMixin, Exact):
    pass


def build(folder, kind=Exact, callbacks=(), **options):
    transformers.set_seed(7)
    values = {
        "per_device_train_batch_size": 4, "num_train_epochs": 1, "save_steps": 2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 3, "learning_rate": 0.1,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**values, **options})
    return kind(Regression(), arguments, train_dataset=rows(), eval_dataset=rows(8), callbacks=list(callbacks))


def names(folder):
    return sorted(entry.name for entry in pathlib.Path(folder).iterdir())


@pytest.fixture(params=["apply", "mixin"])
def kind(request):
    """The class of a Trainer whose checkpoints are complete, in each way."""
    if request.param == "mixin":
        return Own
    transformers_patch.apply(checkpoints=True)
    return Exact


@pytest.fixture
def pushed(monkeypatch):
    """Let each save push its checkpoint; the folders that were pushed, and whether they had all files."""
    folders, saved = [], Trainer._save_rng_state

    def push(self, folder):
        folders.append((folder, set(names(folder)) >= {*STOCK, MANIFEST, RUN}))

    def save_and_push(self, folder):
        saved(self, folder)
        self._push_from_checkpoint(folder)

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "_save_rng_state", save_and_push)
    return folders


@pytest.fixture
def warned(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("transformers_patch")]


@pytest.fixture(autouse=True)
def stock_resumes(monkeypatch):
    """Let the stock Trainer of old releases read its generators by torch 2.6 and later, which refuse them otherwise."""
    if Version(transformers.__version__) < Version("4.57"):
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


class Interrupted(Exception):
    pass


def fails_at(monkeypatch, name):
    """Let the writing of a file of this name fail in its middle."""
    write = torch.save

    def save(obj, place, *args, **options):
        if os.path.basename(str(place)) == name:
            pathlib.Path(place).write_bytes(b"half")
            raise Interrupted(name)
        return write(obj, place, *args, **options)

    monkeypatch.setattr(torch, "save", save)


def test_a_checkpoint_is_whole_and_has_the_names_of_the_stock_trainer(tmp_path, kind):
    build(tmp_path / "stock", Exact if kind is Own else type("Stock", (Exact,), {}))
    trainer = build(tmp_path / "ours", kind)
    trainer.train()
    assert names(tmp_path / "ours") == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    for folder in (tmp_path / "ours").iterdir():
        assert set(names(folder)) == {*STOCK, MANIFEST, RUN}
        assert set(Manifest.read(folder).files) == {*STOCK, RUN}


def test_a_save_that_fails_leaves_what_was_there(tmp_path, kind, monkeypatch):
    with monkeypatch.context() as broken:
        trainer = build(tmp_path, kind)
        saved = type(trainer)._save_rng_state

        def once(self, folder):
            if self.state.global_step == 4:
                fails_at(broken, "rng_state.pth")
            return saved(self, folder)

        broken.setattr(Exact, "_save_rng_state", once, raising=False)
        with pytest.raises(Interrupted):
            trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    whole = build(tmp_path / "whole", kind)
    whole.train()
    resumed = build(tmp_path, kind)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.losses == whole.losses[2:] and stock_last(str(tmp_path)).endswith("checkpoint-8")


def test_stock_and_ours_resume_from_each_other(tmp_path, kind):
    transformers_patch.revert()
    stock = build(tmp_path / "stock")
    stock.train()
    if kind is Exact:
        transformers_patch.apply(checkpoints=True)
    ours = build(tmp_path / "ours", kind)
    ours.train()
    assert ours.losses == stock.losses
    shutil.rmtree(tmp_path / "stock" / "checkpoint-8")
    there = build(tmp_path / "stock", kind)
    there.train(resume_from_checkpoint=True)
    assert there.losses == stock.losses[6:]
    transformers_patch.revert()
    back = build(tmp_path / "ours")
    back.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert back.losses == stock.losses[4:]


DAMAGE = {
    "a file is missing": lambda folder: (folder / "optimizer.pt").unlink(),
    "a file is shorter": lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    "a byte has changed": lambda folder: flip(folder / "optimizer.pt"),
    "no state of the trainer": lambda folder: drop(folder, "trainer_state.json"),
    "half of the stock trainer": lambda folder: drop(folder, "rng_state.pth"),
    "empty": lambda folder: [entry.unlink() for entry in folder.iterdir()],
    "stock, a truncated file": lambda folder: (drop(folder), truncate(folder / "optimizer.pt")),
    "stock, truncated weights": lambda folder: (drop(folder), truncate(folder / "model.safetensors")),
    "stock, no weights": lambda folder: drop(folder, "model.safetensors"),
    "stock, a truncated state": lambda folder: (drop(folder), truncate(folder / "trainer_state.json")),
    "marked by the stock trainer": lambda folder: (drop(folder), (folder / "checkpoint-is-incomplete.txt").touch()),
}  # fmt: skip


def drop(folder, *others):
    for name in (MANIFEST, *others):
        (folder / name).unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_whole_is_passed_over_by_name(tmp_path, damage, warned):
    build(tmp_path, Own, save_total_limit=2).train()
    DAMAGE[damage](tmp_path / "checkpoint-8")
    resumed = build(tmp_path, Own)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.losses) == 2
    assert [line for line in warned() if "checkpoint-8" in line and "Passed over" in line]


def test_a_folder_that_is_named_must_be_whole(tmp_path, kind):
    build(tmp_path, kind).train()
    DAMAGE["a byte has changed"](tmp_path / "checkpoint-8")
    with pytest.raises(
        DamagedCheckpoint, match=r"checkpoint-8.*optimizer\.pt has changed(.|\n)*resume_from_checkpoint=True"
    ):
        build(tmp_path, kind).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    with pytest.raises(ValueError, match="checkpoint-80"):
        build(tmp_path, kind).train(resume_from_checkpoint=str(tmp_path / "checkpoint-80"))


def test_nothing_to_go_on_from(tmp_path, kind):
    with pytest.raises(ValueError, match=r"[Nn]o valid checkpoint"):
        build(tmp_path, kind).train(resume_from_checkpoint=True)
    build(tmp_path, kind, save_steps=8).train()
    DAMAGE["a file is missing"](tmp_path / "checkpoint-8")
    with pytest.raises(ValueError, match=r"checkpoint-8.*optimizer\.pt is missing"):
        build(tmp_path, kind).train(resume_from_checkpoint=True)
    assert get_last_checkpoint(tmp_path) is None


def test_the_last_checkpoint_is_the_newest_whole_one(tmp_path, warned):
    build(tmp_path, Own).train()
    DAMAGE["a file is missing"](tmp_path / "checkpoint-8")
    DAMAGE["half of the stock trainer"](tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-99").write_text("a file")
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-8" in warned()[0] and "checkpoint-6" in warned()[1]
    transformers_patch.apply(checkpoints=True)
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")
    transformers_patch.revert()
    assert transformers.trainer_utils.get_last_checkpoint is stock_last


def test_rotation_keeps_whole_ones_and_the_best(tmp_path, kind):
    build(tmp_path, kind, save_total_limit=2).train()
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    shutil.rmtree(tmp_path)
    # The best one is the first, because the rate is far too high.
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "learning_rate": 30.0}
    trainer = build(tmp_path, kind, save_total_limit=1, load_best_model_at_end=True, **options)
    seen = []
    trainer.add_callback(Looks(lambda args: seen.append((args.output_dir, names(tmp_path)))))
    trainer.train()
    best = f"{tmp_path}/checkpoint-2"
    assert trainer.state.best_model_checkpoint == best
    assert seen[-1][1] == ["checkpoint-2", "checkpoint-6"]
    assert names(tmp_path) == ["checkpoint-2"]  # the stock Trainer itself removes the other one at its end
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["best_model_checkpoint"] == best


def test_rotation_leaves_a_damaged_one_and_counts_it_not(tmp_path, kind):
    build(tmp_path, kind, max_steps=4).train()
    DAMAGE["a file is missing"](tmp_path / "checkpoint-4")
    build(tmp_path, kind, save_total_limit=1, save_steps=6, max_steps=6).train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


def test_a_run_from_the_start_keeps_its_own_checkpoints_beside_higher_numbers(tmp_path, kind):
    build(tmp_path, kind, save_steps=8).train()
    os.utime(tmp_path / "checkpoint-8", (1, 1))
    build(tmp_path, kind, save_total_limit=2, max_steps=6).train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


class Looks(TrainerCallback):
    def __init__(self, look):
        self.look = look

    def on_step_begin(self, args, state, control, **rest):
        self.look(args)


class Writes(TrainerCallback):
    """As callbacks of adapters do: it replaces a file of the checkpoint, and adds one, and writes next to it."""

    def __init__(self):
        self.calls = 0

    def on_save(self, args, state, control, **rest):
        self.calls += 1
        folder = pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "training_args.bin").write_bytes(b"replaced")
        (folder / "adapter.txt").write_text(f"step {state.global_step}")
        pathlib.Path(args.output_dir, "latest.txt").write_text(str(state.global_step))


@pytest.mark.parametrize("again", [False, True], ids=["first", "over one that exists"])
def test_what_callbacks_write_belongs_to_it(tmp_path, kind, again):
    if again:
        build(tmp_path, kind).train()
    writes = Writes()
    build(tmp_path, kind, [writes]).train()
    assert writes.calls == 4
    for step in (2, 4, 6, 8):
        folder = tmp_path / f"checkpoint-{step}"
        assert not folder.is_symlink() and choose.flaw(folder, deep=True) == ""
        assert (folder / "adapter.txt").read_text() == f"step {step}"
        assert set(Manifest.read(folder).files) == {*STOCK, RUN}
    assert (tmp_path / "latest.txt").read_text() == "8"
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_a_callback_that_fails_in_an_edit_leaves_the_checkpoint_before(tmp_path, kind, warned):
    class Fails(TrainerCallback):
        def on_save(self, args, state, control, **rest):
            if state.global_step == 4:
                truncate(tmp_path / "checkpoint-4" / "optimizer.pt")
                raise Interrupted

    trainer = build(tmp_path, kind, [Fails()], save_total_limit=1)
    with pytest.raises(Interrupted):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    with pytest.raises(Interrupted):
        trainer.train(resume_from_checkpoint=True)
    assert "optimizer.pt has" in choose.flaw(tmp_path / "checkpoint-4")  # no step after it has accepted the edit
    resumed = build(tmp_path, kind, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.losses) == 6 and names(tmp_path) == ["checkpoint-8"]
    assert any("checkpoint-4: optimizer.pt has" in line for line in warned())


def test_a_push_gets_the_published_folder(tmp_path, kind, pushed):
    build(tmp_path, kind, save_steps=4).train()
    assert pushed == [(f"{tmp_path}/checkpoint-4", True), (f"{tmp_path}/checkpoint-8", True)]


@pytest.mark.parametrize("inner", [".former", "checkpoint-8", ".removed"])
def test_names_that_no_run_made_are_not_followed(tmp_path, kind, inner):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir(), (outside / "mine.txt").touch()
    build(run, kind, max_steps=4).train()
    aside = run / ".saving_0123456789abcdef"
    aside.mkdir(), (aside / inner).symlink_to(outside)
    (aside / ".accelerate_save").write_text("checkpoint-8")
    (run / "checkpoint-2").rename(run / "best"), (run / "checkpoint-2").symlink_to("best")
    (run / "checkpoint-99").symlink_to("checkpoint-99")
    shutil.copytree(run / "best", run / "checkpoint-\u0669"), shutil.copytree(run / "best", run / "checkpoint-012")
    assert get_last_checkpoint(run) == str(run / "checkpoint-4")
    build(run, kind, save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(outside) == ["mine.txt"] and names(aside) == sorted([".accelerate_save", inner])
    left = ["best", "checkpoint-012", "checkpoint-2", "checkpoint-8", "checkpoint-99", "checkpoint-\u0669"]
    assert names(run) == [aside.name, *left] and not choose.flaw(run / "best")
    assert "mine.txt" not in names(run / "checkpoint-8")


def test_a_stock_checkpoint_is_replaced_by_ours(tmp_path, kind):
    transformers_patch.revert()
    build(tmp_path).train()
    if kind is Exact:
        transformers_patch.apply(checkpoints=True)
    (tmp_path / "checkpoint-8" / "stale.txt").touch()
    build(tmp_path, kind).train()
    assert {*STOCK, MANIFEST, RUN} == set(names(tmp_path / "checkpoint-8")) - {"stale.txt"}
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_only_the_model(tmp_path, kind):
    build(tmp_path, kind, save_only_model=True).train()
    others = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert set(names(tmp_path / "checkpoint-8")) == {*STOCK, MANIFEST, RUN} - others
    assert get_last_checkpoint(tmp_path).endswith("checkpoint-8")


def test_a_subclass_that_writes_nothing_saves_nothing(tmp_path):
    class Silent(CheckpointMixin, Exact):
        def _save_checkpoint(self, *args, **options):  # releases before 4.47 pass metrics, too
            super()._save_checkpoint(*args, **options)

    class Nothing(Exact):
        def _save_checkpoint(self, *args, **options):
            pass

    class Both(CheckpointMixin, Nothing):
        pass

    build(tmp_path, Silent, save_steps=4).train()
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    build(tmp_path / "none", Both).train()
    assert not (tmp_path / "none").exists() or names(tmp_path / "none") == []


def test_the_mixin_on_patched_classes_stages_once(tmp_path):
    transformers_patch.apply(checkpoints=True)
    build(tmp_path, Own, save_steps=8).train()
    assert set(names(tmp_path / "checkpoint-8")) == {*STOCK, MANIFEST, RUN} and names(tmp_path) == ["checkpoint-8"]


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="root writes to read-only folders")
def test_a_place_that_cannot_be_written(tmp_path, kind, monkeypatch):
    def refuse(*args, **options):
        raise OSError(30, "Read-only file system", args[0])

    trainer = build(tmp_path, kind)
    monkeypatch.setattr("accelerate.checkpoint.storage.os.mkdir", refuse)
    with pytest.raises(OSError, match="Read-only file system"):
        trainer.train()
    assert [name for name in names(tmp_path) if name.startswith("checkpoint")] == []


# -- in the background ---------------------------------------------------------------------------------------------------


class Beside(Own):
    checkpoints = "async"


@pytest.fixture(params=["apply", "mixin"])
def beside(request):
    """The class of a Trainer whose checkpoints are published while it trains, in each way."""
    if request.param == "mixin":
        return Beside
    transformers_patch.apply(checkpoints="async")
    return Exact


@pytest.fixture
def hashing(monkeypatch):
    """Let a function be called with the name of each file that is hashed."""
    describe = formats.describe

    def replaced(look):
        def described(path, *args):
            look(os.fspath(path))
            return describe(path, *args)

        monkeypatch.setattr(formats, "describe", described)

    return replaced


class Never(TrainerCallback):
    """Keeps the Trainer from saving at its end."""

    def on_step_end(self, args, state, control, **rest):
        if control.should_training_stop:
            control.should_save = False
        return control


def test_the_training_goes_on_while_a_checkpoint_is_published(tmp_path, beside, hashing):
    whole = build(tmp_path / "blocking", Own)
    whole.train()
    two_steps_later, waited, there = threading.Event(), [], []

    def look(args):
        there.append((tmp_path / "run" / "checkpoint-4").exists())
        if len(there) == 6:  # before step 6
            two_steps_later.set()

    def hashed(path):
        if "checkpoint-4" in path:
            waited.append(two_steps_later.wait(20))

    hashing(hashed)
    trainer = build(tmp_path / "run", beside, [Looks(look)])
    trainer.train()
    assert set(waited) == {True} and there == [False] * 6 + [True] * 2
    assert trainer.losses == whole.losses and not vars(trainer).keys() & {"_saves_in_background", "_load_best_model"}
    assert all(choose.flaw(folder, deep=True) == "" for folder in (tmp_path / "run").iterdir())
    assert names(tmp_path / "run") == names(tmp_path / "blocking")


class Reads(TrainerCallback):
    """As callbacks do that upload a checkpoint."""

    def __init__(self, **settings):
        vars(self).update(settings)
        self.found = []

    def on_save(self, args, state, control, **rest):
        folder = pathlib.Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.found.append(set(names(folder)) if folder.exists() else set())


@pytest.mark.parametrize(
    ("settings", "reads"), [({}, True), ({"_log_model": False}, False), ({"_log_model": "all"}, True)]
)
def test_a_callback_that_may_read_finds_all_files(tmp_path, beside, hashing, warned, settings, reads):
    hashing(lambda path: time.sleep(0.05))  # so that no save is published before its callback is called
    capture.say_once.cache_clear()
    callback = Reads(**settings)
    build(tmp_path, beside, [callback]).train()
    assert [found >= STOCK for found in callback.found] == [reads] * 3 + [True]  # the last save waits in any case
    assert sum("'Reads.on_save' may read" in text for text in warned()) == reads
    assert all(choose.flaw(tmp_path / f"checkpoint-{step}", deep=True) == "" for step in (2, 4, 6, 8))


def test_or_at_the_end_of_the_training(tmp_path, beside, hashing):
    def fail(path):
        if "checkpoint-6" in path:
            raise OSError(28, "No space left on device", path)

    hashing(fail)
    trainer = build(tmp_path, beside, [Never()])
    with pytest.raises(RuntimeError, match=r"checkpoint-6 could not be saved in the background.*No space left"):
        trainer.train()
    assert trainer.state.global_step == 8 and names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_the_best_model_and_pushes_wait(tmp_path, beside, hashing, pushed):
    hashing(lambda path: time.sleep(0.1))
    options = {"eval_strategy": "steps", "eval_steps": 6, "metric_for_best_model": "loss"}
    trainer = build(tmp_path, beside, [Never()], save_steps=6, load_best_model_at_end=True, **options)
    trainer.train()
    best = f"{tmp_path}/checkpoint-6"
    assert trainer.state.best_model_checkpoint == best and pushed == [(best, True)]


# -- another number of ranks -------------------------------------------------------------------------------------------


def saved_on(folder, ranks, batch):
    """Let a checkpoint be one of a run of so many ranks."""
    (folder / RUN).write_text(json.dumps({"world_size": ranks, "global_batch": batch}))
    (folder / MANIFEST).unlink()
    Manifest(unlisted(str(folder), (), 0)).write(folder)


def test_a_number_of_ranks_that_does_not_divide_is_refused_before_the_training(tmp_path, kind):
    build(tmp_path, kind, max_steps=2).train()
    saved_on(tmp_path / "checkpoint-2", 6, 24)
    resumed = build(tmp_path, kind, per_device_train_batch_size=16)
    with pytest.raises(ValueError, match=r"on 6 rank\(s\) with a global batch of 24.*Numbers of ranks that do: none"):
        resumed.train(resume_from_checkpoint=True)
    assert not hasattr(resumed, "losses")
    own = build(tmp_path, kind, gradient_accumulation_steps=6)  # as one who has thought of it
    own.train(resume_from_checkpoint=True)
    assert own.args.gradient_accumulation_steps == 6


def test_the_numbers_of_ranks_that_divide_are_listed(tmp_path):
    arguments = {"world_size": 2, "train_batch_size": 4, "per_device_train_batch_size": 4, "process_index": 0}
    arguments |= {"gradient_accumulation_steps": 1, "auto_find_batch_size": False, "seed": 3, "data_seed": None}
    trainer = types.SimpleNamespace(args=types.SimpleNamespace(**arguments))
    (tmp_path / RUN).write_text('{"world_size": 3, "global_batch": 24}')
    ranks.keep(trainer, str(tmp_path))
    assert trainer.args.gradient_accumulation_steps == 3
    (tmp_path / RUN).write_text('{"world_size": 3, "global_batch": 12}')
    with pytest.raises(ValueError, match=r"Numbers of ranks that do: 1, 3\."):
        ranks.keep(trainer, str(tmp_path))


# -- other samples -----------------------------------------------------------------------------------------------------


def test_a_resume_on_other_data_names_the_values(tmp_path, kind, warned):
    build(tmp_path, kind, max_steps=2).train()
    build(tmp_path, kind, max_steps=4).train(resume_from_checkpoint=True)
    assert not warned()
    other = build(tmp_path, kind, per_device_train_batch_size=2, data_seed=5, max_steps=6, report_to=[])
    other.train_dataset = rows(10)
    other.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    told = "global_batch was 4, and is 2; seed was 3, and is 5; dataset_length was 32, and is 10."
    assert len(warned()) == 1 and told in warned()[0] and "checkpoint-2" in warned()[0], warned()


def test_a_batch_size_that_the_trainer_takes_over_is_not_named(tmp_path, kind, warned):
    build(tmp_path, kind, max_steps=2).train()
    saved_on(tmp_path / "checkpoint-2", 1, 2)
    build(tmp_path, kind, auto_find_batch_size=True, max_steps=4).train(resume_from_checkpoint=True)
    assert not warned()


class Passing(torch.utils.data.IterableDataset):
    """Three batches in each pass, in a separate order."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        return (rows(12)[number] for number in order)


def streaming(folder, kind, **options):
    trainer = build(folder, kind, max_steps=10, save_steps=1, **options)
    trainer.train_dataset = Passing()
    return trainer


def test_a_stream_goes_on_in_the_pass_that_it_was_in(tmp_path, kind):
    whole = streaming(tmp_path / "whole", kind)
    whole.train()
    for step in (2, 3, 7, 9):
        resumed = streaming(tmp_path / f"from {step}", kind)
        resumed.train(resume_from_checkpoint=f"{tmp_path}/whole/checkpoint-{step}")
        assert resumed.losses == whole.losses[step:]
    again = streaming(tmp_path / "again", kind)
    again.train(resume_from_checkpoint=f"{tmp_path}/from 7/checkpoint-8")
    assert again.losses == whole.losses[8:]


class Ends(TrainerCallback):
    """Stops a run before its first step."""

    def on_epoch_begin(self, args, state, control, **rest):
        control.should_training_stop = True


def test_a_stream_at_the_end_of_a_pass_stops_where_a_callback_stops_it(tmp_path, kind):
    streaming(tmp_path, kind).train()
    resumed = streaming(tmp_path, kind, callbacks=[Ends()])
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert not hasattr(resumed, "losses") and "on_epoch_end" not in vars(resumed.callback_handler)


def test_a_stream_goes_on_with_accumulation(tmp_path, kind):
    whole = streaming(tmp_path, kind, gradient_accumulation_steps=2)
    whole.train()
    resumed = streaming(tmp_path, kind, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")
    assert resumed.losses == whole.losses[-len(resumed.losses) :] and len(resumed.losses) > 10
    assert copy.copy(streams.Passes([1], None, 0, print))._loader == [1]


def test_a_stream_that_begins_anew_says_how_many_samples_come_again(tmp_path, kind, warned):
    streaming(tmp_path, kind).train()
    streaming(tmp_path, kind, ignore_data_skip=True).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-5")
    assert warned() == ["ignore_data_skip: 8 samples of the stream's pass 1, counted from 0, come again."]


# -- preemption --------------------------------------------------------------------------------------------------------


class Signals(TrainerCallback):
    """What a scheduler does, in the middle of step 3."""

    saved = ()

    def on_save(self, args, state, control, **rest):
        self.saved = names(args.output_dir)

    def on_step_begin(self, args, state, control, **rest):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def unhandled():
    """SIGTERM as a program finds it; what measures coverage handles it, and the worker of the tests would end."""
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize("options", [{"save_steps": 4}, {"save_strategy": "no"}], ids=["steps", "no"])
def test_a_signal_saves_and_leaves_and_the_next_start_goes_on(tmp_path, kind, options):
    whole = build(tmp_path / "whole", kind)
    whole.train()
    signals = Signals()
    trainer = build(tmp_path / "run", kind, [signals], save_total_limit=1, **options)
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert signals.saved == ["checkpoint-3"]
    assert left.value.code == 75 and names(tmp_path / "run") == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert choose.flaw(tmp_path / "run" / "checkpoint-3", True) == ""
    resumed = build(tmp_path / "run", kind, **options)
    resumed.train(resume_from_checkpoint=True)
    assert trainer.losses + resumed.losses == whole.losses


def test_a_signal_that_somebody_handles_stays_his(tmp_path, kind):
    seen = []
    former = signal.signal(signal.SIGTERM, lambda *args: seen.append(args[0]))
    try:
        trainer = build(tmp_path, kind, [Signals()])
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, former)
    assert seen == [signal.SIGTERM] and len(trainer.losses) == 8


@pytest.mark.usefixtures("unhandled")
def test_ranks_that_cannot_agree_leave_signals_to_the_system(monkeypatch):
    monkeypatch.setenv(preempt.LAUNCHER, "1")
    monkeypatch.setattr(preempt, "default_store", lambda: None)
    monkeypatch.setattr(preempt.hang, "watch", lambda *args: None)
    monkeypatch.setattr(preempt.hang, "watcher", lambda: None)
    args = types.SimpleNamespace(world_size=2, process_index=0)
    trainer = types.SimpleNamespace(args=args, add_callback=lambda it: None, remove_callback=lambda it: None)
    with preempt.watching(trainer):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# -- the registry ------------------------------------------------------------------------------------------------------

SYMBOLS = {
    "build": ("transformers.trainer", "Trainer.__init__"),
    "save_checkpoint": ("transformers.trainer", "Trainer._save_checkpoint"),
    "train": ("transformers.trainer", "Trainer.train"),
    "last_checkpoint": ("transformers.trainer_utils", "get_last_checkpoint"),
}


def symbol(name):
    module, path = SYMBOLS[name]
    found = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_each_symbol_has_an_entry_and_comes_back():
    entries = {entry.name: entry for entry in registry.ENTRIES if entry.part == "checkpoints"}
    assert {name: entry.target for name, entry in entries.items()} == {
        name: ":".join(where) for name, where in SYMBOLS.items()
    }
    before = {name: symbol(name) for name in SYMBOLS}
    transformers_patch.apply()
    assert {name: symbol(name) for name in SYMBOLS} == before
    transformers_patch.apply(checkpoints=True)
    assert all(symbol(name) is not before[name] for name in SYMBOLS)
    assert {patch.name for patch in transformers_patch.status() if patch.applied} == {"training_args", *SYMBOLS}
    with transformers_patch.applied():
        assert symbol("train") is not before["train"]  # other users of it keep it
    transformers_patch.apply()
    assert {name: symbol(name) for name in SYMBOLS} == before
    with transformers_patch.applied(checkpoints=True):
        assert symbol("train") is not before["train"]
    assert {name: symbol(name) for name in SYMBOLS} == before


def test_an_unknown_shape_is_refused(monkeypatch):
    before = {name: symbol(name) for name in SYMBOLS}
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self, folder: None)
    with pytest.raises(UnsupportedVersion, match=r"_save_checkpoint takes.*not.*model, trial"):
        transformers_patch.apply(checkpoints=True)
    assert symbol("train") is before["train"] and transformers_patch.status()[0].applied is None


def test_without_this_packages_accelerate_nothing_changes(tmp_path, monkeypatch):
    before = {name: symbol(name) for name in SYMBOLS}
    monkeypatch.setattr("transformers_patch.checkpoints.available", lambda: False)
    with pytest.warns(UserWarning, match="checkpoints.*need this fork's accelerate.*stay as they are"):
        transformers_patch.apply(checkpoints=True)
    assert {name: symbol(name) for name in SYMBOLS} == before and transformers_patch.status()[0].applied
    verdicts = {patch.name: patch.verdict for patch in transformers_patch.status()}
    assert verdicts["training_args"] == "applied" and {verdicts[name] for name in SYMBOLS} == {"not installed"}
    with pytest.warns(UserWarning, match="need this fork's accelerate") as caught:
        build(tmp_path, Own, save_steps=8).train()
    assert {warning.filename for warning in caught if "fork's" in str(warning.message)} == {__file__}
    assert set(names(tmp_path / "checkpoint-8")) == STOCK
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
