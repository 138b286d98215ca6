"""Gradients under several processes equal those of one process on the whole batch."""

import itertools
import warnings

import torch
from harness import fresh_accelerator, raised, run
from torch import nn

from accelerate.utils import GradientAccumulationPlugin

WIDTH = 6


def build_model():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def samples(count):
    generator = torch.Generator().manual_seed(11)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def whole_batch_gradients(inputs, labels, device):
    """The reference: plain torch, one process, the whole batch at once."""
    model = build_model().to(device)
    nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def short_window(exact):
    """Three micro-batches per epoch in windows of two: the last one has one."""
    plugin = GradientAccumulationPlugin(num_steps=2, exact=exact)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    world = accelerator.num_processes
    inputs, labels = samples(2 * 3 * world)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=2)
    model, loader = accelerator.prepare(build_model(), loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    if accelerator.sync_gradients and not accelerator.gradient_state.end_of_dataloader:
                        model.zero_grad()
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
    last = slice(2 * 2 * world, None)
    expected = whole_batch_gradients(inputs[last], labels[last], accelerator.device)
    weight = 1.0 if exact else 0.5
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, weight * reference, rtol=1e-5, atol=1e-6)
    notes = [item for item in caught if "accumulation window" in str(item.message)]
    assert len(notes) == (1 if not exact and accelerator.is_main_process else 0), [str(n.message) for n in notes]


def counted_items(steps, through):
    """Every rank and micro-batch has another number of tokens; the mean must be over all of them."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=steps)
    world, rank = accelerator.num_processes, accelerator.process_index
    sizes = [1 + (3 * position) % 5 for position in range(steps * world)]
    inputs, labels = samples(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    model = accelerator.prepare(build_model())
    for window in range(2):
        model.zero_grad()
        for step in range(steps):
            position = step * world + rank
            piece = slice(ends[position] - sizes[position], ends[position])
            count = sizes[position]
            with accelerator.accumulate(model, num_items=count if through == "accumulate" else None):
                loss = nn.functional.cross_entropy(
                    model(inputs[piece].to(accelerator.device)), labels[piece].to(accelerator.device)
                )
                if through == "accumulate":
                    accelerator.backward(loss)
                else:
                    accelerator.backward(loss, num_items=torch.tensor(count))
        expected = whole_batch_gradients(inputs, labels, accelerator.device)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6, msg=f"window {window}")


def missing_count():
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(build_model())
    inputs = torch.ones(2, WIDTH, device=accelerator.device)
    with accelerator.accumulate(model, num_items=2):
        accelerator.backward(model(inputs).sum())
    with raised(ValueError, "num_items"), accelerator.accumulate(model):
        accelerator.backward(model(inputs).sum())


def short_windows_count_as_they_should():
    for exact in (False, True):
        short_window(exact)


def items_are_counted_over_all_ranks():
    for steps in (1, 2, 3):
        for through in ("accumulate", "backward"):
            counted_items(steps, through)


if __name__ == "__main__":
    run(short_windows_count_as_they_should, items_are_counted_over_all_ranks, missing_count)
