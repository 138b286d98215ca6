"""Training loops: accumulation, schedules and local SGD."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from accelerate.utils import DataLoaderConfiguration
from interop.differential.core import BOTH, RANK, attempt, probe


def parameter(value=1.0):
    made = nn.Parameter(torch.full((2,), value))
    made.grad = torch.tensor([0.5, -0.25])
    return made


def trained(accelerator, kind, schedule):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    inner = kind(model.parameters(), lr=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, inner, schedule(inner))
    for step in range(4):
        with accelerator.accumulate(model):
            loss = model(torch.full((2, 1), step + 1.0 + RANK)).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        weight = next(iter(model.parameters()))
        yield (
            f"step {step}",
            (
                accelerator.sync_gradients, optimizer.step_was_skipped, weight, weight.grad, scheduler.get_last_lr(),
                loss.detach(),
            ),
        )  # fmt: skip


SCHEDULES = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=6),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=4),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}
SCHEDULE_AXIS = {k: (lambda v=v: v) for k, v in SCHEDULES.items()}


@probe(
    "scheduler:AcceleratedScheduler", "optimizer:AcceleratedOptimizer", processes=BOTH, schedule=SCHEDULE_AXIS,
    accumulation=[1, 2], step_with=[True, False], split=[False, True],
)  # fmt: skip
def scheduled(schedule, accumulation, step_with, split):
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if split else "no", gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=step_with, dataloader_config=DataLoaderConfiguration(split_batches=split),
    )  # fmt: skip
    yield from trained(accelerator, torch.optim.AdamW if step_with else torch.optim.SGD, schedule)


@probe(
    "scheduler:AcceleratedScheduler", schedule=SCHEDULE_AXIS, several=[False, True],
    options=[(), (True,), (False,), (True, True), (True, False)],
)  # fmt: skip
def scheduler(schedule, several, options):
    Accelerator(cpu=True)
    inner = torch.optim.SGD([parameter()], lr=0.5)
    wrapped = AcceleratedOptimizer(inner)
    made = AcceleratedScheduler(
        schedule(inner),
        [wrapped, AcceleratedOptimizer(torch.optim.SGD([parameter()], lr=1.0))] if several else wrapped, *options,
    )  # fmt: skip
    yield (
        "attributes",
        (made.step_with_optimizer, made.split_batches, len(made.optimizers), type(made.scheduler).__name__),
    )
    for step in range(3):
        GradientState()._set_sync_gradients(step != 1)
        wrapped.step()
        yield f"returned {step}", attempt(made.step)
        yield (
            f"rates {step}",
            (made.get_last_lr(), attempt(made.get_lr), made.scheduler.last_epoch, made.scheduler._step_count),
        )
    wrapped._is_overflow = True
    GradientState()._set_sync_gradients(True)
    made.step()
    yield "after a skipped step", made.get_last_lr()
    saved = {
        k: v
        for k, v in made.state_dict().items()
        if k not in ("lr_lambdas", "_schedulers", "anneal_func", "_anneal_func_type")
    }
    yield "state", {k: v for k, v in saved.items() if isinstance(v, (int, float, list, str, bool))}
    yield "load", attempt(lambda: made.load_state_dict(made.state_dict()))
    yield "print", attempt(lambda: made.print_lr())
    yield "unknown", attempt(lambda: made.no_such_thing)
    yield "is one", isinstance(made, torch.optim.lr_scheduler.LRScheduler)
    yield (
        "absent",
        [n for n in ("last_epoch", "base_lrs", "optimizer", "_step_count", "get_lr", "print_lr") if hasattr(made, n)],
    )


@probe("local_sgd:LocalSGD", processes=BOTH, steps=[1, 2, 3, 8], enabled=[True, False])
def local_sgd(steps, enabled):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=steps, enabled=enabled) as local:
        yield "attributes", (local.enabled, local.num_steps)
        for step in range(5):
            accelerator.backward(model(torch.full((1, 1), RANK + 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
            yield f"returned {step}", local.step()
            yield f"weight {step}", accelerator.unwrap_model(model).weight
    yield "after", (accelerator.unwrap_model(model).weight, local.num_steps)


@probe("local_sgd:LocalSGD", steps=[0, -1, None, 1.5, "2", True], enabled=[True, False, None])
def local_sgd_of(steps, enabled):
    accelerator = Accelerator(cpu=True)
    with LocalSGD(accelerator, nn.Linear(1, 1), steps, enabled) as local:
        yield "attributes", (bool(local.enabled), local.num_steps)
        yield "step", attempt(local.step)
