"""Memory budgets."""

import pytest
from torch import nn

from accelerate.offload.memory import get_balanced_memory, get_max_memory


def test_without_accelerator_the_host_memory_is_the_budget():
    budgets = get_max_memory()
    assert budgets["cpu"] > 0
    assert all(isinstance(device, int) or device in ("cpu", "mps") for device in budgets)


def test_budgets_are_parsed_and_put_in_filling_order():
    budgets = get_max_memory({"disk": "1KB", "cpu": 3, 1: 5, 0: "2KiB"})
    assert list(budgets.items()) == [(0, 2048), (1, 5), ("cpu", 3), ("disk", 1000)]
    assert get_max_memory({"cpu": 1.5}) == {"cpu": 1.5}


@pytest.mark.parametrize("budget", [{"gpu": 1}, {"cpu": "much"}])
def test_unknown_devices_and_sizes_are_refused(budget):
    with pytest.raises(ValueError, match="gpu|much"):
        get_max_memory(budget)


def _model():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))  # 6 x 64 bytes


def test_an_even_share_plus_margin_and_the_rest_on_the_last_device():
    budgets = get_balanced_memory(_model(), {0: 1000, 1: 1000, 2: 1000, "cpu": 7})
    assert budgets == {0: 128 + 80, 1: 128 + 80, 2: 1000, "cpu": 7}


def test_low_zero_frees_the_first_device_as_far_as_the_others_can_hold_the_model():
    assert get_balanced_memory(_model(), {0: 1000, 1: 1000, 2: 1000}, low_zero=True)[0] == 0
    assert get_balanced_memory(_model(), {0: 1000, 1: 300}, low_zero=True)[0] == 384 - 300


def test_whole_blocks_widen_the_margin():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False)
    )
    plain = get_balanced_memory(model, {0: 1000, 1: 1000})[0]
    whole = get_balanced_memory(model, {0: 1000, 1: 1000}, no_split_module_classes="Sequential")[0]
    assert (plain, whole) == (96 + 80, 96 + 160)
