"""Clipping on meshes of two and four processes equals clipping the whole model in one process."""

import itertools
import math

import torch
import torch.distributed as dist
from expect import assert_same_everywhere, full, raised
from harness import CPU, everywhere, rank, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate.modules import norms

DEVICE = "cpu" if CPU else "cuda"
NORMS = (2.0, 3.0, math.inf)
WIDTH = 7  # odd: shards are uneven, and with four ranks the last one of a bias of 2 has none


def mesh_of(*sizes, names):
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


class Block(nn.Module):
    """Two layers, one of them with fewer rows than there may be ranks, and a norm that is not sharded by a plan."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.norm(self.down(self.up(x).relu())))


def whole(seed=0):
    torch.manual_seed(seed)
    return Block().to(DEVICE, torch.float64)  # so that the gradients themselves do not differ by rounding


def backward(model):
    model.zero_grad()
    # The same batch everywhere: averages over ranks are then what one process has.
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float64)
    model(x).square().sum().mul(30.0).backward()


def same_as_one_process(build, label):
    """Clip `build(whole())` in every norm, and compare norms and gradients with the model of one process."""
    for norm_type, limit in zip(NORMS, (0.7, 1e6, 0.7), strict=True):
        reference, model = whole(), build(whole())
        backward(reference)
        backward(model)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type)
        told, counted = counting(lambda: norms.clip_grad_norm(model.parameters(), limit, norm_type))  # noqa: B023
        torch.testing.assert_close(told, expected, rtol=1e-9, atol=0, msg=f"{label} {norm_type}: {told} != {expected}")
        assert not isinstance(told, DTensor) and told.device.type == next(model.parameters()).grad.device.type
        assert_same_everywhere([told], label)
        assert counted <= 2, (label, f"{counted} all-reduces")
        compare(model, reference, label)


def compare(model, reference, label):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close = torch.allclose(full(mine.grad).to(DEVICE), theirs.grad, rtol=1e-9, atol=1e-9)
        assert close, (label, name, mine.grad, theirs.grad)


def counting(call):
    made, real = 0, dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal made
        made += 1
        return real(*args, **kwargs)

    dist.all_reduce = counted
    try:
        return call(), made
    finally:
        dist.all_reduce = real


def tensor_parallel(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def check_one_dimension():
    mesh = mesh_of(world(), names=("dp_shard",))
    same_as_one_process(lambda model: fully_shard(model, mesh=mesh), "FSDP2")
    offload = CPUOffloadPolicy(pin_memory=not CPU)
    same_as_one_process(lambda model: fully_shard(model, mesh=mesh, offload_policy=offload), "offloaded")
    same_as_one_process(lambda model: tensor_parallel(model, mesh), "TP next to plain parameters")
    reference, model = whole(), tensor_parallel(whole(), mesh)
    backward(reference)
    backward(model)
    nn.utils.clip_grad_value_(reference.parameters(), 0.2)
    assert counting(lambda: norms.clip_grad_value(model.parameters(), 0.2))[1] == 0
    compare(model, reference, "values")


def beside_a_plain_one(mesh, *placements):
    """Distribute one gradient in one way, next to a plain one, and compare."""
    for norm_type in NORMS:
        value = torch.randn(5, 3, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        expected = torch.cat([value.flatten(), value[0]])
        sharded = nn.Parameter(
            distribute_tensor(value, mesh, [Replicate() for _ in placements]).redistribute(placements=placements)
        )
        sharded.grad = sharded.detach().clone()
        plain = nn.Parameter(value[0].clone())
        plain.grad = value[0].clone()
        told = norms.clip_grad_norm([plain, sharded], 0.1, norm_type)
        torch.testing.assert_close(told, expected.norm(norm_type), rtol=1e-5, atol=0)
        torch.testing.assert_close(sharded.grad.full_tensor(), value * (0.1 / (told + 1e-6)))


def check_placements_and_summands():
    size = world()
    mesh = mesh_of(size, names=("tp",))
    for placement in (Replicate(), Shard(0), Shard(1)):
        beside_a_plain_one(mesh, placement)
    value = torch.arange(10.0, device=DEVICE).view(5, 2) / 10
    for clip in (norms.clip_grad_norm, norms.clip_grad_value):
        parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
        parameter.grad = DTensor.from_local(value * (1 + rank()), mesh, [Partial()])
        summed = value * size * (size + 1) / 2
        told = clip([parameter], 0.5)
        if told is None:
            torch.testing.assert_close(parameter.grad.full_tensor(), summed.clamp(max=0.5))
        else:
            torch.testing.assert_close(told, summed.norm())
            torch.testing.assert_close(parameter.grad.full_tensor(), summed * (0.5 / (told + 1e-6)))
        assert parameter.grad.placements == parameter.placements


def four_on_two_dimensions():
    hybrid = mesh_of(2, 2, names=("dp_replicate", "dp_shard"))
    same_as_one_process(lambda model: fully_shard(model, mesh=hybrid), "HSDP")
    both = mesh_of(2, 2, names=("dp_shard", "tp"))
    shard, tp = both["dp_shard"], both["tp"]
    same_as_one_process(lambda model: fully_shard(tensor_parallel(model, tp), mesh=shard), "FSDP2 x TP")

    def some(model):
        """One layer sharded over both dimensions, one over tp only, the rest plain."""
        tensor_parallel(model, tp)
        fully_shard(model.up, mesh=shard)
        return model

    same_as_one_process(some, "three layouts")
    for pair in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        beside_a_plain_one(both, *pair)


def check_trouble():
    """Not finite on one rank only, a gradient missing on one rank only: all ranks agree."""
    size = world()
    mesh = mesh_of(size, names=("dp_shard",))
    for norm_type in (2.0, math.inf):
        for value in (math.nan, math.inf):
            parameter = nn.Parameter(distribute_tensor(torch.ones(2 * size, device=DEVICE), mesh, [Shard(0)]))
            parameter.grad = parameter.detach().clone()
            if rank() == size - 1:
                parameter.grad.to_local()[0] = value
            with raised(RuntimeError, f"order {norm_type}", "nan" if math.isnan(value) else "inf"):
                norms.clip_grad_norm([parameter], 1.0, norm_type, error_if_nonfinite=True)
            told = norms.clip_grad_norm([parameter], math.inf, norm_type)
            assert (told.isnan() if math.isnan(value) else told == math.inf).item()
        parameter = nn.Parameter(distribute_tensor(torch.ones(2 * size, device=DEVICE), mesh, [Shard(0)]))
        if rank():
            parameter.grad = parameter.detach().clone()
        told = norms.clip_grad_norm([parameter], math.inf, norm_type)
        assert everywhere(round(told.item() ** 2, 4)) == [1.0 if norm_type == math.inf else 2.0 * (size - 1)] * size
