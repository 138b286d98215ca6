"""Memory budgets."""

import pytest
from torch import nn

from accelerate.offload.device_map import get_balanced_memory, get_max_memory


def test_budgets_are_parsed_and_put_in_filling_order():
    budgets = get_max_memory({"disk": "1KB", "cpu": 3, 1: 5, 0: "2KiB"})
    assert list(budgets.items()) == [(0, 2048), (1, 5), ("cpu", 3), ("disk", 1000)]
    assert get_max_memory({"cpu": 1.5}) == {"cpu": 1.5}


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ({"gpu": 1}, "'gpu'"),
        ({"0": 1}, "'0'"),
        ({"cpu": "much"}, r"\['cpu'\]='much'"),
        ({0: "5"}, r"\[0\]='5'"),
        ({0: -1}, r"\[0\]=-1"),
        ({0: float("nan")}, r"\[0\]=nan"),
        ({0: None}, r"\[0\]=None"),
        ([1], r"=\[1\]"),
    ],
)
def test_unknown_devices_and_sizes_are_refused(budget, told):
    for function in (get_max_memory, lambda budget: get_balanced_memory(_model(), budget)):
        with pytest.raises(ValueError, match=f"max_memory.*{told}"):
            function(budget)


def test_devices_that_are_not_there_are_warned_about_once(caplog):
    get_max_memory({101: 5, 100: 5, "cpu": 5})
    (told,) = caplog.messages
    assert told.startswith("Devices in max_memory that are not available: [100, 101]; available devices are [")
    caplog.clear()
    get_balanced_memory(_model(), {100: 5})  # told when the budgets are used
    assert not caplog.messages


def test_a_budget_of_the_caller_stays_as_it_was():
    budget = {0: "1KB", 1: 500}
    get_balanced_memory(_model(), budget)
    assert budget == {0: "1KB", 1: 500}


def _model():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))  # 6 x 64 bytes


def test_an_even_share_plus_margin_and_the_rest_on_the_last_device():
    budgets = get_balanced_memory(_model(), {0: 1000, 1: 1000, 2: 1000, "cpu": 7})
    assert budgets == {0: 128 + 80, 1: 128 + 80, 2: 1000, "cpu": 7}


def test_low_zero_frees_the_first_device_as_far_as_the_others_can_hold_the_model():
    assert get_balanced_memory(_model(), {0: 1000, 1: 1000, 2: 1000}, low_zero=True)[0] == 0
    assert get_balanced_memory(_model(), {0: 1000, 1: 300}, low_zero=True)[0] == 384 - 300


def test_indices_need_not_begin_at_zero_or_follow_each_other():
    assert get_balanced_memory(_model(), {1: 1000, 3: 1000}) == {1: 192 + 80, 3: 1000}
    # 1.15.0 takes positions for indices here: it raises KeyError, or counts other devices than those that are used.
    assert get_balanced_memory(_model(), {0: 1000, 1: 0, 2: 300}, low_zero=True)[0] == 384 - 300
    assert get_balanced_memory(_model(), {1: 1000, 3: 1000}, low_zero=True) == {1: 0, 3: 1000}


def test_a_model_without_modules_has_no_margin():
    model = nn.ParameterList([nn.Parameter(_model()[0].weight.detach()) for _ in range(4)])
    assert get_balanced_memory(model, {0: 1000, 1: 1000}) == {0: 128, 1: 1000}


def test_whole_blocks_widen_the_margin():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False)
    )
    plain = get_balanced_memory(model, {0: 1000, 1: 1000})[0]
    whole = get_balanced_memory(model, {0: 1000, 1: 1000}, no_split_module_classes="Sequential")[0]
    assert (plain, whole) == (96 + 80, 96 + 160)
