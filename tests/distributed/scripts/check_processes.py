"""What processes have in common and what each has to itself: seeds, order, groups, copies; triggers are in the self check."""

import copy
import os
import pickle
import random
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from harness import (
    CPU,
    assert_same_everywhere,
    differs_between_ranks,
    everywhere,
    fresh_accelerator,
    raised,
    run,
    shared_folder,
)
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs, set_seed, synchronize_rng_states


def draws():
    """Return a number from each generator."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def seeds_are_common_or_each_rank_s_own():
    accelerator = fresh_accelerator()
    several = accelerator.num_processes > 1
    set_seed(42)
    common = draws()
    assert not differs_between_ranks(common)
    set_seed(42, device_specific=True)
    own = draws()
    told = torch.stack(everywhere(own))
    for column in told.T:
        assert len(set(column.tolist())) == accelerator.num_processes
    set_seed(42 + accelerator.process_index)
    assert torch.equal(draws(), own)
    assert torch.equal(told[0], common)

    set_seed(1, device_specific=True)
    assert differs_between_ranks(torch.get_rng_state()) is several
    first = everywhere(torch.get_rng_state())[0]
    synchronize_rng_states(["torch"])
    assert torch.equal(torch.get_rng_state(), first)
    assert not differs_between_ranks(torch.rand(3))
    with raised(AssertionError, "generator"):
        synchronize_rng_states(["generator"])


def inputs_are_shared_out():
    accelerator = fresh_accelerator()
    world, rank = accelerator.num_processes, accelerator.process_index
    for length in (0, 1, 2, 2 * world, 2 * world + 1):
        words = [f"word {number}" for number in range(length)]
        with accelerator.split_between_processes(words) as part:
            parts = everywhere(part)
        assert sum(parts, []) == words, parts
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        if not length:
            continue
        numbers = torch.arange(length, device=accelerator.device)
        with accelerator.split_between_processes({"n": numbers, "w": words}, apply_padding=True) as part:
            assert part["n"].tolist() == [int(word.removeprefix("word ")) for word in part["w"]]
            gathered = accelerator.gather(part["n"])
        assert sorted(set(gathered.tolist())) == list(range(length))
        assert len(gathered) == -(-length // world) * world
    with accelerator.split_between_processes(tuple(range(2 * world))) as part:
        assert part == (2 * rank, 2 * rank + 1)


def the_main_process_goes_first():
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


def functions_run_where_they_should():
    accelerator = fresh_accelerator()
    world, rank = accelerator.num_processes, accelerator.process_index
    expected = {
        accelerator.on_main_process: [0],
        accelerator.on_local_main_process: [0],
        accelerator.on_last_process: [world - 1],
        lambda f: accelerator.on_process(f, process_index=world - 1): [world - 1],
        lambda f: accelerator.on_local_process(f, local_process_index=world - 1): [world - 1],
    }
    for decorate, ranks in expected.items():
        told = everywhere(decorate(lambda: rank)())
        assert told == [number if number in ranks else None for number in range(world)], (decorate, told)
    assert everywhere(accelerator.should_save_model) == [number == 0 for number in range(world)]


def copies_work_on():
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.arange(2.0 * 4 * world).view(-1, 2), batch_size=2)
    accelerator.prepare(model, optimizer, scheduler, loader)
    assert copy.deepcopy(accelerator) is accelerator
    again = pickle.loads(pickle.dumps(accelerator))
    assert (again.num_processes, again.process_index, again.device) == (world, rank, device)
    assert again.gather(torch.tensor([rank], device=device)).tolist() == list(range(world))
    (model,), (optimizer,), (scheduler,), (loader,) = (
        again._models,
        again._optimizers,
        again._schedulers,
        again._dataloaders,
    )
    assert model is not accelerator._models[0]
    seen = []
    for batch in loader:
        seen.append(again.gather_for_metrics(batch))
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(2.0 * 4 * world).view(-1, 2))


def a_timeout_that_cannot_take_effect_is_refused():
    fresh_accelerator()
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    if PartialState().num_processes == 1:
        Accelerator(cpu=CPU, kwargs_handlers=[handler])  # there is no group that it could contradict
        return
    live = dist.distributed_c10d._get_default_group()
    with raised(ValueError, "timeout", repr(timedelta(seconds=77)), repr(timedelta(seconds=1800))):
        Accelerator(cpu=CPU, kwargs_handlers=[handler])
    assert dist.distributed_c10d._get_default_group() is live
    assert everywhere(0) == [0] * PartialState().num_processes
    # What the group has already is no contradiction.
    Accelerator(cpu=CPU, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=1800))])
    Accelerator(cpu=CPU, kwargs_handlers=[InitProcessGroupKwargs()])


def training_ends_and_begins_again():
    world = fresh_accelerator().num_processes
    for seconds in (30, 31):
        accelerator = Accelerator(cpu=CPU)
        accelerator.end_training()
        assert not dist.is_initialized()
        if world > 1:
            with raised(RuntimeError, "Accelerator()"):
                accelerator.gather(torch.ones(1, device=accelerator.device))
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))
        later = Accelerator(cpu=CPU, kwargs_handlers=[handler])
        rank, device = later.process_index, later.device
        assert later.num_processes == world and dist.is_initialized() is (world > 1)
        assert later.gather(torch.tensor([rank], device=device)).tolist() == list(range(world))
        model = later.prepare(nn.Linear(2, 1))
        later.backward(model(torch.full((1, 2), float(rank), device=device)).sum())
        assert_same_everywhere([parameter.grad for parameter in model.parameters()])
        if world > 1:
            group = dist.distributed_c10d._get_default_group()
            assert group._get_backend(device).options._timeout == timedelta(seconds=seconds)


if __name__ == "__main__":
    run(
        seeds_are_common_or_each_rank_s_own,
        inputs_are_shared_out,
        the_main_process_goes_first,
        functions_run_where_they_should,
        copies_work_on,
        a_timeout_that_cannot_take_effect_is_refused,
        training_ends_and_begins_again,
    )
