"""The training loop of a user under a strategy, and its comparison with the loop of one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from distributed.conformance import model as zoo
from distributed.conformance.model import MAX_NORM, MAX_VALUE, Trace
from distributed.conformance.strategies import Strategy
from distributed.scripts.harness import fresh_accelerator

# A rank that fails leaves the others waiting: they give up after this time, so that the report gets written.
PATIENCE = timedelta(seconds=45)


def accelerator_for(
    strategy: Strategy, sync_each_batch: bool = False, window: int = zoo.WINDOW, **options: Any
) -> Accelerator:
    """Build an Accelerator of a strategy, which shares nothing but the process group with those before it."""
    plugin = GradientAccumulationPlugin(num_steps=window, sync_each_batch=sync_each_batch)
    return fresh_accelerator(
        gradient_accumulation_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        **strategy.options(),
        **options,
    )


@dataclass
class Run:
    """One training under a strategy; model and optimizer are there as the user built them, too."""

    strategy: Strategy
    steps: int
    seed: int = 7  # of the weights
    groups: bool | None = None  # the optimizer has several groups of parameters; what the strategy can, by default
    samples: int = zoo.SAMPLES  # in a micro-batch, over all ranks
    options: dict[str, Any] = field(default_factory=dict)
    accelerator: Accelerator | None = None
    plain: nn.Module = field(init=False)
    bare: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.accelerator = self.accelerator or accelerator_for(self.strategy, **self.options)
        replicas = self.accelerator.num_processes // self.strategy.same_batch
        self.plain = zoo.build(self.seed)
        if self.strategy.arrives:
            self.strategy.arrives(self.plain)
        self.bare = zoo.optimizer_of(self.plain, self.strategy.groups if self.groups is None else self.groups)
        # The schedule advances once for each replica: it is written in batches of one process.
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.bare, lambda count: zoo.rate(count / replicas))
        loader = DataLoader(TensorDataset(*zoo.data(self.steps)), batch_size=self.samples // replicas)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.plain, self.bare, loader, scheduler
        )

    def loss(self, tokens: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Run forward and backward on one micro-batch, and return its loss over all ranks."""
        batch = [tensor.clone() for tensor in (tokens, places, labels)]
        split = self.strategy.splits_sequence
        with self.accelerator.maybe_context_parallel(
            buffers=batch if split else None,
            buffer_seq_dims=[1] * len(batch) if split else None,
            no_restore_buffers=set(batch) if split else None,
        ):
            loss = zoo.loss_of(self.model(batch[0], batch[1]), batch[2])
            self.accelerator.backward(loss)
        return self.accelerator.reduce(loss.detach(), "mean")

    def train(self, clip: str = "norm", stop: int | None = None, at: Callable[[int], None] | None = None) -> Trace:
        """Train for an epoch, or until a number of steps, clipped by "norm" or "value"; `at` is called after each step."""
        trace = Trace([], [], [], {})
        for done in self.steps_of(trace, clip):
            if at is not None:
                at(done)
            if done == stop:
                break
        trace.weights.update(self.weights())
        return trace

    def steps_of(self, trace: Trace, clip: str = "norm") -> Iterator[int]:
        """Train for an epoch, and yield after each step how many there were; a trace gets what they did."""
        accelerator, open_ = self.accelerator, []
        for batch in self.loader:
            with accelerator.accumulate(self.model):
                open_.append(self.loss(*batch).item())
                if accelerator.sync_gradients:
                    if clip == "norm":
                        trace.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
                    else:
                        accelerator.clip_grad_value_(self.model.parameters(), MAX_VALUE)
                    trace.rates.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                trace.losses.append(sum(open_) / len(open_))
                open_.clear()
                yield len(trace.losses)

    def step_on(self, parts: list[torch.Tensor]) -> None:
        """Do one optimizer step on a whole batch, of which this rank takes its part manually, without loader or schedule."""
        accelerator = self.accelerator
        shards, shard = accelerator.num_processes // self.strategy.same_batch, self.shard
        for micro in zip(*(part.split(zoo.SAMPLES) for part in parts), strict=True):
            with accelerator.accumulate(self.model):
                self.loss(*(tensor.chunk(shards)[shard] for tensor in micro))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def shard(self) -> int:
        """Which part of a batch this rank works on; ranks that share one are neighbours."""
        return self.accelerator.process_index // self.strategy.same_batch

    def apart(self, trace: Trace, expected: Trace, tolerance: float | None = None) -> list[str]:
        """Return what of a training differs from the expected one: which step or tensor, and by how much."""
        tolerance, found = self.strategy.tolerance if tolerance is None else tolerance, []
        for what in ("losses", "norms", "rates"):
            have, wanted = getattr(trace, what), getattr(expected, what)
            gaps = [abs(one - other) for one, other in zip(have, wanted, strict=False)]
            wrong = [step for step, gap in enumerate(gaps) if not gap <= tolerance]
            if wrong or len(have) != len(wanted):
                found.append(f"{what}, from step {wrong[:1]} on: {have} instead of {wanted}")
        main = self.accelerator.is_main_process
        return found + (tensors_apart(trace.weights, expected.weights, tolerance) if main else [])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the full weights; rank 0 has them with every strategy, the others with some."""
        state = self.accelerator.get_state_dict(self.model)
        return {name: value.detach().cpu().clone() for name, value in state.items()} if state else {}


def tensors_apart(have: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> list[str]:
    found = []
    if have.keys() != wanted.keys():
        found.append(f"keys: {sorted(have.keys() ^ wanted.keys())} are on one side only")
    for name in have.keys() & wanted.keys():
        if have[name].shape != wanted[name].shape:
            found.append(f"{name}: shape {tuple(have[name].shape)} instead of {tuple(wanted[name].shape)}")
            continue
        gap = (have[name].cpu().double() - wanted[name].cpu().double()).abs().max().item()
        if not gap <= tolerance:
            found.append(f"{name}: differs by at most {gap:.2e} (allowed {tolerance:.0e})")
    return sorted(found)
