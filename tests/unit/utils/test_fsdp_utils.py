import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils as utils
from sharded_samples import net, sharding

CPU = torch.device("cpu")


class Layer(nn.Linear):
    """What the policies wrap."""


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        *[("[01]", {"0.weight", "0.bias", "1.weight", "1.bias"}), (r"2\..*", {"2.0.weight"})],
        *[("nothing", set()), (None, set()), ([], set())],
    ],
)
def test_parameters_of_named_modules(modules, names):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    found = utils.get_parameters_from_modules(modules, model, CPU)
    assert {name for name, parameter in model.named_parameters() if parameter in found} == names
    assert len(found) == len(names)
    found = utils.get_parameters_from_modules((model[0],), model, torch.device("meta"))
    assert found == set(model[0].parameters())
    assert model[0].weight.is_meta and not model[1].weight.is_meta
    assert utils.get_parameters_from_modules(model[1], model, CPU) == set(model[1].parameters())


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, Layer),
        lambda module, recurse, nonwrapped_numel: isinstance(module, Layer) and nonwrapped_numel == 6 and not recurse,
        lambda **options: isinstance(options["module"], Layer),
        wrap.ModuleWrapPolicy([Layer]),
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Layer)),
    ],
)
def test_own_policies(policy):
    model = nn.Sequential(Layer(2, 2), nn.Linear(2, 2))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)
    is_unit = utils.fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [name for name, module in model.named_modules() if is_unit(module)] == ["0"]


def test_a_model_is_sharded_once(process_group):
    accelerator = sharding(2)
    model = torch.compile(net(), backend="eager")
    assert utils.fsdp2_prepare_model(accelerator, model) is model
    sharded = list(model.parameters())
    assert utils.fsdp2_prepare_model(accelerator, model) is model
    assert all(now is before for now, before in zip(model.parameters(), sharded, strict=True))
