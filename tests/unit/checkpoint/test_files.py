"""Files of a checkpoint, one kind at a time."""

import os
import pickle

import pytest
import torch
from torch import nn

from accelerate.checkpoint import files


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight


class Counting(nn.Linear):
    calls = 0

    def state_dict(self, *args, **kwargs):
        self.calls += 1
        return super().state_dict(*args, **kwargs)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_models(tmp_path, safe, index):
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    files.write_model(net.state_dict(), tmp_path, index, safe_serialization=safe)
    assert same(files.read_model(net, tmp_path, index), net.state_dict())
    assert os.listdir(tmp_path) == [files.names.model_file(index, safe)]


@pytest.mark.parametrize("safe", [True, False])
def test_the_other_format_is_removed(tmp_path, safe):
    files.write_model(nn.Linear(1, 1).state_dict(), tmp_path, safe_serialization=not safe)
    net = nn.Linear(1, 1)
    files.write_model(net.state_dict(), tmp_path, safe_serialization=safe)
    assert same(files.read_model(net, tmp_path), net.state_dict())


def test_reading_changes_nothing_and_asks_the_model_once(tmp_path):
    net = Counting(2, 2)
    files.write_model(nn.Linear(2, 2).state_dict(), tmp_path)
    before = {name: value.clone() for name, value in net.named_parameters()}
    files.read_model(net, tmp_path)
    assert net.calls == 1
    assert same(before, dict(net.named_parameters()))


def test_tied_weights_come_back(tmp_path):
    net = Tied()
    files.write_model(net.state_dict(), tmp_path)
    state = files.read_model(Tied(), tmp_path)
    assert torch.equal(state["b.weight"], net.a.weight)
    other = Tied()
    other.load_state_dict(state)
    assert torch.equal(other.b.weight, net.a.weight)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrappers_are_understood(tmp_path, prefix):
    net = nn.Linear(2, 2)
    files.write_model({prefix + name: value for name, value in net.state_dict().items()}, tmp_path)
    assert same(files.read_model(nn.Linear(2, 2), tmp_path), net.state_dict())


def test_wrapped_models_are_read_under_the_names_inside(tmp_path):
    net = nn.Linear(2, 2)
    files.write_model(net.state_dict(), tmp_path)
    wrapped = torch.compile(nn.DataParallel(nn.Linear(2, 2)), backend="eager")
    assert same(files.read_model(wrapped, tmp_path), net.state_dict())


def test_a_misfit_lists_what_differs(tmp_path):
    files.write_model({"a": torch.ones(1), "weight": torch.ones(3)}, tmp_path)
    with pytest.raises(RuntimeError) as error:
        files.read_model(nn.Linear(2, 2), tmp_path)
    text = str(error.value)
    assert "missing in the file: bias" in text
    assert "unexpected in the file: a" in text
    assert "weight has (3,) in the file and (2, 2) in the model" in text
    assert str(tmp_path) in text and "Linear" in text


def test_names_may_differ_when_not_strict_but_shapes_may_not(tmp_path):
    files.write_model({"a": torch.ones(1), "weight": torch.ones(2, 2)}, tmp_path)
    assert set(files.read_model(nn.Linear(2, 2), tmp_path, strict=False)) == {"a", "weight"}
    with pytest.raises(RuntimeError, match="other shapes"):
        files.read_model(nn.Linear(3, 2), tmp_path, strict=False)


def test_modules_that_rename_while_loading_are_left_to_it(tmp_path):
    class Renaming(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}old")
            super()._load_from_state_dict(state_dict, prefix, *args)

    files.write_model({"old": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path)
    net = Renaming(1, 1)
    net.load_state_dict(files.read_model(net, tmp_path))
    assert net.weight.item() == 1


def test_values_that_are_no_tensors_need_the_other_format(tmp_path):
    state = {"weight": torch.ones(1), "_extra_state": {"a": 1}}
    with pytest.raises(ValueError, match="safe_serialization=False"):
        files.write_model(state, tmp_path)
    files.write_model(state, tmp_path, safe_serialization=False)
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model 1 \(Linear\).*model_1.safetensors.*pytorch_model_1.bin"):
        files.read_model(nn.Linear(1, 1), tmp_path, 1)


def test_optimizers(tmp_path):
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    files.write_optimizer(optimizer.state_dict(), tmp_path)
    files.write_optimizer(optimizer.state_dict(), tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["optimizer.bin", "optimizer_1.bin"]
    assert files.read_optimizer(tmp_path, 1) == optimizer.state_dict()
    with pytest.raises(FileNotFoundError, match="optimizer 2: optimizer_2.bin"):
        files.read_optimizer(tmp_path, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 2]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    ],
)
def test_schedulers_of_torch_load_without_trust(tmp_path, make):
    scheduler = make(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    files.write_scheduler(scheduler, tmp_path)
    scheduler.load_state_dict(files.read_scheduler(tmp_path))


class Object:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


def test_registered_objects(tmp_path):
    files.write_custom(Object(1), tmp_path, 0)
    files.write_custom(Object([1, "a", None, torch.ones(1).item()]), tmp_path, 10)
    (tmp_path / "custom_checkpoint_notes.txt").touch()
    assert files.custom_count(tmp_path) == 2
    assert files.read_custom(tmp_path, 10) == {"value": [1, "a", None, 1.0]}


def test_objects_of_ones_own_need_trust(tmp_path):
    files.write_custom(Object(Object(1)), tmp_path, 0)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        files.read_custom(tmp_path, 0)
    assert isinstance(files.read_custom(tmp_path, 0, {"weights_only": False})["value"], Object)


def test_scaler(tmp_path):
    assert files.read_scaler(tmp_path) is None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    files.write_scaler(scaler, tmp_path)
    assert files.read_scaler(tmp_path)["scale"] == 4.0


def test_each_rank_writes_its_own_random_states(tmp_path):
    for rank in (0, 1):
        files.write_random_states({"step": rank}, tmp_path, rank)
    assert files.read_random_states(tmp_path, 1) == {"step": 1}
    assert files.read_random_states(tmp_path, 2) is None


def test_other_ranks_write_no_shared_file(tmp_path, monkeypatch):
    state = type("State", (), {"is_main_process": False, "is_local_main_process": False})
    monkeypatch.setattr(files, "PartialState", state)
    monkeypatch.setattr("accelerate.utils.other.PartialState", state)
    net = nn.Linear(1, 1)
    files.write_model(net.state_dict(), tmp_path)
    files.write_optimizer({}, tmp_path)
    files.write_custom(Object(1), tmp_path)
    assert os.listdir(tmp_path) == []


def test_plain_names():
    state = {"_orig_mod.a._orig_mod.b": 1, "module.c": 2}
    assert files.plain_names(state) == {"a.b": 1, "module.c": 2}
