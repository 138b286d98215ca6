"""Functions for sharded models, for other programs."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate.utils import fsdp_utils as utils
from sharded_samples import net, sharding


@pytest.mark.parametrize("key", [lambda parameter: parameter, lambda parameter: parameter.data_ptr()])
def test_switched_parameters(key):
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": [old.weight]}, {"params": [old.bias]}])
    with pytest.raises(KeyError, match="Parameter 0 of the optimizer's group 1"):
        utils.fsdp2_switch_optimizer_parameters(optimizer, {key(old.weight): new.weight})
    assert optimizer.param_groups[0]["params"] == [old.weight], "nothing was changed"
    mapping = {key(a): b for a, b in zip(old.parameters(), new.parameters(), strict=True)}
    utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [group["params"] for group in optimizer.param_groups] == [[new.weight], [new.bias]]
    assert utils.get_fsdp2_grad_scaler(device="cpu", init_scale=4.0).get_scale() == 4.0


def test_a_state_is_distributed_over_a_model_without_memory(process_group):
    accelerator = sharding(2)
    with torch.device("meta"):
        model = net(tied=False)
    fully_shard(model)
    wanted = net(seed=3, tied=False).state_dict()
    utils.fsdp2_load_full_state_dict(accelerator, model, wanted)
    assert all(torch.equal(accelerator.get_state_dict(model)[name], value) for name, value in wanted.items())
