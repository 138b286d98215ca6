"""Models with a device map in `prepare`."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.config.enums import DistributedType
from accelerate.extensions.big_models.extension import PlacedModels


def placed(where, **attributes):
    model = nn.Sequential(nn.Linear(1, 1))
    model.hf_device_map = where
    vars(model).update(attributes)
    return model


class Run(SimpleNamespace):
    """An Accelerator of two processes, as far as the extension looks at it."""

    verify_device_map = staticmethod(Accelerator(cpu=True).verify_device_map)


def refusal(kind, device, model):
    run = Run(distributed_type=kind, device=torch.device(device), num_processes=2)
    PlacedModels(run).convert(model, False)


def test_prepare_asks_the_extension_for_a_placed_model_only():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    assert not accelerator.extensions.of_kind(PlacedModels)
    inner = nn.Sequential(placed({"0": "cpu", "1": "disk"}))
    assert accelerator.prepare(inner) is inner and accelerator.verify_device_map(inner)
    assert accelerator.extensions.of_kind(PlacedModels)


def test_a_model_on_several_devices_is_refused_in_several_processes():
    with pytest.raises(ValueError, match="over several devices.*num_processes=2"):
        refusal(DistributedType.MULTI_GPU, "cuda:1", placed({"0": 0, "1": 1}))
    refusal(DistributedType.MULTI_GPU, "cuda:1", placed({"": 0}))


@pytest.mark.parametrize("where", [0, "cuda:0", "cpu"])
def test_a_quantised_model_on_another_device_is_refused(where):
    with pytest.raises(ValueError, match="quantized model is on .* trains on cuda:1.*\\{'': 1\\}"):
        refusal(DistributedType.MULTI_GPU, "cuda:1", placed({"": where}, is_loaded_in_4bit=True))
    refusal(DistributedType.MULTI_GPU, "cuda:1", placed({"": 1}, is_loaded_in_8bit=True))
