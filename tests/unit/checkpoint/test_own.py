"""What is the user's own in a checkpoint's folder outlives the checkpoint, wherever in it it lies."""

import os
import stat
import threading

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint.own import carry, users_own


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    made.prepare(nn.Linear(2, 2))

    def hook(models, weights, folder):
        os.makedirs(os.path.join(folder, "tokenizer"), exist_ok=True)
        with open(os.path.join(folder, "tokenizer", "vocab.json"), "w") as file:
            file.write("{}")
        with open(os.path.join(folder, "log_12:30.txt"), "w") as file:
            file.write("a colon is no drive")

    made.register_save_state_pre_hook(hook)
    return made


@pytest.mark.parametrize("inside", [False, True])
def test_it_stays(tmp_path, accelerator, inside, monkeypatch):
    folder = tmp_path / "c"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "optimizer" / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder if inside else tmp_path)
    accelerator.save_state(folder)
    (folder / "tokenizer" / "notes.txt").write_text("mine")
    (folder / "tokenizer" / "deep").mkdir()
    (folder / "tokenizer" / "deep" / "more.txt").write_text("mine")
    os.chmod(folder, 0o2777)
    for _ in range(2):
        accelerator.save_state(folder)
        assert accelerator.load_state(folder)
    for name in ("optimizer/notes.txt", "tokenizer/notes.txt", "tokenizer/deep/more.txt"):
        assert (folder / name).read_text() == "mine"
    assert stat.S_IMODE(os.stat(folder).st_mode) & 0o777 == 0o777
    assert sorted(users_own(str(folder))) == ["optimizer", "tokenizer/deep", "tokenizer/notes.txt"]
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_who_writes_into_the_folder_meanwhile_loses_nothing(tmp_path, accelerator):
    folder, stop, written = tmp_path / "c", threading.Event(), []
    (folder / "logs").mkdir(parents=True)
    accelerator.save_state(folder)

    def write():
        while not stop.is_set() and len(written) < 2000:
            try:
                os.makedirs(folder / "logs", exist_ok=True)
                with open(folder / "logs" / str(len(written)), "x"):
                    written.append(len(written))
            except OSError:
                continue

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(4):
            accelerator.save_state(folder)
    finally:
        stop.set()
        writer.join()
    found = {name.partition(".former")[0] for name in os.listdir(folder / "logs")}
    assert found == {str(number) for number in written}


def test_what_has_come_meanwhile_stays_too(tmp_path, caplog):
    for name, text in (("old", "before"), ("new", "meanwhile")):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "a.txt").write_text(text)
    (tmp_path / "old" / "logs" / "b.txt").write_text("before")
    carry(str(tmp_path / "old" / "logs"), str(tmp_path / "new" / "logs"))
    found = {path.name: path.read_text() for path in (tmp_path / "new" / "logs").iterdir()}
    assert found == {"a.txt": "meanwhile", "a.txt.former_1": "before", "b.txt": "before"}
    assert "a.txt.former_1" in caplog.text


def test_a_name_that_no_system_shares_is_refused_before_the_old_one_goes(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "c")
    kept = model.weight.detach().clone()

    def hook(models, weights, folder):
        with open(os.path.join(folder, "a\\b.txt"), "w") as file:
            file.write("x")

    accelerator.register_save_state_pre_hook(hook)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(ValueError, match="backslash"):
        accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.weight, kept) and os.listdir(tmp_path) == ["c"]
