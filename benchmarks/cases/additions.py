"""What is asked for beside a step costs: averages, modules that ranks may leave out, a gather, precision by name, Muon, pipelines, replays; beside plain torch."""

import json
import os
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

STEPS, ROUNDS, WIDTH = 30, 12, 512
warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.optional = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))

    def forward(self, inputs, more=None):
        return self.layers(inputs if more is None else self.optional(more))


def milliseconds(step):
    for number in range(-5, STEPS):
        if not number:
            begun = time.perf_counter()
        step()
    return (time.perf_counter() - begun) / STEPS * 1000


def stepping(model, optimizer, backward, loss_of=lambda output: output.square().mean(), after=lambda: None, **more):
    inputs = torch.randn(256, WIDTH)
    more = dict.fromkeys(more, inputs)

    def step():
        backward(loss_of(model(inputs, **more)))
        optimizer.step()
        optimizer.zero_grad()
        after()

    return milliseconds(step)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def average_of_torch():
    model = nn.parallel.DistributedDataParallel(Model().layers)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    return stepping(model, adamw(model), torch.Tensor.backward, after=lambda: average.update_parameters(model.module))


def average():
    accelerator, model = Accelerator(cpu=True), Model().layers
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.ema(model, 0.999)
    taken = stepping(model, optimizer, accelerator.backward)
    accelerator.free_memory()
    return taken


def sharded_of_torch():
    model = Model()
    for part in (model.optional, *model.layers, model):
        if part is model or isinstance(part, nn.Linear):
            fully_shard(part)
    return stepping(model, adamw(model), torch.Tensor.backward, more=True)


def conditional():
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=WIDTH)
    accelerator, model = Accelerator(cpu=True, fsdp_plugin=plugin), Model()
    accelerator.conditional(model.optional, given="more", inputs=torch.zeros(1, WIDTH))
    model, optimizer = accelerator.prepare(model, adamw(model))
    taken = stepping(model, optimizer, accelerator.backward, more=True)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return taken


def gathered(gather):
    model = Model().layers
    return stepping(
        model, adamw(model), torch.Tensor.backward, lambda output: (output @ gather(output).T).square().mean()
    )


def gather_of_torch():
    return gathered(lambda output: torch.cat(differentiable.all_gather(output)))


def gather():
    accelerator = Accelerator(cpu=True)
    return gathered(lambda output: accelerator.gather(output, differentiable=True))


def normed():
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()))
    )


def precision_of_torch():
    model, half, full = normed(), torch.bfloat16, torch.float32
    for part in [*model, model]:
        if part is model or isinstance(part, (nn.Linear, nn.LayerNorm)):
            kinds = (full, full, half) if isinstance(part, nn.LayerNorm) else (half, full, None)
            fully_shard(part, mp_policy=MixedPrecisionPolicy(*kinds))
    return stepping(model, adamw(model), torch.Tensor.backward)


def under_fsdp2(model, optimizer_of, **settings):
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", **settings)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    taken = stepping(model, optimizer, accelerator.backward)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return taken


def precision_by_name():
    return under_fsdp2(
        normed(),
        adamw,
        min_num_params=WIDTH * WIDTH,
        mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "fp32"},
        module_precision={str(place): "fp32" for place in (1, 4, 7)},
    )


def squares(output, target):
    return (output - target).square().mean()


def pipeline_of_torch():
    rank, half = dist.get_rank(), len(Model().layers) // 2
    part = Model().layers[rank * half : (rank + 1) * half]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule, optimizer = Schedule1F1B(stage, 4, loss_fn=squares), adamw(part)
    inputs = torch.randn(256, WIDTH)

    def step():
        schedule.step(*(() if rank else (inputs,)), **({"target": inputs} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()

    return milliseconds(step)


def pipeline():
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2))
    part = accelerator.prepare_pipeline(
        Model().layers, microbatches=4, split=["3"], example_args=(torch.zeros(64, WIDTH),), loss=squares
    )
    optimizer, inputs = accelerator.prepare(adamw(part)), torch.randn(256, WIDTH)

    def step():
        part(inputs, target=inputs)
        optimizer.step()
        optimizer.zero_grad()

    taken = milliseconds(step)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return taken


def replicas_of_torch():
    model = nn.parallel.DistributedDataParallel(Model().layers)
    return stepping(model, adamw(model), torch.Tensor.backward)


def replayed():
    os.environ["ACCELERATE_REPLAY_EVERY"] = "10"
    accelerator, model = Accelerator(cpu=True), Model().layers
    del os.environ["ACCELERATE_REPLAY_EVERY"]
    model, optimizer = accelerator.prepare(model, adamw(model))
    taken = stepping(model, optimizer, accelerator.backward)
    accelerator.free_memory()
    return taken


def orthogonal(model):
    return torch.optim.Muon([weight for weight in model.parameters() if weight.ndim == 2], lr=1e-3)


def matrices():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())))


def muon_of_torch():
    model = matrices()
    for part in [*model, model]:
        if part is model or isinstance(part, nn.Linear):
            fully_shard(part)
    return stepping(model, orthogonal(model), torch.Tensor.backward)


def muon():
    return under_fsdp2(matrices(), orthogonal, min_num_params=WIDTH)


KINDS = {
    "a moving average of the weights under DDP": (average, average_of_torch),
    "a module that ranks may leave out, FSDP2": (conditional, sharded_of_torch),
    "gradients through a gather": (gather, gather_of_torch),
    "norms in float32 by name, FSDP2 in bf16": (precision_by_name, precision_of_torch),
    "Muon on shards of FSDP2": (muon, muon_of_torch),
    "a pipeline of two stages, 1F1B": (pipeline, pipeline_of_torch),
    "every tenth step computed twice, DDP": (replayed, replicas_of_torch),
}


def main():
    Accelerator(cpu=True)  # the process group
    times = {}
    for number in range(ROUNDS):
        for name, pair in KINDS.items():
            for kind in pair if number % 2 else reversed(pair):
                times.setdefault((name, kind), []).append(kind())
    figures = {}
    for name, (ours, theirs) in KINDS.items():
        mine, plain = (statistics.median(times[name, kind]) for kind in (ours, theirs))
        figures |= {f"step with {name} (ms)": mine, f"the same / plain torch ({name})": mine / plain}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
