"""Preparing twice, under several processes: one wrapper, one registry entry, one state_dict call per rank."""

import copy
import functools
import gc
import tempfile
import warnings
from contextlib import contextmanager

import torch
from harness import fresh_accelerator, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


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


@contextmanager
def expecting(count, *fragments):
    """Require so many UserWarnings that name each fragment and point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [item for item in caught if issubclass(item.category, UserWarning)]
    assert len(ours) == count, [str(item.message) for item in ours]
    for item in ours:
        assert item.filename == __file__, item.filename
        for fragment in fragments:
            assert fragment in str(item.message), str(item.message)


def shared_folder(accelerator):
    names = [tempfile.mkdtemp()] if accelerator.is_main_process else [None]
    return broadcast_object_list(names)[0]


def prepared_again(accelerator):
    distributed = accelerator.num_processes > 1
    model = Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with expecting(0):
        wrapped, opt = accelerator.prepare(model, optimizer)
    assert isinstance(wrapped, DistributedDataParallel) is distributed
    with expecting(1, "already prepared", "module.module."):
        assert accelerator.prepare(wrapped) is wrapped
    with expecting(1, "already prepared"):
        assert accelerator.prepare(model) is wrapped
    with expecting(1):
        assert accelerator.prepare(accelerator.unwrap_model(wrapped)) is wrapped
    with expecting(1):
        assert accelerator.prepare_model(model) is wrapped
    with expecting(1):
        assert accelerator.prepare(optimizer) is opt
    with expecting(1):
        assert accelerator.prepare(opt) is opt
    assert len(accelerator._models) == 1 and len(accelerator._optimizers) == 1
    loss = wrapped(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    opt.step()

    folder = shared_folder(accelerator)
    model.calls = 0
    accelerator.save_state(folder)
    assert model.calls == 1, f"save_state called state_dict {model.calls} times"
    model.calls = 0
    accelerator.load_state(folder)
    assert model.calls == 1, f"load_state called state_dict {model.calls} times"
    keys = list(accelerator.get_state_dict(wrapped, unwrap=False))
    assert all(key.count("module.") == int(distributed) for key in keys), keys
    gradients_agree(accelerator, model)


def gradients_agree(accelerator, model):
    for parameter in model.parameters():
        everywhere = accelerator.gather(parameter.grad.flatten()[None])
        assert torch.equal(everywhere[0], everywhere[-1])


def evaluation_is_upgraded(accelerator):
    model = Counted()
    with expecting(0):
        bare = accelerator.prepare_model(model, evaluation_mode=True)
    assert bare is model
    with expecting(0):
        trained = accelerator.prepare(model)
    assert isinstance(trained, DistributedDataParallel) is (accelerator.num_processes > 1)
    assert len(accelerator._models) == 1 and accelerator._models[0] is trained


def lookalikes_are_distinct(accelerator):
    first = Counted()
    second = Counted()
    second.load_state_dict(first.state_dict())
    with expecting(0):
        prepared = accelerator.prepare(first, second, copy.deepcopy(first))
    assert len({id(item) for item in prepared}) == 3 and len(accelerator._models) == 3
    with expecting(0):
        fourth = accelerator.prepare(copy.deepcopy(prepared[0]))
    assert fourth is not prepared[0] and len(accelerator._models) == 4


def parts_are_named(accelerator):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator.prepare(model)
    with expecting(1, "shares modules", "'1'" if accelerator.num_processes == 1 else "'module.1'"):
        accelerator.prepare(model[1])
    outer = nn.ModuleDict({"body": model})
    with expecting(1, "'body'"):
        accelerator.prepare(outer)


def another_accelerator_adopts(accelerator):
    model = Counted()
    wrapped = accelerator.prepare(model)
    other = Accelerator(cpu=accelerator.device.type == "cpu")
    with expecting(0):
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
        with expecting(0):
            wrapped, opt = accelerator.prepare(model, optimizer)
        assert opt.optimizer is optimizer
        inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        assert inner is model
        accelerator.free_memory()
    with expecting(0):  # a wrapper that was let go of is used as it is, never nested
        again = accelerator.prepare(wrapped)
    assert again is wrapped


def loaders_and_schedulers(accelerator):
    loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with expecting(0):
        loader_, optimizer_, scheduler_ = accelerator.prepare(loader, optimizer, scheduler)
    length = len(loader_)
    with expecting(1, "sharded"):
        assert accelerator.prepare(loader) is loader_
    with expecting(1, "sharded"):
        assert accelerator.prepare(loader_) is loader_
    with expecting(1, "schedule"):
        assert accelerator.prepare(scheduler) is scheduler_
    with expecting(1, "schedule"):
        assert accelerator.prepare(scheduler_) is scheduler_
    assert len(loader_) == length
    assert len(accelerator._dataloaders) == 1 and len(accelerator._schedulers) == 1


def compiled_inside(accelerator):
    model = Counted()
    compiled = torch.compile(model, backend="eager")
    with expecting(0):
        wrapped = accelerator.prepare(compiled)
    with expecting(1):
        assert accelerator.prepare(model) is wrapped
    with expecting(1):
        assert accelerator.prepare(compiled) is wrapped
    assert len(accelerator._models) == 1


def frozen_stays_bare(accelerator):
    teacher = nn.Linear(2, 2).requires_grad_(False)
    assert accelerator.prepare(teacher) is teacher


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
                loaders_and_schedulers,
                compiled_inside,
                frozen_stays_bare,
            ),
        )
    )
