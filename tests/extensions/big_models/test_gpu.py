"""Offloading to and from an accelerator."""

import pytest
import torch
from torch import nn

from accelerate.big_modeling import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import compute_module_sizes, infer_auto_device_map
from offload_samples import arrivals

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(8)]).eval()


@pytest.fixture
def inputs():
    return torch.randn(4, 1024)


@pytest.mark.parametrize("prefetch", [True, False, "6MiB"])
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_offloaded_models_give_the_same_bits(home, prefetch, model, inputs, tmp_path):
    with torch.inference_mode():
        model.to(0)
        plain = model(inputs.to(0)).cpu()
        model.to("cpu")
        if home == "cpu":
            cpu_offload(model, 0, prefetch=prefetch)
        else:
            disk_offload(model, tmp_path, 0, prefetch=prefetch)
        with arrivals() as read_ahead:
            for _ in range(4):
                assert torch.equal(model(inputs), plain)
        assert any(read_ahead) == bool(prefetch)
        remove_hook_from_submodules(model)
        assert torch.equal(model.to(0)(inputs.to(0)).cpu(), plain)


def test_what_does_not_fit_waits_in_memory_and_on_disk(tmp_path):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)]).eval()
    inputs = torch.randn(4, 4096)
    with torch.inference_mode():
        plain = model.to(0)(inputs.to(0)).cpu()
        model.to("cpu")
        block = compute_module_sizes(model)["0"]
        device_map = infer_auto_device_map(model, {0: 3 * block, "cpu": 4 * block})
        assert set(device_map.values()) == {0, "cpu", "disk"}
        others = torch.cuda.memory_allocated()  # the workspace of matrix products is as large as half a block
        torch.cuda.reset_peak_memory_stats()
        dispatch_model(model, device_map, offload_dir=tmp_path)
        for _ in range(3):
            assert torch.equal(model(inputs), plain)
        # Two blocks stay there, one computes, and one is ahead.
        assert torch.cuda.max_memory_allocated() - others < 5 * block
