"""What processes have in common and what each has to itself: seeds, order, groups, copies; triggers are in the self check."""

import logging
import os
import random
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from expect import assert_same_everywhere, differs_between_ranks, raised
from harness import CPU, everywhere, fresh_accelerator, learn, shared_folder
from torch import nn

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import InitProcessGroupKwargs, set_seed, synchronize_rng_states


def draws():
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def ranks_of(accelerator):
    return accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()


def check_seeds_are_common_or_each_rank_s_own():
    accelerator = fresh_accelerator()
    world, rank = accelerator.num_processes, accelerator.process_index
    set_seed(42)
    common = draws()
    assert not differs_between_ranks(common)
    set_seed(42, device_specific=True)
    own = draws()
    told = torch.stack(everywhere(own))
    assert all(len(set(column.tolist())) == world for column in told.T)
    set_seed(42 + rank)
    assert torch.equal(draws(), own) and torch.equal(told[0], common)

    set_seed(1, device_specific=True)
    generator = torch.Generator().manual_seed(rank)
    assert differs_between_ranks(torch.get_rng_state()) is (world > 1)
    first = everywhere(torch.get_rng_state())[0]
    synchronize_rng_states(["torch", "generator"], generator)
    assert torch.equal(torch.get_rng_state(), first)
    assert not differs_between_ranks(torch.cat([torch.rand(3), torch.rand(1, generator=generator)]))
    with raised(AssertionError, "generator"):
        synchronize_rng_states(["generator"])


def check_order():
    """The main process goes first; messages of all ranks come in their order."""
    accelerator = fresh_accelerator()
    for context, first in (
        (accelerator.main_process_first, accelerator.is_main_process),
        (accelerator.local_main_process_first, accelerator.is_local_main_process),
    ):
        with shared_folder() as folder, context():
            mark = os.path.join(folder, "mark")
            if first:
                time.sleep(0.1)  # so that the others would be here before, if they did not wait
                open(mark, "w").close()
            assert os.path.exists(mark)
    logger, handler, heard = get_logger(__name__), logging.Handler(), []
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.logger.addHandler(handler)
    logger.warning("in order", in_order=True)
    assert sum(everywhere(heard), []) == [f"[RANK {each}] in order" for each in range(accelerator.num_processes)]


def check_a_live_accelerator_survives_a_reset():
    """It gathers and trains, and a later one has different settings."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = dict(accelerator.state.__dict__)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState._shared_state == {} and PartialState._shared_state == {}
    assert accelerator.state.__dict__ == before
    later = fresh_accelerator(mixed_precision="bf16")
    assert later.mixed_precision == "bf16" and accelerator.mixed_precision == "no"
    for each in (accelerator, later):
        assert each.distributed_type == before["distributed_type"]
        assert ranks_of(each) == list(range(before["num_processes"]))
    with accelerator.accumulate(model):
        learn(accelerator, model(torch.ones(1, 2, device=accelerator.device)).sum(), optimizer)


def check_training_ends_and_begins_again():
    world = fresh_accelerator().num_processes
    for seconds in (30, 31):
        accelerator = Accelerator(cpu=CPU)
        accelerator.end_training()
        assert not dist.is_initialized()
        if world > 1:
            with raised(RuntimeError, "Accelerator()"):
                ranks_of(accelerator)
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))
        later = Accelerator(cpu=CPU, kwargs_handlers=[handler])
        assert later.num_processes == world and dist.is_initialized() is (world > 1)
        assert ranks_of(later) == list(range(world))
        model = later.prepare(nn.Linear(2, 1))
        later.backward(model(torch.full((1, 2), float(later.process_index), device=later.device)).sum())
        assert_same_everywhere([parameter.grad for parameter in model.parameters()])
        if world > 1:
            group = dist.distributed_c10d._get_default_group()
            assert group._get_backend(later.device).options._timeout == timedelta(seconds=seconds)
