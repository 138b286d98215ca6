"""What is requested next to a step costs: averages, modules that ranks may omit, a gather, precision by name, Muon, pipelines, packed rows,
weights and adapters that are made whole; next to plain torch. additions.py [ROUNDS [WORD ...]]: those that have one of the words.
"""

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import PackingCollator, TokenBudgetSampler
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, aggregate_loss, shift_labels

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


def milliseconds(step, steps=STEPS):
    for number in range(-5, steps):
        if not number:
            begun = time.perf_counter()
        step()
    return (time.perf_counter() - begun) / steps * 1000


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


# -- packed rows --

ROW, ROWS = 1024, 4


def documents():
    """Return the documents of each row, of 12 to 740 tokens, half of them below 100."""
    lengths = torch.randn(ROWS * 12, generator=torch.Generator().manual_seed(0)).mul(0.9).add(4.6).exp()
    lengths = lengths.int().clamp(12, 740).tolist()
    sampler = TokenBudgetSampler(lengths, ROW, packed=True)
    return [[{"input_ids": [1] * lengths[number]} for number in row] for row in sampler][:ROWS]


def packed():
    return [PackingCollator(ROW)(row) for row in documents()]


def padded():
    """Return as many batches of the same documents as they come, each padded to the longest, in lengths that ranks can divide."""
    every, batches = [one for row in documents() for one in row], []
    for number in range(ROWS):
        mine = every[number::ROWS]
        rows = [PackingCollator(-(-max(len(one["input_ids"]) for one in mine) // 4) * 4)([one]) for one in mine]
        batches.append({name: torch.cat([row[name] for row in rows]) for name in rows[0]})
        batches[-1]["position_ids"][:] = torch.arange(len(batches[-1]["position_ids"][0]))  # padding is no document
    return batches


TOKENS = sum(len(one["input_ids"]) for row in documents() for one in row)


def causal():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).train()


def of_documents(batches):
    """Return the time of a step with a batch of documents, whose tokens two ranks share."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
    model = causal()
    model, optimizer = accelerator.prepare(model, adamw(model))
    remaining = []

    def step():
        remaining.extend([] if remaining else batches)
        batch = {name: value.clone() for name, value in remaining.pop().items()}
        ids, places, labels = batch["input_ids"], batch["position_ids"], shift_labels(batch["labels"])
        with accelerator.maybe_context_parallel([ids, places, labels], [1, 1, 1]):
            logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            accelerator.backward(aggregate_loss(loss, (labels != -100).sum(), accelerator.torch_device_mesh["cp"]))
        optimizer.step()
        optimizer.zero_grad()

    taken = milliseconds(step, 2 * ROWS)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return taken


def packed_rows():
    return of_documents(packed())


def padded_rows():
    return of_documents(padded())


# -- full weights --


def prepared_shards(model):
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    return accelerator, accelerator.prepare(model)


def of_shards(work, model):
    accelerator, model = prepared_shards(model)
    with tempfile.TemporaryDirectory() as folder:
        taken = milliseconds(lambda: work(accelerator, model, Path(folder, str(dist.get_rank()))), 5)
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return taken


def wide():
    return nn.Sequential(*(nn.Linear(4 * WIDTH, WIDTH) for _ in range(16)))  # 64 MiB


def stream():
    return of_shards(lambda accelerator, model, _: [None for _ in accelerator.stream_weights(model)], wide())


def whole_of_torch():
    options = StateDictOptions(full_state_dict=True)
    return of_shards(lambda _, model, __: get_model_state_dict(model, options=options), wide())


def adapted():
    from peft import LoraConfig, get_peft_model

    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(16)))
    return get_peft_model(layers, LoraConfig(r=16, target_modules=r"\d+", init_lora_weights=False))


def adapter():
    return of_shards(lambda accelerator, model, folder: accelerator.save_adapter(model, folder.parent), adapted())


def adapter_of_peft():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(_, model, folder):
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=state)
        dist.barrier()

    return of_shards(save, adapted())


KINDS = {
    "step with a moving average of the weights under DDP": (average, average_of_torch),
    "step with a module that ranks may omit, FSDP2": (conditional, sharded_of_torch),
    "step with gradients through a gather": (gather, gather_of_torch),
    "step with norms in float32 by name, FSDP2 in bf16": (precision_by_name, precision_of_torch),
    "step with Muon on shards of FSDP2": (muon, muon_of_torch),
    "step with a pipeline of two stages, 1F1B": (pipeline, pipeline_of_torch),
    "step with packed rows, context parallelism": (packed_rows, padded_rows),
    "all weights by stream_weights, FSDP2": (stream, whole_of_torch),
    "save_adapter, FSDP2": (adapter, adapter_of_peft),
}
BESIDE = {padded_rows: "padded", adapter_of_peft: "torch's gathering and PEFT's save_pretrained"}


def main():
    rounds, *words = [*sys.argv[1:], ROUNDS][: max(1, len(sys.argv) - 1)]
    chosen = {name: pair for name, pair in KINDS.items() if not words or any(word in name for word in words)}
    Accelerator(cpu=True)  # the process group
    times = {}
    for number in range(int(rounds)):
        for name, pair in chosen.items():
            for kind in pair if number % 2 else reversed(pair):
                times.setdefault((name, kind), []).append(kind())
    figures = {}
    for name, (ours, theirs) in chosen.items():
        mine, plain = (statistics.median(times[name, kind]) for kind in (ours, theirs))
        what = name.removeprefix("step with ")
        figures |= {f"{name} (ms)": mine, f"the same / {BESIDE.get(theirs, 'plain torch')} ({what})": mine / plain}
        if theirs is padded_rows:
            figures |= {
                f"tokens a second, {kind}": TOKENS / ROWS / time * 1000
                for kind, time in (("packed", mine), ("padded", plain))
            }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
