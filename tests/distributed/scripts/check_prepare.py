"""Preparing twice, under several processes: one wrapper, one registry entry, one state_dict call per rank."""

import copy
import functools
import gc

import torch
from harness import assert_same_everywhere, fresh_accelerator, run, shared_folder, warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator


class Counted(nn.Module):
    """A small model that counts how often its state is asked for."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, 2)
        self.calls = 0

    def forward(self, x):
        return self.inner(x)

    def state_dict(self, *args, **kwargs):
        self.calls += 1
        return super().state_dict(*args, **kwargs)


def prepared_again(accelerator):
    distributed = accelerator.num_processes > 1
    model = Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with warned(0):
        wrapped, opt = accelerator.prepare(model, optimizer)
    assert isinstance(wrapped, DistributedDataParallel) is distributed
    with warned(1, "already prepared", "module.module."):
        assert accelerator.prepare(wrapped) is wrapped
    with warned(1, "already prepared"):
        assert accelerator.prepare(model) is wrapped
    with warned(1):
        assert accelerator.prepare(accelerator.unwrap_model(wrapped)) is wrapped
    with warned(1):
        assert accelerator.prepare_model(model) is wrapped
    with warned(1):
        assert accelerator.prepare(optimizer) is opt
    with warned(1):
        assert accelerator.prepare(opt) is opt
    assert len(accelerator._models) == 1 and len(accelerator._optimizers) == 1
    loss = wrapped(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    opt.step()

    with shared_folder() as folder:
        for call in (accelerator.save_state, accelerator.load_state):
            model.calls = 0
            call(folder)
            assert model.calls == 1, f"{call.__name__} called state_dict {model.calls} times"
    keys = list(accelerator.get_state_dict(wrapped, unwrap=False))
    assert all(key.count("module.") == int(distributed) for key in keys), keys
    assert_same_everywhere([parameter.grad for parameter in model.parameters()])


def evaluation_is_upgraded(accelerator):
    model = Counted()
    with warned(0):
        bare = accelerator.prepare_model(model, evaluation_mode=True)
    assert bare is model
    with warned(0):
        trained = accelerator.prepare(model)
    assert isinstance(trained, DistributedDataParallel) is (accelerator.num_processes > 1)
    assert len(accelerator._models) == 1 and accelerator._models[0] is trained


def lookalikes_are_distinct(accelerator):
    first = Counted()
    second = Counted()
    second.load_state_dict(first.state_dict())
    with warned(0):
        prepared = accelerator.prepare(first, second, copy.deepcopy(first))
    assert len({id(item) for item in prepared}) == 3 and len(accelerator._models) == 3
    with warned(0):
        fourth = accelerator.prepare(copy.deepcopy(prepared[0]))
    assert fourth is not prepared[0] and len(accelerator._models) == 4


def parts_are_named(accelerator):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator.prepare(model)
    with warned(1, "shares modules", "'1'" if accelerator.num_processes == 1 else "'module.1'"):
        accelerator.prepare(model[1])
    outer = nn.ModuleDict({"body": model})
    with warned(1, "'body'"):
        accelerator.prepare(outer)


def another_accelerator_adopts(accelerator):
    model = Counted()
    wrapped = accelerator.prepare(model)
    other = Accelerator(cpu=accelerator.device.type == "cpu")
    with warned(0):
        assert other.prepare(model) is wrapped
        assert other._models == [wrapped]
    other.free_memory()


def freed_is_fresh(accelerator):
    model = Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for release in (accelerator.free_memory, accelerator.clear):
        wrapped, opt = accelerator.prepare(model, optimizer)
        wrapped, opt = release(wrapped, opt)
        gc.collect()
        assert accelerator._models == [] and accelerator._optimizers == []
        with warned(0):
            wrapped, opt = accelerator.prepare(model, optimizer)
        assert opt.optimizer is optimizer
        inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert inner is model
        accelerator.free_memory()
    with warned(0):  # a wrapper that was let go of is used as it is, never nested
        again = accelerator.prepare(wrapped)
    assert again is wrapped


def compiled_inside(accelerator):
    model = Counted()
    compiled = torch.compile(model, backend="eager")
    with warned(0):
        wrapped = accelerator.prepare(compiled)
    with warned(1):
        assert accelerator.prepare(model) is wrapped
    with warned(1):
        assert accelerator.prepare(compiled) is wrapped
    assert len(accelerator._models) == 1


def alone(check):
    """Return a check that gets an Accelerator, and leaves nothing behind."""

    @functools.wraps(check)
    def checked():
        accelerator = fresh_accelerator()
        check(accelerator)
        accelerator.free_memory()
        gc.collect()

    return checked


if __name__ == "__main__":
    run(
        *map(
            alone,
            (
                prepared_again,
                evaluation_is_upgraded,
                lookalikes_are_distinct,
                parts_are_named,
                another_accelerator_adopts,
                freed_is_fresh,
                compiled_inside,
            ),
        )
    )
