"""The bytes that the estimator says a step sends are those that real exchanges have, for every collective, on two and four ranks."""

import atexit
import functools
import itertools
import multiprocessing
from collections import Counter

import torch
from harness import CPU, everywhere, fresh_accelerator, rank, world
from models import Blocks
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.extensions.plan.activations import measure
from accelerate.extensions.reports.estimator import Layout, traffic
from accelerate.utils import TorchTensorParallelConfig, shift_labels

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Net(Blocks):
    _no_split_modules = ("Block",)
    tp_plan = PLAN

    def __init__(self):
        super().__init__(6, 16, 6, [24] * 4)
        self.register_buffer("scale", torch.ones(3))


class Exchanges(TorchDispatchMode):
    """Counts the bytes of the collectives that torch starts, in the words of the estimator."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, first = str(func), args[0] if args else None
        tensors = first if isinstance(first, (list, tuple)) else [first]
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        if "allreduce_" in name or name.startswith("_c10d_functional.all_reduce"):
            self.bytes["all_reduce"] += size
        elif "c10d.broadcast_" in name:
            self.bytes["broadcast"] += size
        elif "_allgather_base_" in name:
            self.bytes["all_gather"] += size
        elif "_reduce_scatter_base_" in name:
            self.bytes["reduce_scatter"] += args[1].nbytes
        elif "c10d.alltoall_base_" in name:
            self.bytes["all_to_all"] += args[1].nbytes
        elif "_c10d_functional.all_to_all_single" in name:
            self.bytes["all_to_all"] += size
        return out


def counted(accelerator, windows=1, build=Net, loss_of=None):
    """Take three steps, and return what the third exchanges: torch lays DDP's buckets again in the second."""
    torch.manual_seed(0)
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        with Exchanges() as exchanges:
            for _ in range(windows):
                with accelerator.accumulate(model):
                    loss = model(torch.ones(2, 5, 6)).square().mean() if loss_of is None else loss_of(model)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    return dict(exchanges.bytes)


def foretold(build=Net, inputs=lambda batch, length: {"x": torch.ones(batch, length, 6)}, length=5, **sizes):
    layout = Layout(micro_batch=2, **sizes)
    profile = measure(build, inputs, layout, length)
    found = Counter()
    for each in traffic(profile, layout):
        found[each.collective] += each.bytes
    return dict(found)


def sharding(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)


def check_bytes_of_ddp():
    for windows in (1, 2) if CPU else ():
        accelerator = fresh_accelerator(gradient_accumulation_steps=windows)
        assert counted(accelerator, windows) == foretold(dp_replicate=world(), accumulation=windows)


def check_bytes_of_fsdp2():
    for windows, reshard in ((1, True), (1, False), (2, True)) if CPU else ():
        plugin = sharding(reshard_after_forward=reshard)
        accelerator = fresh_accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=windows)
        said = foretold(dp_shard=world(), fsdp=True, accumulation=windows, reshard=reshard)
        found = counted(accelerator, windows)
        assert found == said, (windows, reshard, found, said)


def frozen():
    model = Net()
    for block in model.blocks:
        block.up.requires_grad_(False)
    return model


def check_bytes_of_frozen_weights():
    """They are gathered, and have no gradients."""
    for options, sizes in (({"fsdp_plugin": sharding()}, {"dp_shard": world()}), ({}, {"dp_replicate": world()})):
        if CPU:
            found, said = counted(fresh_accelerator(**options), build=frozen), foretold(frozen, **sizes)
            assert found == said, (sizes, found, said)


def check_bytes_of_tensor_parallelism():
    if CPU:
        handler = TorchTensorParallelConfig(plan=PLAN)
        accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=world(), tp_handler=handler))
        compare(counted(accelerator), {}, tp=world())


def four_bytes_of_hsdp():
    if CPU:
        layout = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = fresh_accelerator(fsdp_plugin=sharding(), parallelism_config=layout)
        found, said = counted(accelerator), foretold(dp_replicate=2, dp_shard=2, fsdp=True)
        assert found == said, (found, said)


LENGTH, WORDS = 32, 64


@functools.cache
def elsewhere():
    """Return a process of rank 0 that has joined no group, in which a model that ranks split can be measured."""
    pool = multiprocessing.get_context("spawn").Pool(1)
    atexit.register(pool.terminate)
    return pool


def compare(found, more, *model, **sizes):
    """Require what is foretold, and more that only checks on CPUs exchange."""
    if rank() == 0:
        said = elsewhere().apply(foretold, model, sizes) | more
        assert found == said, (sizes, found, said)


def language_model(kind="Llama", **more):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": WORDS, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def mixture():
    return language_model("Mixtral", num_local_experts=4)


def tokens(batch, length):
    ids = torch.randint(0, WORDS, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def compare_shared_sequences(axis, size, windows=1):
    replicas = world() // size
    sizes = {f"{axis}_size": size, "dp_shard_size": replicas, **({"sp_backend": "torch"} if axis == "sp" else {})}
    layout = ParallelismConfig(**{name: value for name, value in sizes.items() if value != 1})
    accelerator = fresh_accelerator(
        fsdp_plugin=sharding(), parallelism_config=layout, gradient_accumulation_steps=windows
    )

    def loss_of(model):
        batch = tokens(2, LENGTH)
        whole = [batch["input_ids"], shift_labels(batch["labels"])]
        with accelerator.maybe_context_parallel(whole, [1, 1], set(whole)):
            return model(input_ids=whole[0], labels=whole[1], shift_labels=whole[1]).loss

    found = counted(accelerator, windows, language_model, loss_of)
    sizes = {"dp_shard": replicas, axis: size}
    checked = {"all_reduce": 2 * 8 * windows}  # at each entry a rank on a CPU compares its batch with the others'
    compare(found, checked, language_model, tokens, LENGTH, fsdp=True, accumulation=windows, **sizes)


def slow_bytes_of_shared_sequences():
    for axis, windows in itertools.product(("cp", "sp"), (1, 2)) if CPU else ():
        compare_shared_sequences(axis, world(), windows)


def four_bytes_of_shared_sequences_and_shards():
    for axis in ("cp", "sp") if CPU else ():
        compare_shared_sequences(axis, 2)


def compare_experts(ep, **layout):
    sizes = {f"{name}_size": value for name, value in layout.items()}
    accelerator = fresh_accelerator(fsdp_plugin=sharding(), parallelism_config=ParallelismConfig(**sizes, ep_size=ep))
    torch.manual_seed(accelerator.process_index)
    found = everywhere(counted(accelerator, 1, mixture, lambda model: model(**tokens(2, LENGTH)).loss))
    # Ranks get as many tokens as the routers say: all together as many as they send.
    means = {name: sum(each.get(name, 0) for each in found) / world() for name in found[0]}
    compare(means, {}, mixture, tokens, LENGTH, fsdp=True, ep=ep, **layout)


def slow_bytes_of_expert_parallelism():
    if CPU:
        compare_experts(world(), dp_shard=world())


def four_bytes_of_experts_and_shards():
    if CPU:
        compare_experts(2, dp_shard=4)
        compare_experts(2, dp_replicate=2, dp_shard=2)
