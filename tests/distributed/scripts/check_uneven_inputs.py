"""Training on ranks with different numbers of batches: `join_uneven_inputs`."""

import copy
import os
import warnings
from unittest import mock

import torch
from expect import assert_all_close, assert_same_everywhere, raised, warned
from harness import Stream, everywhere, fresh_accelerator, learn
from models import WIDTH, inputs_of, mean_square, network, prepared
from torch import nn
from torch.utils.data import DataLoader

from accelerate import DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradScalerKwargs


def check_uneven_inputs_are_joined():
    accelerator = fresh_accelerator()
    world = accelerator.num_processes
    model, optimizer = prepared(accelerator)
    loader = accelerator.prepare(DataLoader(torch.ones(2 * world + 1, WIDTH), batch_size=1))
    with warned(0, "even_batches"), accelerator.join_uneven_inputs([model], even_batches=False):
        steps = len([learn(accelerator, mean_square(model, batch), optimizer) for batch in loader])
    assert everywhere(steps) == [3] + [2] * (world - 1)
    assert_same_everywhere(model.parameters())
    assert everywhere(len(list(loader))) == [3] * world, "even_batches is as it was"

    with accelerator.join_uneven_inputs([model]):  # without an override the loaders are left alone
        assert everywhere(len(loader)) == [3] * world
        for batch in loader:
            mean_square(model, batch).backward()


def check_joined_models_share_a_loss():
    """Rank 0 has two batches, the others one: a rank that has ended adds zeros. The order of the models is of no account."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=1)
    world, rank = accelerator.num_processes, accelerator.process_index
    models = [
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1, bias=False)),
    ]
    plain = [copy.deepcopy(model) for model in models]
    models = [accelerator.prepare(model) for model in models]
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    with accelerator.join_uneven_inputs(models[::-1]):
        for step in range(2 if rank == 0 else 1):
            for loss in losses_of(models, inputs_of(rank, seed=step).to(accelerator.device)):
                accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for step in range(2):
        for loss in range(2):
            for other in range(world if step == 0 else 1):
                (losses_of(plain, inputs_of(other, seed=step))[loss] / world).backward()
        with torch.no_grad():
            for parameter in (p for model in plain for p in model.parameters()):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    for model, expected in zip(models, plain, strict=True):
        assert_all_close(
            [p.detach().cpu() for p in model.parameters()], list(expected.parameters()), rtol=1e-4, atol=1e-5
        )
        assert_same_everywhere([*model.parameters(), *(b.float() for b in model.buffers())])

    if world > 1:
        handler = DistributedDataParallelKwargs(static_graph=True)
        accelerator = fresh_accelerator(kwargs_handlers=[handler])
        models = [accelerator.prepare(network()) for _ in range(2)]
        with raised(ValueError, "static_graph=True"), accelerator.join_uneven_inputs(models):
            pass


def losses_of(models, inputs):
    """A loss of both models, which calls the first twice, and one of the first only."""
    first, second = models
    return second(first(inputs)).pow(2).mean() + first(2 * inputs).mean(), first(inputs).pow(2).mean()


def check_joined_windows_may_close_at_different_steps():
    """A rank may end in the middle of the others' window, which then counts by the share of ranks that close it."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=3)
    world = accelerator.num_processes
    rows = torch.randn(2 * world + 1, WIDTH)
    model = nn.Linear(WIDTH, 1, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))
    with warnings.catch_warnings(), accelerator.join_uneven_inputs([model], even_batches=False):
        warnings.simplefilter("ignore")
        for batch in loader:
            with accelerator.accumulate(model):
                learn(accelerator, model(batch).sum(), optimizer)
    both, alone = rows[: 2 * world].sum(0) / world, rows[2 * world]
    expected = before - 0.1 * (both + alone) / 3 / world
    torch.testing.assert_close(accelerator.unwrap_model(model).weight.detach().cpu(), expected)
    assert_same_everywhere(model.parameters())

    if world > 1:
        with accelerator.join_uneven_inputs([model]):
            with raised(ValueError, "join_uneven_inputs"), accelerator.accumulate(model, num_items=1):
                pass


def check_steps_of_ranks_alone_do_not_move_the_comparison():
    with mock.patch.dict(os.environ, ACCELERATE_CHECK_EVERY="4"):
        accelerator = fresh_accelerator()
    model, optimizer = prepared(accelerator)
    loader = accelerator.prepare(DataLoader(torch.ones(accelerator.num_processes + 1, WIDTH), batch_size=1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            learn(accelerator, mean_square(model, batch), optimizer)
    for _ in range(8):
        learn(accelerator, mean_square(model, inputs_of(0)), optimizer)
    assert_same_everywhere(model.parameters())


def check_weights_that_ranks_have_alone_are_not_joined():
    accelerator = fresh_accelerator()
    model, _ = prepared(accelerator)
    if accelerator.num_processes == 1:
        return
    with (
        raised(ValueError, "inside join_uneven_inputs"),
        accelerator.join_uneven_inputs([model]),
        LocalSGD(accelerator, model, 2),
    ):
        pass
    with (
        raised(ValueError, "inside LocalSGD or no_sync"),
        LocalSGD(accelerator, model, 2),
        accelerator.join_uneven_inputs([model]),
    ):
        pass


def check_ranks_that_trained_on_their_own_have_one_loss_scale():
    scaler = GradScalerKwargs(init_scale=64.0, growth_interval=1000)
    accelerator = fresh_accelerator(mixed_precision="fp16", kwargs_handlers=[scaler])
    model, optimizer = prepared(accelerator)
    with LocalSGD(accelerator, model, 1) as local_sgd:
        overflows = float("inf") if accelerator.is_last_process else 1.0
        learn(accelerator, model(inputs_of(0)).sum() * overflows, optimizer)
        local_sgd.step()
        assert len(set(everywhere(accelerator.scaler.get_scale()))) == min(2, accelerator.num_processes)
    assert len(set(everywhere(accelerator.scaler.get_scale()))) == 1


def check_joining_warns_for_streams():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rows = torch.zeros(4, WIDTH)
    stream = DataLoader(Stream(list(rows)), batch_size=1)
    model, stream, rows = accelerator.prepare(network(), stream, DataLoader(rows, batch_size=1))
    several = accelerator.num_processes > 1
    with warned(int(several), "even_batches=False", "map-style", at="accelerator.join_uneven_inputs"):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            assert not (several and rows.batch_sampler.even_batches)
            for batch in rows:
                mean_square(model, batch).backward()
    assert not several or rows.batch_sampler.even_batches
    with warned(0, "even_batches"), accelerator.join_uneven_inputs([model]):
        for batch in stream:
            mean_square(model, batch).backward()
