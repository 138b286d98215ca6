"""Checkpoints of a run, weights of a model, and what an Accelerator registers for them."""

import os
import traceback
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import checkpoint_samples as samples
from accelerate import Accelerator
from accelerate.checkpoint.storage import LocalStorage
from accelerate.config.project import ProjectConfiguration
from accelerate.extensions.big_models.loading import load_checkpoint_in_model


def numbered(folder, **kwargs):
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **kwargs)


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 2)
    model = accelerator.prepare(torch.compile(net, backend="eager"))
    accelerator.save_state(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["bias", "weight"]
    before = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(net.weight, before)
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
    assert set(accelerator.get_state_dict(model, unwrap=False)) == {"_orig_mod.weight", "_orig_mod.bias"}


def test_options_that_nobody_uses_are_warned_about(tmp_path):
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="exclude_frozen_parameters"):
        accelerator.save_state(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(TypeError, match="map_location='somewhere'"):
        accelerator.load_state(tmp_path, map_location="somewhere")
    accelerator.load_state(tmp_path, map_location="on_device")
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        accelerator.save_state()


def test_hooks_may_save_and_load_models_themselves(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(2, 2), nn.Linear(3, 3)
    accelerator.prepare(first, second)
    seen = []

    def hook(models, weights, output_dir):
        seen.append((list(models), [list(state) for state in weights], output_dir))
        models.clear()
        weights.pop(0)

    handle = accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(tmp_path / "a")
    staged = Path(seen[0][2])
    assert seen == [([first, second], [["weight", "bias"]] * 2, str(staged))]
    assert staged.parent.parent == tmp_path and staged.parent.name.startswith(".saving_") and staged.name == "a"
    assert load_file(tmp_path / "a" / "model.safetensors")["weight"].shape == (3, 3)
    assert not (tmp_path / "a" / "model_1.safetensors").exists()
    assert len(accelerator._models) == 2
    handle.remove()
    expected = second.weight.detach().clone()
    with torch.no_grad():
        first.weight.zero_()
        second.weight.zero_()
    handle = accelerator.register_load_state_pre_hook(lambda models, input_dir: models.remove(first))
    accelerator.load_state(tmp_path / "a")
    assert torch.equal(second.weight, expected) and not first.weight.any()
    handle.remove()
    with pytest.raises((RuntimeError, FileNotFoundError)):
        accelerator.load_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "b")
    assert (tmp_path / "b" / "model_1.safetensors").exists() and len(seen) == 1


def test_registered_objects_have_states():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"argument 0 \(int\), argument 2 \(Foo\)"):
        accelerator.register_for_checkpointing(3, nn.Linear(1, 1), type("Foo", (), {})())
    assert accelerator._custom_objects == []
    with pytest.raises(TypeError, match="hook"):
        accelerator.register_save_state_pre_hook(3)


def listed(folder):
    return sorted(os.listdir(folder / "checkpoints"))


def test_the_path_of_a_checkpoint_is_returned_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    assert accelerator.save_state("relative") == accelerator.save_state(Path("relative")) == Path("relative")
    assert accelerator.save_state("file://" + str(tmp_path / "url")) == tmp_path / "url"
    accelerator = Accelerator(cpu=True, project_config=numbered("project"))
    assert accelerator.save_state() == Path("project/checkpoints/checkpoint_0")
    assert accelerator.load_state() == tmp_path / "project" / "checkpoints" / "checkpoint_0"


def test_the_old_checkpoint_stays_until_the_new_one_is_written(tmp_path):
    run = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=1))
    run.save_state()
    handle = run.register_save_state_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.save_state()
    assert listed(tmp_path) == ["checkpoint_0"]
    assert run.save_iteration == 1
    handle.remove()
    run.save_state()
    assert listed(tmp_path) == ["checkpoint_1"]
    run.load_state()


def test_the_checkpoint_that_a_run_began_from_is_never_pruned(tmp_path):
    run = Accelerator(cpu=True, project_config=numbered(tmp_path, total_limit=1))
    run.save_state()
    run.load_state()
    for _ in range(3):
        run.save_state()
    assert listed(tmp_path) == ["checkpoint_0", "checkpoint_3"]


def test_a_resumed_run_goes_on_counting(tmp_path):
    first = Accelerator(cpu=True, project_config=numbered(tmp_path))
    for _ in range(3):
        first.save_state()
    second = Accelerator(cpu=True, project_config=numbered(tmp_path))
    second.load_state()
    assert second.save_state().name == "checkpoint_3"
    second.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert second.save_state().name == "checkpoint_4", "newer ones stay"
    third = Accelerator(cpu=True, project_config=numbered(tmp_path))
    with pytest.raises(ValueError, match=r"checkpoint_0.*iteration \(now 0\)"):
        third.save_state()


def test_a_folder_of_ones_own_is_not_used_silently_and_loading_from_one_does_not_change_the_count(tmp_path):
    Accelerator(cpu=True).save_state(tmp_path / "checkpoint_9")
    run = Accelerator(cpu=True, project_config=numbered(tmp_path / "project"))
    run.load_state(tmp_path / "checkpoint_9")
    with pytest.warns(UserWarning, match="mine"):
        assert run.save_state(tmp_path / "mine").name == "checkpoint_0"


def test_tied_weights_are_written_once_and_files_that_are_not_shards_stay(tmp_path):
    for name in ("model.safetensors.backup", "my_model.safetensors", "config.json"):
        (tmp_path / name).touch()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    assert len(os.listdir(tmp_path)) == 4


def test_a_model_needs_a_folder_and_values(tmp_path):
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        accelerator.save_model(nn.Linear(1, 1), tmp_path / "file")
    with pytest.raises(RuntimeError, match="meta device.*'weight'"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path)


def test_save_model_is_never_a_mixture(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))

    def fill(value):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(value)

    fill(1.0)
    accelerator.save_model(model, tmp_path, max_shard_size=300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fill(2.0)
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            accelerator.save_model(model, tmp_path, max_shard_size=300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    accelerator.save_model(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]
    with pytest.warns(UserWarning, match="readers prefer"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)


def _saves(accelerator, folder, value, size, times):
    """Save a model of one value again and again in a separate process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        for _ in range(times):
            accelerator.save_model(model, folder, max_shard_size=size)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("sizes", [("1GB", "1GB"), (300, 700)])
def test_processes_save_a_model_into_one_folder(tmp_path, sizes):
    """No save dies, and what is there in the end is the model of one of them."""
    accelerator = Accelerator(cpu=True)
    pids = [_saves(accelerator, tmp_path / "m", value, size, 10) for value, size in enumerate(sizes)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    load_checkpoint_in_model(model, tmp_path / "m", strict=True)
    assert len({value for parameter in model.parameters() for value in parameter.flatten().tolist()}) == 1
    assert not [*(tmp_path / "m").glob(".*")]


def test_saving_a_model_removes_what_killed_saves_left_and_nothing_else(tmp_path):
    (tmp_path / ".saving_mine").mkdir()
    at_work = LocalStorage(tmp_path / "weights_1")
    staged = at_work.stage()
    samples.left_behind(tmp_path, "weights_2", "weights_2")
    Accelerator(cpu=True).save_model(nn.Linear(2, 2), tmp_path)
    found = {".lock_weights_1", ".saving_mine", "model.safetensors", Path(staged).parent.name}
    assert set(os.listdir(tmp_path)) == found and os.path.isdir(staged)
