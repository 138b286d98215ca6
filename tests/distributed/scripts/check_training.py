"""What happens to gradients, weights and learning rates in a training loop, on one process and several."""

import itertools
import random
import time
import warnings

import torch
from expect import assert_all_close, assert_same_everywhere, differs_between_ranks, raised, warned
from harness import everywhere, fresh_accelerator, learn
from models import WIDTH, gradients, inputs_of, mean_square, network, own_inputs, prepared, whole_batch_gradients
from torch import nn
from torch.utils.data import DataLoader

from accelerate import GradScalerKwargs
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, find_executable_batch_size


def check_two_models_accumulate_together():
    """As in adversarial training: one context for both, each with its own backward pass and optimizer."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    maker, judge = nn.Linear(WIDTH, WIDTH), network()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    maker, judge, maker_step, judge_step = accelerator.prepare(maker, judge, *optimizers)
    parameters = [*maker.parameters(), *judge.parameters()]
    before = [parameter.clone() for parameter in parameters]
    for micro_batch in range(2):
        x = own_inputs(accelerator, micro_batch)
        with accelerator.accumulate(maker, judge):
            accelerator.backward(judge(maker(x).detach()).mean())
            accelerator.backward(maker(x).pow(2).mean())
            closes = micro_batch == 1
            assert accelerator.sync_gradients is closes
            for model in (judge, maker):
                assert differs_between_ranks(gradients(model)[0]) is (accelerator.num_processes > 1 and not closes)
            judge_step.step()
            maker_step.step()
            assert all(torch.equal(a, b) is not closes for a, b in zip(parameters, before, strict=True))
    assert_same_everywhere(parameters)


def check_each_batch_can_be_synchronised():
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer = prepared(accelerator)
    weight = next(model.parameters())
    before = weight.clone()
    for micro_batch in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(mean_square(model, own_inputs(accelerator, micro_batch)))
            assert_same_everywhere(gradients(model), f"micro-batch {micro_batch}")
            optimizer.step()
            assert torch.equal(weight, before) is (micro_batch < 2)
    pieces = [inputs_of(r, seed=micro_batch) for r in range(accelerator.num_processes) for micro_batch in range(3)]
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, pieces))


def synchronised_micro_batches(batches, steps, sync_with_dataloader):
    """Return a mark per micro-batch of two epochs: + where gradients are synchronised, - where they accumulate."""
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_with_dataloader)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    data = torch.zeros(batches * accelerator.num_processes, WIDTH)
    model, loader = accelerator.prepare(network(), DataLoader(data, batch_size=1))
    marks = ""
    for _ in itertools.chain(loader, loader):
        with accelerator.accumulate(model):
            marks += "+" if accelerator.sync_gradients else "-"
    return marks


def check_windows_at_the_end_of_a_loader():
    main_process = fresh_accelerator().is_main_process
    with warned(0, "accumulation step"):
        assert synchronised_micro_batches(4, 2, True) == "-+-+-+-+"
        assert synchronised_micro_batches(4, 3, False) == "--+--+--"
        assert synchronised_micro_batches(5, 2, False) == "-+-+-+-+-+"
    with warned(int(main_process), "accumulation step", at="with accelerator.accumulate"):
        assert synchronised_micro_batches(5, 2, True) == "-+-++-+-++"


def check_windows_that_are_short():
    """Three micro-batches an epoch in windows of two: the last one counts half, or wholly where that is requested."""
    for exact, weight in ((False, 0.5), (True, 1.0)):
        plugin = GradientAccumulationPlugin(num_steps=2, exact=exact)
        accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
        pieces = [inputs_of(number) for number in range(3 * accelerator.num_processes)]
        model, loader = accelerator.prepare(network(), DataLoader(torch.cat(pieces), batch_size=2))
        with warned(int(not exact and accelerator.is_main_process), "accumulation step"):
            for x in itertools.chain(loader, loader):
                with accelerator.accumulate(model):
                    if accelerator.gradient_state.end_of_dataloader:
                        model.zero_grad()
                    accelerator.backward(mean_square(model, x))
        expected = whole_batch_gradients(accelerator, pieces[2 * accelerator.num_processes :])
        assert_all_close(gradients(model), [weight * gradient for gradient in expected])


def check_items_are_counted_over_all_ranks():
    """Every rank and micro-batch has another number of items; the mean is over all of them."""
    for steps, in_backward, each in itertools.product((1, 2, 3), (False, True), (False, True)):
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
        accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
        pieces = [inputs_of(place, 1 + 3 * place % 5) for place in range(steps * accelerator.num_processes)]
        model = accelerator.prepare(network())
        for _ in range(2):
            model.zero_grad()
            for x in pieces[accelerator.process_index :: accelerator.num_processes]:
                with accelerator.accumulate(model, num_items=None if in_backward else len(x)):
                    loss = mean_square(model, x.to(accelerator.device))
                    accelerator.backward(loss, **({"num_items": torch.tensor(len(x))} if in_backward else {}))
            assert_all_close(gradients(model), whole_batch_gradients(accelerator, pieces), rtol=1e-6, atol=1e-6)
    with accelerator.accumulate(model, num_items=2):
        accelerator.backward(mean_square(model, own_inputs(accelerator)))
    with raised(ValueError, "num_items"), accelerator.accumulate(model):
        accelerator.backward(mean_square(model, own_inputs(accelerator)))


def check_items_of_two_models_before_a_step():
    """Each backward pass has its own count: the second one leaves what the first one brought."""
    accelerator = fresh_accelerator()
    first, second = accelerator.prepare(network(), network())
    pieces = [inputs_of(place, 2 + 3 * place) for place in range(accelerator.num_processes)]
    mine = pieces[accelerator.process_index].to(accelerator.device)
    for model, count in ((first, len(mine)), (second, 1 + accelerator.process_index)):
        accelerator.backward(mean_square(model, mine), num_items=count)
    assert_all_close(gradients(first), whole_batch_gradients(accelerator, pieces), rtol=1e-6, atol=1e-6)


def check_backward_may_synchronise_after_unsynchronised_forwards():
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
    model.zero_grad()  # training continues as usual afterwards
    accelerator.backward(mean_square(model, first[rank].to(device)))
    assert_all_close(gradients(model), whole_batch_gradients(accelerator, first))


def scaled(scale, **options):
    """An Accelerator whose scale of losses does not grow."""
    scaler = GradScalerKwargs(init_scale=scale, growth_interval=1000)
    return fresh_accelerator(mixed_precision="fp16", kwargs_handlers=[scaler], **options)


def check_clipping_unscales_to_the_norm_of_the_whole_batch():
    accelerator = scaled(8.0)
    model, optimizer = prepared(accelerator)
    pieces = [10 * inputs_of(rank) for rank in range(accelerator.num_processes)]
    expected = whole_batch_gradients(accelerator, pieces)
    expected_norm = torch.cat([gradient.flatten() for gradient in expected]).norm()
    accelerator.backward(mean_square(model, 10 * own_inputs(accelerator)))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert expected_norm > 0.5
    torch.testing.assert_close(norm, expected_norm, rtol=0.05, atol=0.05)
    assert_all_close(gradients(model), [g * 0.5 / expected_norm for g in expected], rtol=0.05, atol=0.05)
    optimizer.step()
    assert_same_everywhere([*model.parameters(), *gradients(model)])


def check_an_overflow_on_one_rank_skips_the_step_on_all():
    for steps in (1, 2):
        accelerator = scaled(64.0, gradient_accumulation_steps=steps)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        history, rates = [], []
        for update in range(3):
            before = [parameter.clone() for parameter in model.parameters()]
            for micro_batch in range(steps):
                bad = accelerator.is_last_process and (update, micro_batch) == (1, 0)
                with accelerator.accumulate(model), warnings.catch_warnings():
                    warnings.simplefilter("error")  # as torch does where the scheduler steps first
                    loss = mean_square(model, own_inputs(accelerator, update)) * (float("inf") if bad else 1.0)
                    learn(accelerator, loss, optimizer, scheduler)
            changed = any(not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            history.append((accelerator.optimizer_step_was_skipped, changed, accelerator.scaler.get_scale()))
            rates.append(scheduler.get_last_lr()[0])
            assert_same_everywhere(model.parameters())
        assert history == [(False, True, 64.0), (True, False, 32.0), (False, True, 32.0)], (steps, history)
        assert rates[0] == rates[1] > rates[2], rates
        assert everywhere(history) == [history] * accelerator.num_processes


def check_optimizers_share_a_scaler():
    """One of two overflows, on one rank: it alone is skipped, on all ranks, and the scale falls once."""
    accelerator = scaled(64.0)
    (one, first), (other, second) = prepared(accelerator, 0.5), prepared(accelerator, 0.5)
    models = [one, other]
    expected = whole_batch_gradients(accelerator, [inputs_of(r) for r in range(accelerator.num_processes)])
    for update, (overflows, scale) in enumerate([(False, 64.0), (True, 32.0), (False, 32.0)]):
        for model in models:
            accelerator.unwrap_model(model).load_state_dict(network().state_dict())
        before = [[parameter.clone() for parameter in model.parameters()] for model in models]
        for model, bad in zip(models, (False, overflows and accelerator.is_last_process), strict=True):
            accelerator.backward(mean_square(model, own_inputs(accelerator)) * (float("inf") if bad else 1.0))
        if not overflows:
            accelerator.clip_grad_norm_(one.parameters(), 1000.0)  # unscales the gradients of both
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert (first.step_was_skipped, second.step_was_skipped) == (False, overflows), update
        assert accelerator.optimizer_step_was_skipped is overflows
        assert accelerator.scaler.get_scale() == scale, update
        for model, start, skipped in zip(models, before, (False, overflows), strict=True):
            moved = [(a - b) / 0.5 for a, b in zip(start, model.parameters(), strict=True)]
            assert_all_close(moved, [g * (not skipped) for g in expected], rtol=0.05, atol=0.05)
            assert_same_everywhere(model.parameters())


class Dot(nn.Module):
    """A product whose gradients are exact in float16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, factors):
        return (self.weight * factors.to(self.weight.dtype)).sum()


def check_a_scale_may_change_while_another_optimizer_accumulates():
    """The first optimizer overflows, then the scale grows with each update; the second skips an accumulation step."""
    plugins = [{}] + [{"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version)} for version in (1, 2)]
    for settings in plugins:
        handler = GradScalerKwargs(init_scale=4.0, growth_interval=1)
        accelerator = fresh_accelerator(
            mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[handler], **settings
        )
        models = [accelerator.prepare(Dot()) for _ in range(2)]
        optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)) for model in models]
        for micro_batch in range(6):
            factors = torch.arange(8.0) * (micro_batch + accelerator.process_index)
            with accelerator.accumulate(*models):
                for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                    bad = index == 0 and micro_batch == 1 and accelerator.is_last_process
                    accelerator.backward(model(factors.to(accelerator.device)) * (float("inf") if bad else 1.0))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1e4)
                    if index == 0 or micro_batch > 1:
                        optimizer.step()
                        optimizer.zero_grad()
        shift = (accelerator.num_processes - 1) / 2
        for model, micro_batches in zip(models, [range(2, 6), range(6)], strict=True):
            expected = -torch.arange(8.0) * sum(batch + shift for batch in micro_batches) / 2
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                torch.testing.assert_close(next(iter(state.values())).float().cpu(), expected, msg=f"{settings}")


def run_out_of_memory(error, fits, starting=16, settings=None, **options):
    """Let the last rank raise where the others leave the try; return what each try of this rank saw."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2, **(settings or {}))
    loader = accelerator.prepare(DataLoader(torch.arange(8 * accelerator.num_processes), shuffle=True))
    last, seen, ended = accelerator.is_last_process, [], []
    if options.pop("given"):
        options["accelerator"] = accelerator
    next(iter(loader))  # the position to come back to is behind a first epoch

    @find_executable_batch_size(starting_batch_size=starting, **options)
    def train(batch_size):
        retry = [time.process_time() - began for began in ended[-1:]]
        drawn = [random.random(), torch.rand(1).item()]
        seen.append([batch_size, accelerator.gradient_accumulation_steps, drawn, [x.item() for x in loader], retry])
        model, optimizer = prepared(accelerator)
        loss = mean_square(model, own_inputs(accelerator))
        ended.append(time.process_time())
        if batch_size > fits:
            if last:
                raise type(error)(*error.args)
            return None
        learn(accelerator, loss, optimizer)
        return batch_size

    try:
        return seen, train()
    finally:
        assert len(everywhere(0)) == accelerator.num_processes  # all ranks are in a group


def check_out_of_memory_on_one_rank():
    errors = torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("can't allocate memory")
    for error in errors:
        seen, found = run_out_of_memory(error, fits=5, given=True, keep_global_batch=True)
        assert found == 4
        assert [(size, steps) for size, steps, *_ in seen] == [(16, 2), (8, 4), (4, 8)]
        assert all(drawn == seen[0][2] and order == seen[0][3] for _, _, drawn, order, _ in seen)
        assert max(cpu for *_, retry in seen for cpu in retry) < 2
    seen, found = run_out_of_memory(errors[0], fits=12, given=False)
    assert found == 12 and [size for size, *_ in seen] == [16, 14, 12]
    shards = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    seen, found = run_out_of_memory(errors[0], fits=12, given=True, settings=shards)
    assert found == 12 and [size for size, *_ in seen] == [16, 14, 12]
    with raised(RuntimeError, "reached zero"):
        run_out_of_memory(errors[0], fits=0, starting=2, given=False)


def out_of_memory_elsewhere():
    """The last rank runs out of memory before a collective that the others have begun, and do not wait for."""
    accelerator = fresh_accelerator()

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        if not accelerator.is_last_process:
            torch.distributed.all_reduce(torch.ones(1), async_op=True)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    train()


def out_of_memory_alone():
    """The last rank runs out of memory where the others wait for its gradients."""
    accelerator = fresh_accelerator()

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        model, optimizer = prepared(accelerator)
        loss = mean_square(model, own_inputs(accelerator))
        if accelerator.is_last_process:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        learn(accelerator, loss, optimizer)

    train()


def check_a_search_may_end_the_training():
    accelerator = fresh_accelerator()

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size):
        accelerator.end_training()
        return batch_size

    assert train() == 4
