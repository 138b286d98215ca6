"""Giving models and optimizers their state back: from the files' memory into theirs, and none of it before all can."""

import copy

import pytest
import torch
from torch import nn

from accelerate.checkpoint import files
from accelerate.checkpoint.contents import Contents

WIDTH = 100


def run(width=WIDTH, kind=torch.optim.AdamW, value=0.0):
    """A model, and an optimizer that has been stepped."""
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value + 1)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved(folder, kind=torch.optim.AdamW):
    model, optimizer = run(kind=kind, value=5.0)
    files.write_model(model.state_dict(), folder)
    files.write_optimizer(optimizer.state_dict(), folder)
    return model, optimizer


def contents_of(folder, model, optimizer):
    state = files.read_model(model, folder)
    return Contents(str(folder), [(model, state)], [(optimizer, files.read_optimizer(folder))], process_index=0)


def tensors(model, optimizer):
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [*model.state_dict().values(), *moments]


def equal(left, right):
    return left.dtype == right.dtype and torch.equal(left, right)


def assert_own_memory(folder, model, optimizer):
    """Nothing of the run is a file's any more: it stays as it is whatever becomes of the files."""
    before = [tensor.clone() for tensor in tensors(model, optimizer)]
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert all(map(equal, tensors(model, optimizer), before))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adamax])
def test_a_state_is_read_into_the_memory_that_is_there(tmp_path, kind):
    source = saved(tmp_path, kind)
    model, optimizer = run(kind=kind)
    before = {tensor.data_ptr() for tensor in tensors(model, optimizer)}
    contents_of(tmp_path, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))
    assert {tensor.data_ptr() for tensor in tensors(model, optimizer)} == before
    assert_own_memory(tmp_path, model, optimizer)


def test_nothing_changes_before_everything_else_is_done(tmp_path):
    source = saved(tmp_path)
    model, optimizer = run()
    held = tensors(model, optimizer)
    before = [tensor.clone() for tensor in held]
    restoring = contents_of(tmp_path, model, optimizer).begin()
    assert all(map(torch.equal, held, before))
    restoring.undo()
    assert [id(tensor) for tensor in tensors(model, optimizer)[-6:]] == [id(tensor) for tensor in held[-6:]]
    assert all(map(torch.equal, tensors(model, optimizer), before))
    contents_of(tmp_path, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))


def test_an_optimizer_that_has_not_been_stepped_gets_memory_of_its_own(tmp_path):
    source = saved(tmp_path)
    model, _ = run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    contents_of(tmp_path, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))
    assert_own_memory(tmp_path, model, optimizer)


def test_another_dtype(tmp_path):
    model, _ = saved(tmp_path)
    half = copy.deepcopy(model).half()
    optimizer = torch.optim.AdamW(half.parameters(), lr=0.1)
    contents_of(tmp_path, half, optimizer).apply()
    assert all(state["exp_avg"].dtype is torch.float16 for state in optimizer.state.values())
    assert torch.equal(half[0].weight, model[0].weight.half())
    assert_own_memory(tmp_path, half, optimizer)


def test_an_optimizer_with_an_own_load_state_dict_may_keep_what_it_gets(tmp_path):
    source = saved(tmp_path)
    kept = []

    class Own(torch.optim.AdamW):
        def load_state_dict(self, state):
            kept.append(state["state"][0]["exp_avg"])
            super().load_state_dict(state)

    model, optimizer = run(kind=Own)
    contents_of(tmp_path, model, optimizer).apply()
    assert all(map(equal, tensors(model, optimizer), tensors(*source)))
    assert_own_memory(tmp_path, model, optimizer)
    assert equal(kept[0], source[1].state[source[0][0].weight]["exp_avg"])


def test_a_hook_and_a_model_of_ones_own_may_keep_what_they_get(tmp_path):
    source = saved(tmp_path)
    kept = []

    class Own(nn.Sequential):
        def load_state_dict(self, state, **options):
            kept.append(state["0.weight"])
            return super().load_state_dict(state, **options)

    model, _ = run()
    model = Own(*model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: kept.append(state["state"][0]["exp_avg"]))
    contents_of(tmp_path, model, optimizer).apply()
    assert_own_memory(tmp_path, model, optimizer)
    moment = source[1].state[source[0][0].weight]["exp_avg"]
    assert equal(kept[0], moment) and equal(kept[1], source[0][0].weight)


def test_tensors_that_are_assigned(tmp_path):
    source, _ = saved(tmp_path)
    model, optimizer = run()
    contents_of(tmp_path, model, optimizer).apply(assign=True)
    assert torch.equal(model[0].weight, source[0].weight) and type(model[0].weight) is nn.Parameter
    assert_own_memory(tmp_path, model, optimizer)
