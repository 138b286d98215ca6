"""Clipping by norm and by value in one process, against torch's own."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.modules import norms
from accelerate.modules.norms import clip_grad_norm, clip_grad_value


def parameters(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


@pytest.mark.parametrize("norm_type", [1.0, 1.5, 2, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_is_torchs(norm_type, max_norm):
    ours, theirs = parameters((4, 3), (7,), ()), parameters((4, 3), (7,), ())
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    before = [mine.grad for mine in ours]
    torch.testing.assert_close(clip_grad_norm(iter(ours), max_norm, norm_type), expected)
    for mine, other, same in zip(ours, theirs, before, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        assert mine.grad is same


def test_missing_and_empty_gradients_count_as_zero():
    weight, empty = parameters((4,), (0, 3))
    without = nn.Parameter(torch.zeros(2))
    expected = weight.grad.norm()
    torch.testing.assert_close(clip_grad_norm([without, empty, weight], math.inf), expected)
    torch.testing.assert_close(clip_grad_norm([empty, weight], math.inf, math.inf), weight.grad.abs().max())
    assert clip_grad_norm([without], 1.0) == 0 and clip_grad_norm([], 1.0, math.inf) == 0


def test_half_precision_neither_overflows_nor_rounds_the_norm():
    ours = parameters((1000,), (1000,), dtype=torch.float16)
    for parameter in ours:
        parameter.grad.fill_(6e4)
    total = clip_grad_norm(ours, 1.0)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, torch.tensor(6e4 * math.sqrt(2000)), rtol=1e-3, atol=0)
    assert ours[0].grad.isfinite().all() and ours[0].grad.max() > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_told(value, norm_type):
    (weight,) = parameters((4,))
    weight.grad[1] = value
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match=f"norm of order {norm_type}.* is {'nan' if math.isnan(value) else 'inf'}"):
        clip_grad_norm(weight, 1.0, norm_type, error_if_nonfinite=True)
    torch.testing.assert_close(weight.grad, before, equal_nan=True)
    assert not clip_grad_norm(weight, math.inf, norm_type).isfinite()
    torch.testing.assert_close(weight.grad, before, equal_nan=True)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="max_norm is -1.0"):
        clip_grad_norm(parameters((2,)), -1)
    for norm_type in (0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="norm_type is .*; it must be above 0"):
            clip_grad_norm(parameters((2,)), 1.0, norm_type)
    with pytest.raises(ValueError, match="clip_value is nan"):
        clip_grad_value(parameters((2,)), math.nan)


def test_shards_beside_plain_tensors(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    plain, other, summand = parameters((4,), (6, 2), (3, 2))
    whole = torch.cat([item.grad.flatten() for item in (plain, other, summand)])
    sharded = nn.Parameter(DTensor.from_local(other.detach(), mesh, [Shard(0)]))
    sharded.grad = DTensor.from_local(other.grad, mesh, [Shard(0)])
    partial = nn.Parameter(DTensor.from_local(summand.detach(), mesh, [Shard(0)]))
    partial.grad = DTensor.from_local(summand.grad, mesh, [Partial()])
    total = clip_grad_norm([plain, sharded, partial], 0.5)
    assert not isinstance(total, DTensor)
    torch.testing.assert_close(total, whole.norm())
    assert partial.grad.placements == (Shard(0),)
    after = torch.cat([plain.grad, *(item.grad.full_tensor().flatten() for item in (sharded, partial))])
    torch.testing.assert_close(after, whole * (0.5 / (total + 1e-6)))


def test_sums_of_offloaded_gradients_meet_on_the_device_of_the_mesh(monkeypatch):
    """CPU gradients of a CUDA mesh: NCCL has no collectives for the CPU."""
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(current_device=lambda: 3))
    mesh = SimpleNamespace(device_type="cuda")
    gradients = norms._Gradients(parameters((2,)))
    assert gradients.device == gradients.reduction_device() == torch.device("cpu")
    gradients.groups["shards"] = (None, mesh)
    assert gradients.reduction_device() == torch.device("cuda", 3)
