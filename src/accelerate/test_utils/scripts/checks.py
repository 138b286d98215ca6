"""The checks of `accelerate test`: processes, collectives, data, training; and how they are run, with a line for each."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.config.handlers import GradientAccumulationPlugin
from accelerate.config.project import DataLoaderConfiguration
from accelerate.state import AcceleratorState, PartialState
from accelerate.test_utils.testing import are_the_same_tensors
from accelerate.utils.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.utils.random import set_seed, synchronize_rng_states


class Skipped(Exception):
    """This setup cannot do what a check is about; the message says why. All ranks raise it, or none."""


Check = Callable[[Accelerator], None]
# Name to what checks it: every rank calls it with the Accelerator of the configured setup, and it raises where something is wrong.
CHECKS: dict[str, Check] = {}


def _check(name: str) -> Callable[[Check], Check]:
    """Register a check under a word or two; they run in the order of definition."""
    return lambda function: CHECKS.setdefault(name, function)


def _require(holds: bool, otherwise: str) -> None:
    """Raise where something does not hold; an `assert` would do nothing under ``python -O``."""
    if not holds:
        raise AssertionError(otherwise)


def run_checks(checks: Mapping[str, Check], accelerator: Accelerator) -> None:
    """Run the checks one after the other; the main rank prints a line for each. Every rank calls it with the same checks.

    A rank that fails raises a RuntimeError and ends, and its launcher ends the ranks that wait for it in a collective.
    """
    width = len(str(len(checks)))
    for number, (name, check) in enumerate(checks.items(), 1):
        accelerator.print(f"[{number:{width}}/{len(checks)}] {name} ...", end=" ", flush=True)
        start, outcome = time.perf_counter(), ""
        try:
            check(accelerator)
        except Skipped as reason:
            outcome = f"skipped: {reason}"
        except Exception as error:  # whatever a broken setup raises is the finding
            rank, count = accelerator.process_index, accelerator.num_processes
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise RuntimeError(f"The check {name!r} failed on rank {rank} of {count}: {line}") from error
        accelerator.wait_for_everyone()
        accelerator.print(outcome or f"ok {time.perf_counter() - start:.2f} s", flush=True)


# Processes, and what they say to each other


@_check("processes")
def check_processes(accelerator: Accelerator) -> None:
    """All processes agree on how many they are, each has its own number, and a split loses nothing."""
    state = PartialState()
    counts = gather_object([state.num_processes])
    ranks = gather_object([state.process_index])
    _require(set(counts) == {len(ranks)}, f"The processes count {counts} processes, and {len(ranks)} answered.")
    _require(sorted(ranks) == list(range(state.num_processes)), f"The ranks are {ranks}.")
    _require((state.process_index == 0) == state.is_main_process, "The main process is not rank 0.")
    everything = list(range(10 * state.num_processes + 1))
    with state.split_between_processes(everything) as mine:
        found = sorted(gather_object(list(mine)))
    _require(found == everything, f"split_between_processes made {found} of {everything}.")


@_check("gather")
def check_gather(accelerator: Accelerator) -> None:
    """Gathering puts the tensors of all ranks in the order of the ranks, in every type and inside containers."""
    count, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        mine = torch.full((2, 3), rank % 2, device=device, dtype=dtype)
        expected = torch.tensor([r % 2 for r in range(count) for _ in range(2)], device=device).to(dtype)
        found = gather({"a": [mine]})["a"][0]
        _require(torch.equal(found, expected[:, None].expand(-1, 3)), f"gather of {dtype} gave {found.tolist()}.")


@_check("reduce")
def check_reduce(accelerator: Accelerator) -> None:
    """Sums and means are those of arithmetic."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((4,), float(rank + 1), device=accelerator.device)
    for how, expected in (("sum", count * (count + 1) / 2), ("mean", (count + 1) / 2)):
        found = reduce(mine.clone(), how)
        _require(torch.allclose(found, torch.full_like(mine, expected)), f"{how} is {found.tolist()}, not {expected}.")


@_check("broadcast")
def check_broadcast(accelerator: Accelerator) -> None:
    """Every rank receives the tensor and the objects of one rank, whichever it is."""
    count, rank = accelerator.num_processes, accelerator.process_index
    for source in {0, count - 1}:
        found = broadcast(torch.full((3,), float(rank), device=accelerator.device), from_process=source)
        _require(found.eq(source).all(), f"broadcast from {source} gave {found.tolist()}.")
        words = broadcast_object_list([f"of {rank}", {"rank": rank}], from_process=source)
        _require(words == [f"of {source}", {"rank": source}], f"broadcast_object_list from {source} gave {words}.")


@_check("pad")
def check_pad(accelerator: Accelerator) -> None:
    """Tensors of different length are padded to the longest, at the end that was asked for, and can be gathered then."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((rank + 1,), float(rank + 1), device=accelerator.device)
    for first in (False, True):
        padded = pad_across_processes(mine, pad_index=-1, pad_first=first)
        _require(padded.shape == (count,), f"Padded to {tuple(padded.shape)}, the longest has {count}.")
        own = padded[count - rank - 1 :] if first else padded[: rank + 1]
        _require(torch.equal(own, mine), f"The values moved: {padded.tolist()} ({first=}).")
        kept = gather(padded)
        _require(kept.ne(-1).sum() == count * (count + 1) // 2, f"After padding, gather gave {kept.tolist()}.")


@_check("random numbers")
def check_random_numbers(accelerator: Accelerator) -> None:
    """Random generators agree after they were synchronised."""
    set_seed(1 + accelerator.process_index)
    generator = torch.Generator().manual_seed(100 + accelerator.process_index)
    synchronize_rng_states(["torch", "generator"], generator=generator)
    for source in (None, generator):
        drawn = torch.rand(4, generator=source).to(accelerator.device)
        _require(are_the_same_tensors(drawn), f"This rank drew {drawn.tolist()}, and another one other numbers.")


# Data: every sample reaches exactly one process, in every way of loading


class _Stream(IterableDataset):
    """The numbers below a limit, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.length)


def _lengths(accelerator: Accelerator) -> tuple[int, int]:
    """A length that the ranks can share evenly, and one that they cannot."""
    whole = 3 * BATCH * accelerator.num_processes
    return whole, whole + BATCH + 1


def _compare_samples(found: torch.Tensor, length: int, how: str) -> None:
    expected = torch.arange(length)
    _require(
        torch.equal(found.cpu().sort().values, expected),
        f"Of {length} samples, {found.numel()} arrived, {found.unique().numel()} of them different ({how}).",
    )


@_check("loader: every sample once")
def check_split(accelerator: Accelerator) -> None:
    """Every sample arrives once, shuffled or not, whether or not the ranks can share evenly; all ranks have as many batches."""
    for length in _lengths(accelerator):
        for shuffle in (False, True):
            data = TensorDataset(torch.arange(length))
            loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=shuffle))
            parts = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
            _compare_samples(torch.cat(parts), length, f"{shuffle=}")
            counts = set(gather_object([len(parts)]))
            _require(
                counts == {len(loader)},
                f"The ranks had {sorted(counts)} batches; the loader's length is {len(loader)}.",
            )
    accelerator.free_memory()


@_check("loader: even_batches=False")
def check_uneven(accelerator: Accelerator) -> None:
    """With even_batches=False no sample is seen twice, so that ranks may have different numbers of batches."""
    uneven = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    for length in _lengths(accelerator):
        loader = uneven.prepare(DataLoader(TensorDataset(torch.arange(length)), batch_size=BATCH))
        mine = torch.cat([*(batch[0] for batch in loader), torch.empty(0, dtype=torch.int64, device=uneven.device)])
        _compare_samples(torch.tensor(gather_object(mine.tolist())), length, "even_batches=False")


@_check("loader: dispatched")
def check_dispatch(accelerator: Accelerator) -> None:
    """A stream that only the main rank reads is dealt out: every sample arrives once."""
    dispatching = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    for length in _lengths(accelerator):
        loader = dispatching.prepare(DataLoader(_Stream(length), batch_size=BATCH))
        parts = [dispatching.gather_for_metrics(batch) for batch in loader]
        _compare_samples(torch.cat(parts), length, "dispatch_batches=True")


# Training: it ends where one process with the whole batch ends, in every precision, and goes on from a checkpoint

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


def _train_alone(accelerator: Accelerator, rounds_in_a_step: int) -> nn.Module:
    """Train as one process would whose batch is as large as those of all ranks together."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = BATCH * accelerator.num_processes * rounds_in_a_step
    for x, y in DataLoader(_data(accelerator), batch_size=size):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _train(accelerator: Accelerator, plain: nn.Module, epochs: int = 1) -> list[float]:
    """Train a model on all ranks, with what the Accelerator says about accumulation; return the losses."""
    losses = []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = DataLoader(_data(accelerator), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    for x, y in (batch for _ in range(epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return losses


def _compare(accelerator: Accelerator, rounds_in_a_step: int = 1) -> None:
    found, expected = _model(), _train_alone(accelerator, rounds_in_a_step)
    _train(accelerator, found)
    tolerance = CLOSE if accelerator.mixed_precision == "no" else CLOSE_IN_HALF
    for (name, have), want in zip(found.named_parameters(), expected.parameters(), strict=True):
        have = have.detach()
        distance = (have.cpu() - want.detach()).abs().max().item()
        _require(
            distance <= tolerance,
            f"{name} is {distance:.2g} away from what one process gets; {tolerance:g} is allowed.",
        )
        _require(are_the_same_tensors(have), f"{name} differs between the processes.")


@_check("training")
def check_training(accelerator: Accelerator) -> None:
    """Training on all processes ends where training on one process with the whole batch ends."""
    _compare(Accelerator(gradient_accumulation_plugin=_step_by_step()))


@_check("gradient accumulation")
def check_accumulation(accelerator: Accelerator) -> None:
    """Gradients that are accumulated over three batches are those of one batch three times as large."""
    _compare(Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)), rounds_in_a_step=3)


def check_precision(name: str) -> Check:
    """Return the check of "bf16" or "fp16": it computes in that type, keeps its weights in float32, and learns."""

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


for _name in ("bf16", "fp16"):
    _check(_name)(check_precision(_name))


def _train_mixed(mixed: Accelerator, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    plain = _model()
    plain[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = _train(mixed, plain, epochs=4)
    _require(set(seen) == {dtype}, f"The layers computed in {set(seen)}.")
    kept = {parameter.dtype for parameter in plain.parameters()}
    _require(kept == {torch.float32}, f"The weights became {kept}.")
    first, last = sum(losses[:ROUNDS]), sum(losses[-ROUNDS:])
    _require(last < first, f"The loss of an epoch went from {first:.3g} to {last:.3g}.")
    for name, parameter in plain.named_parameters():
        _require(are_the_same_tensors(parameter.detach()), f"{name} differs between the processes.")


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


@_check("checkpoint and resume")
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
    _require(found == expected, f"The losses after loading are {found} instead of {expected}.")
    _require(all(map(torch.equal, weights, new_weights)), "The weights after loading and training on differ.")
    _require((new_rates, new_drawn) == (rates, drawn), "The schedule or the random numbers differ after loading.")
