"""A moving average of weights under each strategy: torch's own average of one process, evaluated, saved, and gone on with elsewhere."""

import functools
import os

import torch
from expect import assert_all_close, full, raised
from harness import fresh_accelerator, learn, shared_folder, world
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accelerate import ParallelismConfig
from accelerate.local_sgd import LocalSGD
from accelerate.utils import FullyShardedDataParallelPlugin

DECAY, STEPS = 0.7, 4


class Model(nn.Module):
    _tp_plan = {"first": "colwise", "last": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs):
        return self.last(torch.tanh(self.first(inputs))) * self.frozen


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def begun(kind=torch.optim.AdamW, **settings):
    accelerator, model = fresh_accelerator(**settings), Model()
    optimizer = kind(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, accelerator.ema(model, DECAY)


def train(accelerator, model, optimizer, steps) -> None:
    for step in steps:
        output(model, batch(step))  # without a backward pass: FSDP2 keeps what it gathered
        learn(accelerator, model(batch(step)).square().mean(), optimizer)


@functools.cache
def reference(steps: int, kind=torch.optim.AdamW) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return weights and averages of one process, by torch."""
    model = Model()
    optimizer = kind(model.parameters(), lr=1e-2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [each.detach() for each in model.parameters()], [each.detach() for each in average.module.parameters()]


def weights(model) -> list[torch.Tensor]:
    return [full(each.detach()).clone() for each in model.parameters()]


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        return full(model(inputs))


def require(model, ema, steps: int, kind) -> None:
    last, averages = reference(steps, kind)
    alone = Model()
    for mine, value in zip(alone.parameters(), averages, strict=True):
        mine.data.copy_(value)
    inputs = batch(100)
    with ema.applied():
        assert_all_close([output(model, inputs)], [alone(inputs)])
        assert_all_close(weights(model), averages)
    assert_all_close(weights(model), last)


def fsdp2() -> dict:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}


def strategies() -> dict:
    several = {"ddp": dict, "fsdp2": fsdp2}
    if world() == 2:
        several["tp"] = lambda: {"parallelism_config": ParallelismConfig(tp_size=2)}
    if world() == 4:
        sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
        several["hsdp"] = lambda: {**fsdp2(), "parallelism_config": ParallelismConfig(**sizes)}
    return several if world() > 1 else {"alone": dict, "fsdp2": fsdp2}


def check_ranks_that_train_on_their_own_are_refused() -> None:
    accelerator, model, optimizer, _ = begun()
    if world() == 1:
        return
    for alone in (LocalSGD(accelerator, model, local_sgd_steps=2), accelerator.join_uneven_inputs([model])):
        with raised(RuntimeError, "inside LocalSGD, no_sync or join_uneven_inputs"), alone:
            learn(accelerator, model(batch(0)).square().mean(), optimizer)


def check_equal_to_torchs_average_and_in_checkpoints() -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD):  # plain SGD has no state of its own
        with shared_folder() as home:
            for name, settings in strategies().items():
                run = begun(kind, **settings())
                train(*run[:3], range(STEPS))
                require(run[1], run[3], STEPS, kind)
                run[0].save_state(os.path.join(home, name))
            # Each continues from what each has saved.
            for settings in strategies().values():
                for source in strategies():
                    run = begun(kind, **settings())
                    run[0].load_state(os.path.join(home, source))
                    require(run[1], run[3], STEPS, kind)
                    train(*run[:3], range(STEPS, STEPS + 2))
                    require(run[1], run[3], STEPS + 2, kind)


def check_refusals() -> None:
    accelerator, model, optimizer, ema = begun(**fsdp2())
    train(accelerator, model, optimizer, range(1))
    with shared_folder() as home, ema.applied():
        with raised(ValueError, "save_state() was called inside ema.applied()"):
            accelerator.save_state(home)
        with raised(RuntimeError, "optimizer.step() was called inside ema.applied()"):
            train(accelerator, model, optimizer, range(1))
    with shared_folder() as home:
        accelerator.save_state(home)
        with ema.applied(), raised(ValueError, "load_state() was called inside ema.applied()"):
            accelerator.load_state(home)
    with raised(ValueError, "decay is 1"):
        accelerator.ema(model, decay=1)
    with raised(ValueError, "without parameters in a prepared optimizer"):
        accelerator.ema(nn.Linear(1, 1))
    accelerator = fresh_accelerator()
    half = nn.Linear(2, 2, dtype=torch.bfloat16)
    half, _ = accelerator.prepare(half, torch.optim.SGD(half.parameters()))
    with raised(ValueError, "weights in torch.bfloat16"):
        accelerator.ema(half)
    accelerator = fresh_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with raised(ValueError, "Use FSDP with fsdp_version=2"):
        accelerator.ema(model)
