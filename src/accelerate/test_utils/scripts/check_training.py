"""Checks of training: it ends where one process with the whole batch ends, in every precision, and goes on from a checkpoint."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.config.handlers import GradientAccumulationPlugin
from accelerate.state import AcceleratorState
from accelerate.test_utils.scripts.checking import Skipped
from accelerate.test_utils.testing import are_the_same_tensors
from accelerate.utils.operations import broadcast_object_list
from accelerate.utils.random import set_seed

BATCH, WIDTH, ROUNDS = 4, 6, 6
EPOCHS, SAVED_AFTER = 2, ROUNDS + 2
# How far results may be from those of one process, which computes in float32 and adds up in another order.
CLOSE, CLOSE_IN_HALF = 1e-4, 0.05


def _model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def _data(accelerator: Accelerator) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROUNDS * BATCH * accelerator.num_processes, WIDTH, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def _step_by_step() -> GradientAccumulationPlugin:
    """No accumulation, whatever the environment says."""
    return GradientAccumulationPlugin(num_steps=1)


def _train_alone(accelerator: Accelerator, rounds_in_a_step: int = 1, clip: float | None = None) -> nn.Module:
    """Train as one process would whose batch is as large as those of all ranks together."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = BATCH * accelerator.num_processes * rounds_in_a_step
    for x, y in DataLoader(_data(accelerator), batch_size=size):
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _train(accelerator: Accelerator, clip: float | None = None) -> nn.Module:
    """Train the same model on all ranks, with what the Accelerator says about accumulation."""
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(_data(accelerator), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    trained = accelerator.unwrap_model(model)
    accelerator.free_memory()
    return trained


def _compare(accelerator: Accelerator, found: nn.Module, expected: nn.Module) -> None:
    tolerance = CLOSE if accelerator.mixed_precision == "no" else CLOSE_IN_HALF
    for (name, have), want in zip(found.named_parameters(), expected.parameters(), strict=True):
        have = have.detach()
        distance = (have.cpu() - want.detach()).abs().max().item()
        assert distance <= tolerance, (
            f"{name} is {distance:.2g} away from what one process gets; {tolerance:g} is allowed."
        )
        assert are_the_same_tensors(have), f"{name} differs between the processes."


def check_training(accelerator: Accelerator) -> None:
    """Training on all processes ends where training on one process with the whole batch ends."""
    plain = Accelerator(gradient_accumulation_plugin=_step_by_step())
    _compare(plain, _train(plain), _train_alone(plain))


def check_accumulation(accelerator: Accelerator) -> None:
    """Gradients that are accumulated over three batches are those of one batch three times as large."""
    accumulating = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3))
    _compare(accumulating, _train(accumulating), _train_alone(accumulating, rounds_in_a_step=3))


def check_clipping(accelerator: Accelerator) -> None:
    """Gradients are clipped by their norm over the whole batch."""
    plain = Accelerator(gradient_accumulation_plugin=_step_by_step())
    _compare(plain, _train(plain, clip=0.05), _train_alone(plain, clip=0.05))


def check_precision(name: str) -> Callable[[Accelerator], None]:
    """Return the check of a mixed precision: it computes in that type, keeps its weights in float32, and learns.

    Args:
        name: "bf16" or "fp16".
    """

    def check(accelerator: Accelerator) -> None:
        AcceleratorState._reset_state()
        try:
            try:
                mixed = Accelerator(mixed_precision=name, gradient_accumulation_plugin=_step_by_step())
            except ValueError as error:
                raise Skipped(str(error)) from None
            _train_mixed(mixed, {"bf16": torch.bfloat16, "fp16": torch.float16}[name])
        finally:
            AcceleratorState._reset_state()
            Accelerator(mixed_precision=accelerator.mixed_precision)

    return check


def _train_mixed(mixed: Accelerator, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    plain = _model()
    plain[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model, optimizer, loader = mixed.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(_data(mixed), batch_size=BATCH)
    )
    losses = []
    for _ in range(4):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            losses.append(mixed.reduce(loss.detach().float(), "mean").item())
            mixed.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert set(seen) == {dtype}, f"The layers computed in {set(seen)}."
    kept = {parameter.dtype for parameter in plain.parameters()}
    assert kept == {torch.float32}, f"The weights became {kept}."
    first, last = sum(losses[:ROUNDS]), sum(losses[-ROUNDS:])
    assert last < first, f"The loss of an epoch went from {first:.3g} to {last:.3g}."
    for name, parameter in plain.named_parameters():
        assert are_the_same_tensors(parameter.detach()), f"{name} differs between the processes."


class _Run:
    """A training with everything that draws random numbers: a shuffled loader and dropout."""

    def __init__(self, seed: int) -> None:
        set_seed(seed, device_specific=True)
        self.accelerator = Accelerator(gradient_accumulation_plugin=_step_by_step())
        model = _model(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(_data(self.accelerator), batch_size=BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def steps(self) -> Iterator[float]:
        """Train from where the loader stands, and yield the losses."""
        for _ in range(self.loader.iteration, EPOCHS):
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                yield loss.item()

    def end(self) -> tuple[list[torch.Tensor], list[float], list[float]]:
        """Return the weights, the rates, and random numbers drawn now."""
        weights = [parameter.detach().cpu().clone() for parameter in self.model.parameters()]
        return weights, self.schedule.get_last_lr(), torch.rand(3).tolist()


def check_resume(accelerator: Accelerator) -> None:
    """A run that is loaded from a checkpoint in the middle of an epoch goes on as the run that saved it, bit for bit."""
    home = broadcast_object_list(
        [tempfile.mkdtemp(prefix="accelerate_test_") if accelerator.is_main_process else None]
    )[0]
    folder = os.path.join(home, "state")
    try:
        first = _Run(seed=1)
        going_on = first.steps()
        list(islice(going_on, SAVED_AFTER))
        first.accelerator.save_state(folder)
        expected, (weights, rates, drawn) = list(going_on), first.end()
        second = _Run(seed=2)
        second.accelerator.load_state(folder)
        found, (new_weights, new_rates, new_drawn) = list(second.steps()), second.end()
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_local_main_process:
            shutil.rmtree(home, ignore_errors=True)
    assert found == expected, f"The losses after loading are {found} instead of {expected}."
    assert all(map(torch.equal, weights, new_weights)), "The weights after loading and training on differ."
    assert (new_rates, new_drawn) == (rates, drawn), "The schedule or the random numbers differ after loading."
