"""Preparing twice, under several processes: one wrapper, one registry entry, one state_dict call per rank."""

import gc
from contextlib import contextmanager

import torch
from expect import assert_same_everywhere, warned
from harness import fresh_accelerator, learn, shared_folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Counted(nn.Linear):
    """A small model that counts how often its state is requested."""

    calls = 0

    def state_dict(self, *args, **kwargs):
        self.calls += 1
        return super().state_dict(*args, **kwargs)


@contextmanager
def alone():
    accelerator = fresh_accelerator()
    yield accelerator, Counted(4, 2)
    accelerator.free_memory()
    gc.collect()


def check_prepared_again():
    with alone() as (accelerator, model):
        distributed = accelerator.num_processes > 1
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with warned(0):
            wrapped, opt = accelerator.prepare(model, optimizer)
        assert isinstance(wrapped, DistributedDataParallel) is distributed
        with warned(1, "already prepared", "module.module."):
            assert accelerator.prepare(wrapped) is wrapped
        learn(accelerator, wrapped(torch.ones(2, 4)).sum(), opt)
        with shared_folder() as folder:
            for call in (accelerator.save_state, accelerator.load_state):
                model.calls = 0
                call(folder)
                assert model.calls == 1, f"{call.__name__} called state_dict {model.calls} times"
        keys = list(accelerator.get_state_dict(wrapped, unwrap=False))
        assert all(key.count("module.") == int(distributed) for key in keys), keys
        assert_same_everywhere(model.parameters())


def check_evaluation_is_upgraded():
    with alone() as (accelerator, model), warned(0):
        assert accelerator.prepare_model(model, evaluation_mode=True) is model
        trained = accelerator.prepare(model)
        assert isinstance(trained, DistributedDataParallel) is (accelerator.num_processes > 1)
        assert len(accelerator._models) == 1 and accelerator._models[0] is trained


def check_parts_are_named():
    with alone() as (accelerator, _):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        accelerator.prepare(model)
        with warned(1, "shares modules", "'1'" if accelerator.num_processes == 1 else "'module.1'"):
            accelerator.prepare(model[1])
        with warned(1, "'body'"):
            accelerator.prepare(nn.ModuleDict({"body": model}))


def check_compiled_inside():
    with alone() as (accelerator, model):
        compiled = torch.compile(model, backend="eager")
        with warned(0):
            wrapped = accelerator.prepare(compiled)
        for given in (model, compiled):
            with warned(1):
                assert accelerator.prepare(given) is wrapped
        assert len(accelerator._models) == 1
