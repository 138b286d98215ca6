"""Names without wrapper parts."""

import pytest
import torch
from torch import nn

from accelerate.modules import named


def test_canonical_name():
    assert named.canonical_name("_orig_mod.layers.0._fsdp_wrapped_module.weight") == "layers.0.weight"
    assert named.canonical_name("module.weight") == "module.weight"


def test_canonical_parameters():
    net = nn.Sequential(nn.Linear(1, 1))
    net[0] = torch.compile(net[0], backend="eager")
    assert set(named.canonical_parameters(net)) == {"0.weight", "0.bias"}
    assert set(named.canonical_parameters(net, net)) == {"0.weight", "0.bias"}
    with pytest.raises(ValueError, match="0.weight"):
        named.canonical_parameters(net, nn.Sequential(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("wanted", "found", "pairs"),
    [
        (["a"], ["a"], {"a": "a"}),
        (["a"], ["module.a"], {"module.a": "a"}),
        (["module.a"], ["a"], {"a": "module.a"}),
        (["module._orig_mod.x.a"], ["_orig_mod.x._orig_mod.a"], {"_orig_mod.x._orig_mod.a": "module._orig_mod.x.a"}),
        (["module.a"], ["module.a"], {"module.a": "module.a"}),  # a user's attribute of that name
        (["a", "module.a"], ["a", "module.a"], {"a": "a", "module.a": "module.a"}),
        (["a", "module.a"], ["_orig_mod.a"], {}),  # two could be meant
        (["a"], ["b"], {}),
    ],
)
def test_names_match_whoever_wrote_them(wanted, found, pairs):
    assert named.match_names(wanted, found) == pairs
