"""States that are out of the ordinary, in every layout: what is saved comes back with its kinds, or is refused when it is saved."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import checkpoint_samples as samples
import sharded_io
from accelerate.checkpoint import dcp
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.save import unlisted

LAYOUTS = ["sharded", "full", "sharded to full", "full to sharded"]


def job(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(folder, model, optimizer, layout):
    """Save, and reshard if the layout asks for it; return the folder to load from."""
    sharded_io.save_model(model, folder, layout=layout.split()[0])
    if optimizer is not None:
        sharded_io.save_optimizer(optimizer, model, folder, layout=layout.split()[0])
    if " to " in layout:
        convert = pytest.importorskip("accelerate.extensions.convert.convert")
        convert.reshard(str(folder), f"{folder}-resharded", layout.split()[-1])
        return folder.with_name(f"{folder.name}-resharded")
    return folder


def shown(value):
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.tolist()
    if isinstance(value, dict):
        return {(type(key), key): shown(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [shown(child) for child in value]
    return type(value), value


STATES = {
    "numbers as keys": {0: torch.ones(3), 1: torch.zeros(3), "h": {0: 1.5, 1: 2.5}},
    "numbers as keys inside": {"blocks": {0: {"a": torch.ones(3)}, 1: {"a": torch.zeros(3)}}, "x": torch.ones(3)},
    "empty": {},
    "nothing inside": {"a": {}, "b": [], "c": {"d": {}}, "x": torch.ones(3)},
    "lists": {"a": [torch.ones(3), torch.zeros(3)], "b": [{"c": 1}, {"c": 2}], "d": [1, 2], "e": (1, 2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_states_of_parameters(tmp_path, layout, state):
    model, _ = job()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = copy.deepcopy(state)
    folder = saved(tmp_path / "saved", model, optimizer, layout)
    other = torch.optim.SGD(model.parameters(), lr=0.2)
    sharded_io.load_optimizer(other, model, folder)
    assert shown(dict(other.state[model.weight])) == shown(state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [np.float64(0.05), np.float32(0.5), np.int64(1)])
def test_options_of_groups_and_what_belongs_to_no_parameter(tmp_path, layout, number):
    model, optimizer = job()
    options = {"note": {"x": 1, "y": [1, 2], "z": {}}, "e": {}, "none": None, "steps": {0: 0.1, 5: 0.2}, "l": []}
    optimizer.param_groups[0].update(copy.deepcopy(options), lr=number)
    optimizer.state["shared"] = {"count": 3, "mean": torch.ones(7)}
    folder = saved(tmp_path / "saved", model, optimizer, layout)
    other, its_optimizer = job(1)
    sharded_io.load_optimizer(its_optimizer, other, folder)
    options["lr"] = number.item()  # upstream's reader refuses numpy's
    assert shown({key: its_optimizer.param_groups[0][key] for key in options}) == shown(options)
    assert shown(its_optimizer.state["shared"]) == shown(optimizer.state["shared"])
    assert torch.equal(its_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_parts_below_keys_that_are_no_texts_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="optimizer.state.w has shards.*FULL_STATE_DICT"):
            dcp.save({"optimizer": {"state": {"w": {0: part}}}}, tmp_path)
    finally:
        dist.destroy_process_group()


class Extra(nn.Linear):
    def __init__(self, extra=None):
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


EXTRAS = [
    {"amax": torch.ones(3), "steps": 4},
    {"nested": {"scales": [torch.ones(2), torch.zeros(2)], "empty": {}}, 0: "x"},
    {},
    None,
    torch.arange(5, dtype=torch.uint8),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("extra", EXTRAS, ids=range(len(EXTRAS)))
def test_extra_states(tmp_path, layout, extra):
    model = nn.Sequential(Extra(copy.deepcopy(extra)), nn.Linear(2, 2))
    folder = saved(tmp_path / "saved", model, None, layout)
    other = nn.Sequential(Extra(torch.zeros(2)), nn.Linear(2, 2))
    sharded_io.load_model(other, folder)
    assert shown(other[0].extra) == shown(extra)
    assert torch.equal(other[0].weight, model[0].weight)
    root = Extra(torch.zeros(2))
    sharded_io.load_model(root, saved(tmp_path / "root", Extra(copy.deepcopy(extra)), None, layout))
    assert shown(root.extra) == shown(extra)


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_what_a_manifest_says_is_compared(tmp_path, layout):
    model, optimizer = job()
    sharded_io.save_model(model, tmp_path, layout=layout)
    sharded_io.save_optimizer(optimizer, model, tmp_path, layout=layout)
    entries = unlisted(str(tmp_path), (), 0)
    Manifest(entries).write(tmp_path)
    sharded_io.load_model(model, tmp_path)
    before = model.weight.clone()
    for what, refused in (("model", "has changed"), ("optimizer", "has 0 bytes")):
        sharded_io.load_optimizer(optimizer, model, tmp_path)  # its files are complete
        file = max((name for name in entries if what in name), key=lambda name: entries[name].size)
        if what == "model":
            samples.flip(tmp_path / file)
        else:
            (tmp_path / file).write_bytes(b"")
        with pytest.raises(DamagedCheckpoint, match=f"{file} {refused}"):
            if what == "model":
                sharded_io.load_model(model, tmp_path)
            else:
                sharded_io.load_optimizer(optimizer, model, tmp_path)
    assert torch.equal(before, model.weight)
