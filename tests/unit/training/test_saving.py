"""Checkpoints of a run, weights of a model, and what an Accelerator registers for them."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator
from accelerate.config.project import ProjectConfiguration
from accelerate.training import saving


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


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_in_the_background_needs_an_extension(tmp_path, monkeypatch, async_save):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(async_save=async_save))
    monkeypatch.setattr(saving, "all_specs", tuple)
    with pytest.raises(ValueError, match="needs an extension that is not in this installation"):
        accelerator.save_state(tmp_path / "c", blocking=None if async_save else False)
    assert not (tmp_path / "c").exists()
    accelerator.save_state(tmp_path / "c", blocking=True)
