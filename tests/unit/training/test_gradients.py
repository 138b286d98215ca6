"""Several optimizers under one gradient scaler, and windows that errors interrupt."""

import pytest
import torch
from torch import nn

from accelerate import Accelerator, GradScalerKwargs


def make(count=2, **options):
    scaling = GradScalerKwargs(init_scale=256.0, **options)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
    models = [nn.Linear(2, 1) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, prepared[:count], prepared[count:]


def test_clipping_two_models_together_unscales_each_gradient_once():
    # The scale grows at every update, so an update between two steps shows in the second one.
    accelerator, models, optimizers = make(growth_interval=1)
    for _ in range(2):
        before = [model.weight.detach().clone() for model in models]
        accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
        accelerator.clip_grad_norm_([parameter for model in models for parameter in model.parameters()], 100.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for old, model in zip(before, models, strict=True):
            assert (old - model.weight).tolist()[0] == pytest.approx([0.5, 0.5], rel=1e-3)
    assert accelerator.scaler.get_scale() == 1024.0, "one update for each round of steps"


def test_a_scaler_is_updated_before_the_next_loss_when_only_one_optimizer_stepped():
    accelerator, models, optimizers = make(growth_interval=1)
    for round_, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):  # as adversarial training does
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert accelerator.scaler.get_scale() == 256.0 * 2**round_
    assert not accelerator.optimizer_step_was_skipped


def test_a_checkpoint_has_the_scale_of_the_next_step(tmp_path):
    accelerator, models, optimizers = make(growth_interval=1)
    accelerator.backward(models[0](torch.ones(1, 2)).sum())
    optimizers[0].step()
    accelerator.save_state(tmp_path)
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 512.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", ["", "clip_grad_norm_", "clip_grad_value_", "unscale_gradients"])
@pytest.mark.parametrize("overflow", [False, True])
def test_accumulating_optimizers_share_a_scaler(clip, overflow, fused):
    # Both clip in every micro-batch, and the scale changes with every update. Losses without a model are exact.
    handler = GradScalerKwargs(init_scale=256.0, growth_interval=1)
    options = {"gradient_accumulation_steps": 2, "kwargs_handlers": [handler]}
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", **options)
    weights, plain = ([nn.Parameter(torch.zeros(2)) for _ in range(2)] for _ in range(2))
    optimizers = [accelerator.prepare(torch.optim.SGD([weight], lr=1.0, fused=fused)) for weight in weights]
    references = [torch.optim.SGD([weight], lr=1.0) for weight in plain]
    for micro_batch in range(6):
        with accelerator.accumulate():
            for index in range(2):
                skipped = overflow and index == 0 and micro_batch < 2
                factor = torch.tensor([1.0, -3.0]) * (micro_batch + 1)
                factor = factor * (float("inf") if skipped and micro_batch == 0 else 1.0)
                accelerator.backward((weights[index] * factor).sum())
                ((plain[index] * factor).sum() / 2).backward()
                if clip == "unscale_gradients":
                    accelerator.unscale_gradients([None, optimizers[index], list(optimizers)][micro_batch % 3])
                    accelerator.unscale_gradients()
                elif clip and not (skipped and clip == "clip_grad_norm_"):
                    getattr(accelerator, clip)((weight for weight in weights[index : index + 1]), 2.5)
                    getattr(nn.utils, clip)(plain[index], 2.5)
                optimizers[index].step()
                optimizers[index].zero_grad()
                if accelerator.sync_gradients:
                    assert optimizers[index].step_was_skipped is skipped
                    if not skipped:
                        references[index].step()
                    references[index].zero_grad()
    torch.testing.assert_close(weights, plain)
    assert accelerator.scaler.get_scale() == (2048.0 if overflow else 8192.0)


def test_optimizers_may_share_a_parameter_under_one_scaler():
    accelerator, (model,), (first,) = make(1, growth_interval=1)
    second = accelerator.prepare(torch.optim.SGD([model.weight], lr=0.25))
    for optimizers in ([first, second], [second, first, first]):  # a second step without a backward pass, too
        before = model.weight.detach().clone()
        accelerator.backward((model.weight * 2).sum())
        for optimizer in optimizers:
            optimizer.step()
        moved = 2 * sum(optimizer.param_groups[0]["lr"] for optimizer in optimizers)
        torch.testing.assert_close(before - model.weight, torch.full((1, 2), moved))
        first.zero_grad()


def test_loading_a_scale_keeps_accumulated_gradients_and_forgets_steps_before():
    accelerator, models, optimizers = make()
    state = accelerator.scaler.state_dict() | {"scale": 16.0}
    before = models[1].weight.detach().clone()
    accelerator.backward(sum((model.weight * 2).sum() for model in models))
    accelerator.backward((models[0].weight * float("inf")).sum())
    optimizers[0].step()
    accelerator.scaler.load_state_dict(state)
    accelerator.backward((models[1].weight * 4).sum())
    assert accelerator.scaler.get_scale() == 16.0
    optimizers[1].step()
    torch.testing.assert_close(before - models[1].weight, torch.full((1, 2), 3.0))


def test_a_step_without_gradients_changes_nothing():
    accelerator, models, optimizers = make()
    before = models[1].weight.detach().clone()
    accelerator.backward(models[0].weight.sum())
    for optimizer in optimizers:
        optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    torch.testing.assert_close(models[1].weight.detach(), before)


def test_a_refused_count_leaves_no_window_open():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="negative"), accelerator.accumulate(model, num_items=-1):
        pass
    assert not accelerator._window.inside


def test_a_new_accelerator_steps_although_the_last_window_was_left_open():
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = first.prepare(nn.Linear(1, 1))
    with pytest.raises(KeyboardInterrupt), first.accumulate(model):
        raise KeyboardInterrupt
    second = Accelerator(cpu=True)
    assert second.sync_gradients and second.gradient_accumulation_steps == 1


def test_a_first_micro_batch_without_items_leaves_the_others_in_the_range_of_fp16():
    accelerator, (model,), (optimizer,) = make(1)
    accelerator.gradient_accumulation_steps = 3
    before = model.weight.detach().clone()
    for count in (0, 5000, 5000):
        with accelerator.accumulate(model, num_items=count):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert (before - model.weight).tolist()[0] == pytest.approx([0.5, 0.5], rel=1e-3)


@pytest.fixture
def halves():
    """An Accelerator of two micro-batches a step, and what trains some of them by their numbers of items."""
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def trained(model, optimizer, *counts):
        for count in counts:
            with accelerator.accumulate(model, num_items=count):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.item()

    return accelerator, model, trained


def test_a_load_within_an_accumulation_step_begins_a_new_one(halves, tmp_path):
    accelerator, model, trained = halves
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.save_state(tmp_path / "checkpoint")
    trained(model, optimizer, 98)
    accelerator.load_state(tmp_path / "checkpoint")
    assert accelerator.sync_gradients
    optimizer.zero_grad()
    assert trained(model, optimizer, 1, 1) == 0.0
