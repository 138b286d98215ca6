"""Loads that fail late, or in an odd place, leave everything as it was; and nothing is loaded that was not saved."""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator
from accelerate.checkpoint.manifest import DamagedCheckpoint
from accelerate.data import adapter
from accelerate.utils import DataLoaderConfiguration


class Registered:
    """A registered object."""

    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


class Versioned(nn.Linear):
    """A module with a state beside its tensors, which it may refuse."""

    refuses = False

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state) -> None:
        if self.refuses:
            raise ValueError("another version")


class Fussy(nn.Linear):
    """A module that takes no state."""

    def load_state_dict(self, *args, **kwargs):
        raise RuntimeError("not this one")


class Run:
    """Two models, an optimizer and an object; the second model is the one that fails."""

    def __init__(self, second: nn.Module) -> None:
        self.accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(second.parameters(), lr=0.1)
        self.first, self.second, self.optimizer = self.accelerator.prepare(nn.Linear(2, 2), second, optimizer)
        self.registered = Registered({"n": 1})
        self.accelerator.register_for_checkpointing(self.registered)
        self.step()

    def step(self) -> None:
        self.second(torch.ones(1, 2)).sum().backward()
        self.optimizer.step(), self.optimizer.zero_grad()

    def everything(self) -> str:
        weights = [self.first.weight.tolist(), self.second.weight.tolist()]
        return repr([weights, self.optimizer.state_dict(), self.registered.state])


def refuse_in_hook(module: nn.Module) -> None:
    def hook(module, keys):
        raise RuntimeError("the hook refuses")

    module.register_load_state_dict_post_hook(hook)


@pytest.mark.parametrize(
    ("second", "spoil", "options", "error"),
    [
        (nn.Linear, lambda module: None, {"stict": False}, "does not take .'stict'.*nothing was loaded"),
        (Versioned, lambda module: setattr(module, "refuses", True), {}, "another version"),
        (nn.Linear, refuse_in_hook, {}, "the hook refuses"),
    ],
)
def test_a_model_that_fails_last_leaves_the_others_alone(tmp_path, second, spoil, options, error):
    run = Run(second(2, 2))
    run.accelerator.save_state(tmp_path / "c", safe_serialization=False)
    run.step(), run.step()
    with torch.no_grad():
        run.first.weight.fill_(7.0)
    run.registered.state = {"n": 2}
    before = run.everything()
    spoil(run.second)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=error):
        run.accelerator.load_state(tmp_path / "c", **options)
    assert run.everything() == before


@pytest.mark.parametrize("seedable", [True, False])
def test_the_order_of_the_data_stays(tmp_path, seedable):
    def make(kind, seed):
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=seed if seedable else None)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = torch.arange(8.0).reshape(8, 1)
        return accelerator, *accelerator.prepare(kind(1, 1), torch.utils.data.DataLoader(data, shuffle=True))

    accelerator, _, loader = make(nn.Linear, 1)
    next(iter(loader))
    accelerator.save_state(tmp_path / "c")
    accelerator, _, loader = make(Fussy, 2)
    sampler = adapter.get_sampler(loader)
    before = {name: getattr(sampler, name, None) for name in ("initial_seed", "epoch", "seed", "replay", "generator")}
    with pytest.raises(RuntimeError, match="not this one"):
        accelerator.load_state(tmp_path / "c")
    assert {name: getattr(sampler, name, None) for name in before} == before


def test_what_a_hook_has_loaded_is_given_back(tmp_path):
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(nn.Linear(2, 2), Fussy(2, 2))
    accelerator.save_state(tmp_path / "c")
    with torch.no_grad():
        first.weight.fill_(5.0)

    def hook(models, folder):
        models.pop(0).load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
        assert not first.weight.eq(5).any()

    accelerator.register_load_state_pre_hook(hook)
    with pytest.raises(RuntimeError, match="not this one|do not fit"):
        accelerator.load_state(tmp_path / "c")
    assert first.weight.eq(5).all()


def test_a_registered_object_may_hold_what_was_computed(tmp_path):
    run = Run(nn.Linear(2, 2))
    run.registered.state = {"loss": run.second(torch.ones(1, 2)).sum(), "n": 1}
    for blocking in (True, False):
        run.accelerator.save_state(tmp_path / "c", blocking=blocking)
    run.accelerator.load_state(tmp_path / "c")
    assert not run.registered.state["loss"].requires_grad


def test_a_registered_object_may_contain_itself(tmp_path):
    run = Run(nn.Linear(2, 2))
    run.registered.state = {"n": 1, "t": torch.ones(1)}
    run.registered.state["again"] = run.registered.state
    for blocking in (True, False):
        run.accelerator.save_state(tmp_path / "c", blocking=blocking)
        run.accelerator.wait_for_checkpoint()
    run.accelerator.load_state(tmp_path / "c")
    assert run.registered.state["again"] is run.registered.state


def test_what_somebody_else_has_put_there_is_not_loaded(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "c", safe_serialization=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    accelerator.save_model(model, tmp_path / "c")
    with pytest.raises(DamagedCheckpoint, match="model.safetensors is not in the manifest"):
        accelerator.load_state(tmp_path / "c")
    assert model.weight.eq(2).all()


def test_the_same_weights_for_others_do_no_harm(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "c")
    accelerator.save_model(model, tmp_path / "c")
    accelerator.load_state(tmp_path / "c")


def test_no_checkpoint_is_no_error_where_that_is_said(tmp_path):
    accelerator = Accelerator(cpu=True)
    assert accelerator.load_state(tmp_path / "none", missing_ok=True) is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedCheckpoint, match="empty"):
        accelerator.load_state(tmp_path / "empty", missing_ok=True)


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
