"""Trainable parameters that all ranks have whole next to shards: adapters of models that arrive sharded, and `ignored_modules`."""

import itertools
import os

import torch
from check_sharded import Model, assert_close, batch, build, sharding, weights
from expect import assert_same_everywhere, logged, raised
from harness import everywhere, fresh_accelerator, rank, shared_folder, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

STEPS, MAX_NORM = 4, 0.3
AVERAGED = "accelerate.extensions.unsharded.averaging"


class Adapted(nn.Module):
    """A layer with a low-rank matrix added, as PEFT puts it around a layer that is there."""

    def __init__(self, base, seed):
        super().__init__()
        self.base = base
        draw = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=draw))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=draw))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(model, seed=0):
    """Put adapters next to two layers, of which one alone is left to train."""
    model.first = Adapted(model.first, seed)
    model.blocks[1][0] = Adapted(model.blocks[1][0], seed + 10)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name or "last" in name)
    return model


def arrived(names=("fsdp",), shape=None):
    """A model that a program has sharded, with adapters that each rank has drawn for itself."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", shape or (world(),), mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"blocks.0.0": ColwiseParallel(output_layouts=Replicate())})
        mesh = mesh[names[:-1]]
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return adapt(model, seed=rank())


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def alone(window):
    """Norms and weights of one process, which has the batches of all ranks."""
    torch.manual_seed(0)
    model = adapt(Model())
    optimizer, norms = adam(model), []
    for step in range(STEPS):
        for micro in range(window):
            (model(batch(step * window + micro)[0]).square().mean() / window).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def trained(accelerator, model, optimizer, window, **options):
    """Norms of the same training by all ranks; those that share layers take one batch together."""
    layout, norms = accelerator.parallelism_config, []
    copies = layout.tp_size if layout is not None else 1
    for number in range(STEPS * window):
        mine = batch(number)[0].chunk(world() // copies)[rank() // copies]
        with accelerator.accumulate(model, **options):
            accelerator.backward(model(mine).square().mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def equals_one_process(accelerator, model, window, what, **options):
    """Prepare a model with its optimizer, train it, and compare; return both, and the weights of one process."""
    model, optimizer = accelerator.prepare(model, adam(model))
    norms, (expected, values) = trained(accelerator, model, optimizer, window, **options), alone(window)
    assert torch.allclose(torch.tensor(norms), torch.tensor(expected), atol=1e-5), (what, norms, expected)
    assert_close(weights(accelerator, model), values)
    return model, optimizer, values


def check_adapters_of_a_sharded_model_train_as_on_one_process():
    for window in (1, 3):
        accelerator = fresh_accelerator(gradient_accumulation_steps=window)
        model, optimizer, values = equals_one_process(accelerator, arrived(), window, window)
        assert optimizer.param_groups[0]["foreach"] is False, "torch's default on GPUs refuses DTensors next to others"
        assert_same_everywhere([model.first.down, model.blocks[1][0].up], window)
        with shared_folder() as folder:
            place = os.path.join(folder, "state")
            accelerator.save_state(place)
            once = trained(accelerator, model, optimizer, window)
            accelerator.load_state(place)
            assert_close(weights(accelerator, model), values)
            assert trained(accelerator, model, optimizer, window) == once, "the optimizer's state of adapters is lost"


def as_on_one_process(names, shape):
    """Train what arrives over a mesh, and return which sizes were found."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    model, *_ = equals_one_process(accelerator, arrived(names, shape), 2, names)
    assert_same_everywhere([model.first.down, model.blocks[1][0].up], names)
    layout = accelerator.parallelism_config
    return layout.dp_replicate_size, layout.dp_shard_size, layout.tp_size


def check_a_dimension_of_one_rank_may_have_any_name():
    assert as_on_one_process(("pp", "fsdp"), (1, world())) == (1, world(), 1)
    accelerator = fresh_accelerator()
    model = arrived(("pp", "fsdp"), (world(), 1))
    with raised(ValueError, "spread over 'pp', 2 ranks", "Make 'pp' 1"):
        accelerator.prepare(model)


def four_adapters_on_meshes():
    assert as_on_one_process(("replicate", "shard"), (2, 2)) == (2, 2, 1)
    assert as_on_one_process(("fsdp", "tp"), (2, 2)) == (1, 2, 2)
    assert as_on_one_process(("pp", "fsdp", "tp"), (1, 2, 2)) == (1, 2, 2)


def check_items_weigh_adapters_too():
    equals_one_process(fresh_accelerator(gradient_accumulation_steps=2), arrived(), 2, "items", num_items=4)


def check_whole_gradients_travel_once_a_window():
    accelerator = fresh_accelerator(gradient_accumulation_steps=3)
    model = accelerator.prepare(arrived())
    for micro in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(micro)[1]).square().mean())
        assert len({str(seen) for seen in everywhere(model.first.down.grad)}) == (1 if micro == 2 else world()), micro
    with accelerator.no_sync(model):  # of this model, and no other
        other = arrived()
        other = accelerator.prepare(other)
        accelerator.backward(other(batch()[1]).square().mean() + model(batch()[1]).square().mean())
    assert_same_everywhere([other.first.down.grad])
    assert len({str(seen) for seen in everywhere(model.first.down.grad)}) == world()


def check_a_gradient_that_one_rank_has_is_everybodys_and_none_is_none():
    accelerator = fresh_accelerator()
    model = arrived()
    model.register_parameter("one", nn.Parameter(torch.ones(3)))
    model.register_parameter("none", nn.Parameter(torch.ones(3)))
    model = accelerator.prepare(model)
    loss = model(batch()[1]).mean() + (model.one.sum() if rank() == 0 else 0)
    accelerator.backward(loss)
    assert model.none.grad is None and torch.equal(model.one.grad, torch.full((3,), 1 / world()))


def check_adapters_that_differ_in_shape_are_refused_by_all_ranks():
    accelerator = fresh_accelerator()
    model = arrived()
    if rank() == 1:
        model.first.down = nn.Parameter(torch.zeros(3, 4))
    before = model.first.up.clone()
    with raised(ValueError, "first.down", "(3, 4)"):
        accelerator.prepare(model)
    assert torch.equal(model.first.up, before) and accelerator.parallelism_config is None


def check_an_overflow_in_an_adapter_is_seen_by_all_ranks():
    accelerator = fresh_accelerator(mixed_precision="fp16")
    model = arrived()
    model, optimizer = accelerator.prepare(model, adam(model))
    before = everywhere(model.first.down.tolist())
    accelerator.backward(model(batch()[1]).mean() * (float("inf") if rank() else 1.0))
    optimizer.step()
    assert all(everywhere(accelerator.optimizer_step_was_skipped)) and everywhere(model.first.down.tolist()) == before
    optimizer.zero_grad()
    accelerator.backward(model(batch()[1]).mean())
    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    assert not any(everywhere(accelerator.optimizer_step_was_skipped))
    assert_same_everywhere([model.first.down])


def check_modules_that_fsdp_ignores_train_as_on_one_process():
    for version, window in itertools.product((1, 2), (1, 3)):
        plugin = sharding(version, ignored_modules="last|first", use_orig_params=True if version == 1 else None)
        accelerator = fresh_accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=window)
        torch.manual_seed(0)
        with logged(AVERAGED) as lines:
            equals_one_process(accelerator, adapt(Model()), window, version)
        assert len(lines) == (rank() == 0) and all("averages their gradients" in line for line in lines), lines


def check_ignored_modules_that_differ_stay_each_ranks_own():
    """A program may keep experts of its own in them."""
    for version in (1, 2):
        plugin = sharding(version, ignored_modules="last", cpu_ram_efficient_loading=False)
        accelerator = fresh_accelerator(fsdp_plugin=plugin)
        model, _ = build()
        with torch.no_grad():
            model.last.weight += rank()
        kept = model.last.weight.clone()
        with logged(AVERAGED) as lines:
            model = accelerator.prepare(model)
        told = [line for line in lines if "differ between ranks, 'last.weight'" in line]
        assert len(told) == (rank() == 0), lines
        accelerator.backward(model(batch()[1]).mean())
        last = accelerator.unwrap_model(model).last
        assert torch.equal(last.weight, kept) and len({str(seen) for seen in everywhere(last.weight.grad)}) == world()
        assert_same_everywhere([last.bias.grad])


def check_ranks_that_ignore_different_modules():
    """One rank has no parameter of its own, and takes part in the comparison."""
    accelerator = fresh_accelerator(fsdp_plugin=sharding(2, ignored_modules="last", cpu_ram_efficient_loading=False))
    model, _ = build()
    if rank():
        model.last.requires_grad_(False)
    with logged(AVERAGED) as lines:
        accelerator.prepare(model)
    assert len([line for line in lines if "differ between ranks, 'last.bias'" in line]) == (rank() == 0), lines
