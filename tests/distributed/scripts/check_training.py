"""What happens to gradients, weights and learning rates in a training loop, on one process and several."""

import warnings

import torch
from harness import assert_same_everywhere, differs_between_ranks, everywhere, fresh_accelerator, raised, run, warned
from models import WIDTH, assert_all_close, gradients, inputs_of, mean_square, network, whole_batch_gradients
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import DataLoaderConfiguration, GradScalerKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradientAccumulationPlugin

# -- when gradients are synchronised ---------------------------------------------------------------------------------


def two_models_accumulate_together():
    """As in adversarial training: one context for both, each with its own backward pass and optimizer."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    maker, judge = nn.Linear(WIDTH, WIDTH), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    maker, judge, maker_step, judge_step = accelerator.prepare(maker, judge, *optimizers)
    parameters = [*maker.parameters(), *judge.parameters()]
    before = [parameter.clone() for parameter in parameters]
    for micro_batch in range(2):
        x = inputs_of(rank, seed=micro_batch).to(device)
        with accelerator.accumulate(maker, judge):
            accelerator.backward(judge(maker(x).detach()).mean())
            accelerator.backward(maker(x).pow(2).mean())
            closes = micro_batch == 1
            assert accelerator.sync_gradients is closes
            for model in (judge, maker):
                assert differs_between_ranks(gradients(model)[0]) is (world > 1 and not closes)
            judge_step.step()
            maker_step.step()
            assert all(torch.equal(a, b) is not closes for a, b in zip(parameters, before, strict=True))
    assert_same_everywhere(parameters)


def each_batch_can_be_synchronised():
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = next(model.parameters())
    before = weight.clone()
    for micro_batch in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(mean_square(model, inputs_of(rank, seed=micro_batch).to(device)))
            assert_same_everywhere(gradients(model), f"micro-batch {micro_batch}")
            optimizer.step()
            assert torch.equal(weight, before) is (micro_batch < 2)
    pieces = [inputs_of(r, seed=micro_batch) for r in range(world) for micro_batch in range(3)]
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, pieces))


def synchronised_micro_batches(batches, steps, sync_with_dataloader):
    """Return a mark per micro-batch of two epochs: + where gradients are synchronised, - where they accumulate."""
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_with_dataloader)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    data = torch.zeros(batches * accelerator.num_processes, WIDTH)
    model, loader = accelerator.prepare(network(), DataLoader(data, batch_size=1))
    marks = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                marks.append("+" if accelerator.sync_gradients else "-")
    return "".join(marks)


def the_end_of_a_loader_may_close_a_window():
    main_process = fresh_accelerator().is_main_process
    with warned(0, "accumulation window"):
        assert synchronised_micro_batches(4, 2, True) == "-+-+-+-+"
        assert synchronised_micro_batches(4, 3, False) == "--+--+--"
        assert synchronised_micro_batches(5, 2, False) == "-+-+-+-+-+"
    with warned(int(main_process), "accumulation window", at="with accelerator.accumulate"):
        assert synchronised_micro_batches(5, 2, True) == "-+-++-+-++"


def backward_may_synchronise_after_unsynchronised_forwards():
    accelerator = fresh_accelerator()
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    model = accelerator.prepare(network())
    first, second = ([inputs_of(r, seed=seed) for r in range(world)] for seed in (4, 5))
    with accelerator.no_sync(model):
        losses = [mean_square(model, pieces[rank].to(device)) for pieces in (first, second)]
    accelerator.backward(losses[0])
    assert differs_between_ranks(gradients(model)[0]) is (world > 1)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    assert_same_everywhere(gradients(model))
    both = zip(whole_batch_gradients(accelerator, first), whole_batch_gradients(accelerator, second), strict=True)
    assert_all_close(gradients(model), [one + other for one, other in both])
    model.zero_grad()  # training goes on as usual afterwards
    accelerator.backward(mean_square(model, first[rank].to(device)))
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, first))


# -- ranks with different numbers of batches -------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(4, WIDTH)


def uneven_inputs_are_joined():
    accelerator = fresh_accelerator()
    world = accelerator.num_processes
    model = network()
    loader = DataLoader(torch.ones(2 * world + 1, WIDTH), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    steps = 0
    with warned(0, "even_batches"), accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in loader:
            accelerator.backward(mean_square(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert everywhere(steps) == [3] + [2] * (world - 1)
    assert_same_everywhere(model.parameters())
    assert everywhere(len(list(loader))) == [3] * world, "even_batches is as it was"

    with accelerator.join_uneven_inputs([model]):  # without an override the loaders are left alone
        assert everywhere(len(loader)) == [3] * world
        for batch in loader:
            mean_square(model, batch).backward()


def windows_may_close_at_different_steps():
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
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    both, alone = rows[: 2 * world].sum(0) / world, rows[2 * world]
    expected = before - 0.1 * (both + alone) / 3 / world
    torch.testing.assert_close(accelerator.unwrap_model(model).weight.detach().cpu(), expected)
    assert_same_everywhere(model.parameters())

    if world > 1:
        with accelerator.join_uneven_inputs([model]):
            with raised(ValueError, "join_uneven_inputs"), accelerator.accumulate(model, num_items=1):
                pass


def joining_warns_for_streams():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    rows = DataLoader(torch.ones(4, WIDTH), batch_size=1)
    model, stream, rows = accelerator.prepare(network(), DataLoader(Stream(), batch_size=1), rows)
    several = accelerator.num_processes > 1
    with warned(int(several), "even_batches=False", "map-style", at="accelerator.join_uneven_inputs"):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            if several:
                assert not rows.batch_sampler.even_batches
            for batch in rows:
                mean_square(model, batch).backward()
    if several:
        assert rows.batch_sampler.even_batches
    with warned(0, "even_batches"), accelerator.join_uneven_inputs([model]):
        for batch in stream:
            mean_square(model, batch).backward()


# -- clipping and scaling --------------------------------------------------------------------------------------------


def clipping_unscales_to_the_norm_of_the_whole_batch():
    scaler = GradScalerKwargs(init_scale=8.0)
    accelerator = fresh_accelerator(mixed_precision="fp16", kwargs_handlers=[scaler])
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    pieces = [10 * inputs_of(rank) for rank in range(accelerator.num_processes)]
    expected = whole_batch_gradients(accelerator, pieces)
    expected_norm = torch.cat([gradient.flatten() for gradient in expected]).norm()
    accelerator.backward(mean_square(model, pieces[accelerator.process_index].to(accelerator.device)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert expected_norm > 0.5
    torch.testing.assert_close(norm, expected_norm, rtol=0.05, atol=0.05)
    assert_all_close(gradients(model), [g * 0.5 / expected_norm for g in expected], rtol=0.05, atol=0.05)
    optimizer.step()
    assert_same_everywhere([*model.parameters(), *gradients(model)])


def an_overflow_on_one_rank_skips_the_step_on_all():
    for steps in (1, 2):
        scaler = GradScalerKwargs(init_scale=64.0, growth_interval=1000)
        accelerator = fresh_accelerator(
            mixed_precision="fp16", kwargs_handlers=[scaler], gradient_accumulation_steps=steps
        )
        device = accelerator.device
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        bad_rank, history, rates = accelerator.num_processes - 1, [], []
        for update in range(3):
            before = [parameter.clone() for parameter in model.parameters()]
            for micro_batch in range(steps):
                x = inputs_of(accelerator.process_index, seed=update).to(device)
                with accelerator.accumulate(model):
                    loss = mean_square(model, x)
                    if update == 1 and micro_batch == 0 and accelerator.process_index == bad_rank:
                        loss = loss * float("inf")
                    accelerator.backward(loss)
                    optimizer.step()
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        scheduler.step()
                    optimizer.zero_grad()
            changed = any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            history.append((accelerator.optimizer_step_was_skipped, changed, accelerator.scaler.get_scale()))
            rates.append(scheduler.get_last_lr()[0])
            assert_same_everywhere(model.parameters())
        assert history == [(False, True, 64.0), (True, False, 32.0), (False, True, 32.0)], (steps, history)
        assert rates[0] == rates[1] > rates[2], rates
        assert everywhere(history) == [history] * accelerator.num_processes


def optimizers_share_a_scaler():
    """One of two overflows, on one rank: it alone is skipped, on all ranks, and the scale falls once."""
    scaler = GradScalerKwargs(init_scale=64.0, growth_interval=1000)
    accelerator = fresh_accelerator(mixed_precision="fp16", kwargs_handlers=[scaler])
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    models = [network(), network()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    pieces = [inputs_of(r) for r in range(world)]
    for update, (overflows, scale) in enumerate([(False, 64.0), (True, 32.0), (False, 32.0)]):
        for model in models:
            accelerator.unwrap_model(model).load_state_dict(network().state_dict())
        before = [[parameter.clone() for parameter in model.parameters()] for model in models]
        for model, bad in zip(models, (False, overflows and rank == world - 1), strict=True):
            accelerator.backward(mean_square(model, pieces[rank].to(device)) * (float("inf") if bad else 1.0))
        if not overflows:
            accelerator.clip_grad_norm_(models[0].parameters(), 1000.0)  # unscales the gradients of both
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert (first.step_was_skipped, second.step_was_skipped) == (False, overflows), update
        assert accelerator.optimizer_step_was_skipped is overflows
        assert accelerator.scaler.get_scale() == scale, update
        expected = whole_batch_gradients(accelerator, pieces)
        for model, start, skipped in zip(models, before, (False, overflows), strict=True):
            moved = [(a - b) / 0.5 for a, b in zip(start, model.parameters(), strict=True)]
            assert_all_close(moved, [g * (not skipped) for g in expected], rtol=0.05, atol=0.05)
            assert_same_everywhere(model.parameters())


# -- other loops -----------------------------------------------------------------------------------------------------


def local_training_averages_weights():
    accelerator = fresh_accelerator()
    world, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = next(model.parameters())
    differing = []
    with LocalSGD(accelerator, model, local_sgd_steps=3) as local:
        for step in range(7):
            accelerator.backward(mean_square(model, inputs_of(rank, seed=step).to(device)))
            optimizer.step()
            optimizer.zero_grad()
            expected = torch.stack([w.to(device) for w in everywhere(weight.detach().cpu())]).mean(0)
            local.step()
            differing.append(differs_between_ranks(weight))
            if step == 2:
                torch.testing.assert_close(weight.detach(), expected)
    assert differing == [(step + 1) % 3 != 0 and world > 1 for step in range(7)], differing
    assert_same_everywhere(model.parameters(), "averaged at the end")
    with LocalSGD(accelerator, model, local_sgd_steps=3, enabled=False) as local:
        accelerator.backward(mean_square(model, inputs_of(rank).to(device)))
        local.step()
    assert_same_everywhere(gradients(model), "enabled=False synchronises as usual")


# -- loops in loops --------------------------------------------------------------------------------------------------


def evaluation_inside_training():
    accelerator = fresh_accelerator(gradient_accumulation_steps=4)
    world = accelerator.num_processes
    state = accelerator.gradient_state
    train = DataLoader(torch.ones(5 * world, WIDTH), batch_size=1)
    # Neither loader ends evenly, and they end at different times.
    evaluation = DataLoader(TensorDataset(torch.arange(4 * world + 1)), batch_size=2)
    model, train, evaluation = accelerator.prepare(network(), train, evaluation)
    marks = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, batch in enumerate(train):
            is_last = number == 4
            assert state.active_dataloader is train and state.end_of_dataloader is is_last
            if number in (1, 4):
                found = []
                for (indices,) in evaluation:
                    assert state.active_dataloader is evaluation
                    assert state.end_of_dataloader is (len(found) + 2 * world > 4 * world)
                    found += accelerator.gather_for_metrics(indices).tolist()
                assert found == list(range(4 * world + 1)), found
                assert state.active_dataloader is train and state.end_of_dataloader is is_last
            if number == 2:
                for _ in evaluation:
                    break
                assert state.active_dataloader is train and not state.end_of_dataloader
            with accelerator.accumulate(model):
                accelerator.backward(mean_square(model, batch))
                marks += "+" if accelerator.sync_gradients else "-"
    assert marks == "---++", marks
    assert state.active_dataloader is None and not state.end_of_dataloader


if __name__ == "__main__":
    run(
        two_models_accumulate_together,
        each_batch_can_be_synchronised,
        the_end_of_a_loader_may_close_a_window,
        backward_may_synchronise_after_unsynchronised_forwards,
        uneven_inputs_are_joined,
        windows_may_close_at_different_steps,
        joining_warns_for_streams,
        clipping_unscales_to_the_norm_of_the_whole_batch,
        an_overflow_on_one_rank_skips_the_step_on_all,
        optimizers_share_a_scaler,
        local_training_averages_weights,
        evaluation_inside_training,
    )
