"""The checks of `accelerate test`: processes, collectives, data, training; and how they are run, with a line for each."""

import copy
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.comm.operations import broadcast, broadcast_object_list, gather, gather_object, reduce
from accelerate.config.handlers import GradientAccumulationPlugin
from accelerate.config.project import DataLoaderConfiguration
from accelerate.config.strategies import traits_of
from accelerate.extension import all_specs
from accelerate.extensions.testing.testing import are_the_same_tensors
from accelerate.runtime.random import set_seed
from accelerate.state import AcceleratorState, PartialState


class Skipped(Exception):
    """This setup cannot run a check; the message says why. All ranks raise it, or none."""


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


# Processes and their communication


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
    with state.split_between_processes(everything) as share:
        gathered = sorted(gather_object(list(share)))
    _require(gathered == everything, f"split_between_processes made {gathered} of {everything}.")


@_check("gather")
def check_gather(accelerator: Accelerator) -> None:
    """Gathering puts the tensors of all ranks in the order of the ranks, in every type and inside containers."""
    count, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.full((2, 3), rank % 2, device=device, dtype=dtype)
        expected = torch.tensor([r % 2 for r in range(count) for _ in range(2)], device=device).to(dtype)
        gathered = gather({"a": [tensor]})["a"][0]
        _require(
            torch.equal(gathered, expected[:, None].expand(-1, 3)), f"gather of {dtype} gave {gathered.tolist()}."
        )


@_check("reduce")
def check_reduce(accelerator: Accelerator) -> None:
    """Sums and means are those of arithmetic."""
    count, rank = accelerator.num_processes, accelerator.process_index
    tensor = torch.full((4,), float(rank + 1), device=accelerator.device)
    for how, expected in (("sum", count * (count + 1) / 2), ("mean", (count + 1) / 2)):
        total = reduce(tensor.clone(), how)
        _require(
            torch.allclose(total, torch.full_like(tensor, expected)), f"{how} is {total.tolist()}, not {expected}."
        )


@_check("broadcast")
def check_broadcast(accelerator: Accelerator) -> None:
    """Every rank receives the tensor and the objects of one rank, whichever it is."""
    count, rank = accelerator.num_processes, accelerator.process_index
    for source in {0, count - 1}:
        received = broadcast(torch.full((3,), float(rank), device=accelerator.device), from_process=source)
        _require(received.eq(source).all(), f"broadcast from {source} gave {received.tolist()}.")
        words = broadcast_object_list([f"of {rank}", {"rank": rank}], from_process=source)
        _require(words == [f"of {source}", {"rank": source}], f"broadcast_object_list from {source} gave {words}.")


# Data: every sample reaches exactly one process


class _Stream(IterableDataset):
    """The numbers below a limit, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(self.length)


def check_loader(dispatch: bool) -> Check:
    """Return the check of one way of loading: every sample arrives once, whether or not the ranks can share them evenly."""

    def check(accelerator: Accelerator) -> None:
        if dispatch and not any(spec.dispatch for spec in all_specs()):
            raise Skipped("no extension dispatches")
        loading = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        whole = 3 * BATCH * loading.num_processes
        for length in (whole, whole + BATCH + 1):
            data = _Stream(length) if dispatch else list(range(length))
            loader = loading.prepare(DataLoader(data, batch_size=BATCH, shuffle=not dispatch))
            parts = [loading.gather_for_metrics(batch) for batch in loader]
            samples, counts = torch.cat(parts).sort().values.tolist(), set(gather_object([len(parts)]))
            _require(
                samples == list(range(length)),
                f"Of {length} samples, {len(samples)} came, {len(set(samples))} of them different.",
            )
            _require(len(counts) == 1, f"The ranks had different numbers of batches: {sorted(counts)}.")
        loading.free_memory()

    return check


_check("loader: every sample once")(check_loader(dispatch=False))
_check("loader: dispatched")(check_loader(dispatch=True))


# Training: it equals one process with the full batch, in every precision, and resumes from a checkpoint

BATCH, WIDTH, ROUNDS = 4, 6, 6
EPOCHS, SAVED_AFTER = 2, ROUNDS + 2
# How far results may be from those of one process, which computes in float32 and adds up in another order.
CLOSE, CLOSE_IN_HALF = 1e-4, 0.05


class _Net(nn.Sequential):
    """Two layers, which tensor parallelism can cut."""

    _tp_plan: ClassVar = {"0": "colwise", "3": "rowwise"}

    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


class _Run:
    """A training on all ranks; `random` adds a shuffled loader, dropout and a schedule, which a checkpoint has to continue."""

    def __init__(self, num_steps: int = 1, random: bool = False, seed: int = 3, **settings: Any) -> None:
        # The check sets the accumulation, whatever the environment says.
        self.num_steps, accumulation = num_steps, GradientAccumulationPlugin(num_steps=num_steps)
        self.accelerator = Accelerator(gradient_accumulation_plugin=accumulation, **settings)
        set_seed(seed, device_specific=random)
        engine = self.accelerator.deepspeed_plugin
        self.engine = engine.deepspeed_config if engine is not None else {}
        if isinstance(steps := self.engine.get("gradient_accumulation_steps"), int):
            self.num_steps = steps  # whatever an Accelerator says
        if ROUNDS % self.num_steps:
            raise Skipped(f"{ROUNDS} batches are no multiple of DeepSpeed's {self.num_steps} accumulation steps")
        shared = {name: getattr(self.accelerator.parallelism_config, f"{name}_size", 1) for name in ("cp", "sp")}
        if by := [name for name, size in shared.items() if size > 1]:
            raise Skipped(f"{by[0]}_size={shared[by[0]]}, and these samples are no sequences")
        self.plain = _Net(0.5 * random)
        self.start = copy.deepcopy(self.plain)
        optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if random else 1.0)
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(ROUNDS * BATCH * self.accelerator.num_processes, WIDTH, generator=generator)
        self.data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        loader = DataLoader(self.data, batch_size=BATCH, shuffle=random)
        prepared = self.accelerator.prepare(self.plain, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def steps(self, epochs: int = 1) -> Iterator[float]:
        """Train from the loader's position, and yield the losses."""
        for _ in range(self.loader.iteration, epochs):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(x), y)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                yield loss.item()

    def alone(self) -> nn.Module:
        """Train a copy as one process would whose batch is as large as those of a step of all ranks together."""
        optimizer = torch.optim.SGD(self.start.parameters(), lr=0.1, momentum=0.5)
        size = self.loader.total_batch_size * self.num_steps
        limit = self.engine.get("gradient_clipping") or float("inf")
        for x, y in DataLoader(self.data, batch_size=size):
            nn.functional.mse_loss(self.start(x), y).backward()
            nn.utils.clip_grad_norm_(self.start.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
        return self.start

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the unsharded weights, in host memory."""
        buckets = self.accelerator.stream_weights(self.model)
        return {name: value.cpu() for bucket in buckets for name, value in bucket.items()}

    def require_alike(self) -> None:
        """Raise if weights that each rank has in full differ between the ranks."""
        whole = not traits_of(self.accelerator.distributed_type).sharded
        for name, parameter in self.plain.named_parameters() if whole else ():
            if isinstance(parameter, DTensor):
                continue
            _require(are_the_same_tensors(parameter.detach()), f"{name} differs between the processes.")

    def end(self) -> tuple[list[list[float]], list[float], list[float]]:
        """Return the weights, the rates, and random numbers drawn now."""
        weights = [value.flatten().tolist() for value in self.weights().values()]
        return weights, self.schedule.get_last_lr(), torch.rand(3).tolist()


def check_training(num_steps: int) -> Check:
    """Return the check that so many batches a step on all ranks train as one process does with all of them in one batch."""

    def check(accelerator: Accelerator) -> None:
        run = _Run(num_steps)
        list(run.steps())
        tolerance = CLOSE if accelerator.mixed_precision == "no" else CLOSE_IN_HALF
        for (name, have), want in zip(run.weights().items(), run.alone().parameters(), strict=True):
            distance = (have - want.detach()).abs().max().item()
            _require(
                distance <= tolerance,
                f"{name} is {distance:.2g} away from the result of one process; {tolerance:g} is allowed.",
            )
        run.require_alike()
        run.accelerator.free_memory()

    return check


_check("training")(check_training(num_steps=1))
_check("gradient accumulation")(check_training(num_steps=3))


def check_precision(name: str, dtype: torch.dtype) -> Check:
    """Return the check of "bf16" or "fp16": it computes in that type, keeps its weights in float32, and learns."""

    def check(accelerator: Accelerator) -> None:
        AcceleratorState._reset_state()
        try:
            try:
                run = _Run(mixed_precision=name)
            except ValueError as error:
                raise Skipped(str(error)) from None
            seen: set[torch.dtype] = set()
            run.plain[0].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
            losses = list(run.steps(epochs=4))
            _require(seen == {dtype}, f"The layers computed in {seen}.")
            kept = {parameter.dtype for parameter in run.plain.parameters()}
            # DeepSpeed has them in its optimizer.
            _require(bool(run.engine) or kept == {torch.float32}, f"The weights became {kept}.")
            ends = gather(torch.tensor([losses[:ROUNDS], losses[-ROUNDS:]], device=run.accelerator.device)[None])
            first, last = ends.sum(dim=(0, 2)).tolist()
            _require(last < first, f"The loss of an epoch went from {first:.3g} to {last:.3g}.")
            run.require_alike()
        finally:
            AcceleratorState._reset_state()
            Accelerator(mixed_precision=accelerator.mixed_precision)

    return check


_check("bf16")(check_precision("bf16", torch.bfloat16))
_check("fp16")(check_precision("fp16", torch.float16))


@_check("checkpoint and resume")
def check_resume(accelerator: Accelerator) -> None:
    """A run that is loaded from a checkpoint in the middle of an epoch resumes like the run that saved it, bit for bit."""
    home = broadcast_object_list(
        [tempfile.mkdtemp(prefix="accelerate_test_") if accelerator.is_main_process else None]
    )[0]
    folder = os.path.join(home, "state")
    try:
        first = _Run(random=True)
        going_on = first.steps(EPOCHS)
        list(islice(going_on, SAVED_AFTER))
        first.accelerator.save_state(folder)
        expected, end = list(going_on), first.end()
        second = _Run(random=True, seed=5)
        second.accelerator.load_state(folder)
        losses, new_end = list(second.steps(EPOCHS)), second.end()
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_local_main_process:
            shutil.rmtree(home, ignore_errors=True)
    _require(losses == expected, f"The losses after loading are {losses} instead of {expected}.")
    for what, old, new in zip(("weights", "rates", "random numbers"), end, new_end, strict=True):
        _require(new == old, f"The {what} after loading and training on differ.")
