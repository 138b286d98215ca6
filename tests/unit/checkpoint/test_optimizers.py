"""A whole optimizer finds its state by the names of parameters, in whatever order and layout it was written."""

import pytest
import torch
from torch import nn

import sharded_io
from accelerate.checkpoint import optimizers
from sharded_io import same


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)  # of the same shapes, so that nothing but the names tells them apart

    def forward(self, x):
        return self.second(self.first(x))


FORWARD = ["first.weight", "first.bias", "second.weight", "second.bias"]
BACKWARD = FORWARD[::-1]


def job(order=FORWARD, steps=2, seed=0, named=False):
    torch.manual_seed(seed)
    model = Net()
    parameters = dict(model.named_parameters())
    pairs = [(name, parameters[name]) for name in order]
    optimizer = torch.optim.AdamW(pairs if named else [value for _, value in pairs], lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def moments(model, optimizer):
    return {name: dict(optimizer.state[value]) for name, value in model.named_parameters()}


def written(folder, optimizer, model=None):
    """Write as strategies do that keep models whole; with the names of parameters, if there is a model."""
    folder.mkdir(exist_ok=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    if model is not None:
        sharded_io.write_names(optimizer, model, folder)


def read(folder, order, models=None):
    model, optimizer = job(order, steps=0, seed=1)
    models = [model] if models is None else models
    optimizer.load_state_dict(optimizers.read_full_optimizer(optimizer, models, folder))
    return moments(model, optimizer), optimizer


def test_the_optimizer_of_a_trainers_checkpoint(tmp_path):
    model, optimizer = job(FORWARD)
    written(tmp_path, optimizer, model)
    (tmp_path / "optimizer.bin").rename(tmp_path / "optimizer.pt")
    assert same(read(tmp_path, FORWARD)[0], moments(model, optimizer))


@pytest.mark.parametrize("layout", ["full", "sharded", None])
@pytest.mark.parametrize("saved", [FORWARD, BACKWARD])
@pytest.mark.parametrize("loading", [FORWARD, BACKWARD])
def test_the_order_of_parameters_does_not_matter(tmp_path, layout, saved, loading):
    model, optimizer = job(saved)
    if layout is None:
        written(tmp_path / "saved", optimizer, model)
    else:
        sharded_io.save_optimizer(optimizer, model, tmp_path / "saved", layout=layout)
    found, loaded = read(tmp_path / "saved", loading)
    assert same(found, moments(model, optimizer))
    assert loaded.param_groups[0]["lr"] == 0.1
    assert loaded.state_dict()["param_groups"][0]["params"] == [0, 1, 2, 3]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_that_torch_keeps(tmp_path, prefix):
    model, optimizer = job(FORWARD, named=True)
    group = optimizer.param_groups[0]
    group["param_names"] = [prefix + name for name in group["param_names"]]
    written(tmp_path / "saved", optimizer)
    assert same(read(tmp_path / "saved", BACKWARD)[0], moments(model, optimizer))
    # Names of the user's own tell nothing: numbers count, as torch takes them.
    group["param_names"] = ["a", "b", "c", "d"]
    written(tmp_path / "saved", optimizer)
    assert same(read(tmp_path / "saved", FORWARD)[0], moments(model, optimizer))


def test_names_that_nobody_has(tmp_path):
    model, optimizer = job()
    sharded_io.save_optimizer(optimizer, model, tmp_path / "saved", layout="full")
    with pytest.raises(RuntimeError, match="Prepare the model"):
        read(tmp_path / "saved", FORWARD, models=[Net()])


def test_what_an_optimizer_keeps_beside_is_kept(tmp_path):
    model, optimizer = job()
    state = {**optimizer.state_dict(), "scale": 3.0}
    state["state"]["shared"] = {"count": 4}
    torch.save(state, tmp_path / "optimizer.bin")
    sharded_io.write_names(optimizer, model, tmp_path)
    other, its_optimizer = job(BACKWARD, steps=0)
    found = optimizers.read_full_optimizer(its_optimizer, [other], tmp_path)
    assert found["scale"] == 3.0 and found["state"]["shared"] == {"count": 4}
    assert torch.equal(found["state"][3]["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])


def test_groups_of_equal_options_may_be_cut_in_another_way(tmp_path):
    """As the Trainer's are, whose experts have groups of their own when they are spread."""

    def grouped(sizes, seed, rate=0.1):
        model, _ = job(seed=seed)
        parameters = iter(model.parameters())
        groups = [{"params": [next(parameters) for _ in range(size)], "weight_decay": 0.0} for size in sizes]
        groups[-1]["lr"] = rate
        return model, torch.optim.AdamW(groups, lr=0.1)

    model, optimizer = grouped([1, 3], 0)
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    sharded_io.save_optimizer(optimizer, model, tmp_path, layout="sharded")
    other, loaded = grouped([2, 2], 1)
    loaded.load_state_dict(optimizers.read_full_optimizer(loaded, [other], tmp_path))
    assert same(moments(other, loaded), moments(model, optimizer))
    model, optimizer = grouped([1, 3], 0, rate=0.2)
    sharded_io.save_optimizer(optimizer, model, tmp_path, layout="sharded")
    with pytest.raises(RuntimeError, match=r"the parameters of group 0 in groups \[0, 1\]"):
        optimizers.read_full_optimizer(loaded, [other], tmp_path)


def test_the_trainers_optimizer_is_found_and_read_by_names(tmp_path):
    model, optimizer = job()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other, loaded = job(steps=0, seed=1)
    loaded.load_state_dict(optimizers.read_for_optimizer(loaded, other, tmp_path))
    assert same(moments(other, loaded), moments(model, optimizer))
