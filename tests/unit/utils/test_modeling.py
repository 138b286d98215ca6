"""The public path of placement and loading, and the two helpers that live there."""

import torch

import accelerate.utils.modeling as modeling


def test_the_start_of_a_device_map_has_devices_budgets_and_modules():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    devices, budgets, main, accelerators, sizes, tied, together, waiting = modeling._init_infer_auto_device_map(
        model, {0: 1000, "cpu": 10**6}, ["Linear"], torch.float16, {"0.weight": torch.float32}
    )
    assert (devices, budgets) == ([0, "cpu", "disk"], {0: 1000, "cpu": 10**6})
    assert (main, accelerators, tied, together) == ([0, "cpu"], [0], [], ["Linear"])
    assert (sizes[""], sizes["0"]) == (64 + 8 + 16, 64 + 8)
    assert [name for name, _ in waiting] == ["0", "1"]
    assert modeling._get_param_device("a.b.weight", {"a": 0, "a.b": "cpu"}) == "cpu"
