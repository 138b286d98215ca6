"""The bytes that tensors and layers take, memory budgets, and device maps: computed, cleaned, checked."""

import pytest
import torch
from torch import nn

from accelerate.base.text import convert_file_size_to_int
from accelerate.config.enums import CustomDtype
from accelerate.extensions.big_models import device_map as maps
from accelerate.extensions.big_models.tensors import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_module_size_with_ties,
)
from cases import cases
from offload_models import Net


def _tied():
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("emb", "mid", "head")})
    model["head"].weight = model["emb"].weight
    return model


def test_fallback_gives_an_empty_device_something_deeper():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(2, 2), nn.Linear(10, 10)))
    budget = {0: 500, "cpu": 10**4}
    assert maps.infer_auto_device_map(model, budget) == {"": "cpu"}
    device_map = maps.infer_auto_device_map(model, budget, fallback_allocation=True)
    assert device_map["1.0"] == 0 and device_map["0"] == "cpu"


def test_verbose_prints_each_step(capsys):
    maps.infer_auto_device_map(Net(), {0: 200, "cpu": 1000}, offload_buffers=True, verbose=True)
    printed = capsys.readouterr().out
    assert "Putting linear1" in printed and "Not enough space on 0" in printed


def test_devices_that_hold_nothing_are_warned_about_once(caplog):
    device_map = maps.infer_auto_device_map(Net(), {0: 10, 1: 5, 2: 0, "cpu": 1000}, offload_buffers=True)
    assert device_map == {"": "cpu"}
    (told,) = [record.getMessage() for record in caplog.records if "too little memory" in record.getMessage()]
    assert "0: 164 bytes required (64 for 'linear1', 100 kept free for the largest layer)" in told
    assert "1: 64 bytes required (64 for 'linear1', 0 kept free for the largest layer), the budget is 5" in told
    assert "2:" not in told and "cpu:" not in told  # what was told to stay empty, and what did not


def test_what_is_printed_names_what_is_split_and_what_is_tied(capsys):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    for whole, cause in (("Sequential", "it cannot be split"), (None, "it was split")):
        maps.infer_auto_device_map(model, {"cpu": 200}, no_split_module_classes=whole, verbose=True)
        refused = "Not enough space on cpu for 0 (space available 120, needed 160): "
        assert f"{refused}{cause}." in capsys.readouterr().out
    model = _tied()
    model["head"] = nn.Sequential(model["head"], nn.Linear(20, 20))
    budgets = {0: 1680 + 64, "cpu": 10**5}
    maps.infer_auto_device_map(model, budgets, no_split_module_classes=["Sequential"], verbose=True)
    refused = "Not enough space on 0 for emb (space available 64, needed 1744): tied to head, and it cannot be split."
    assert refused in capsys.readouterr().out


@cases(
    "wrong, told",
    ({"max_memory": {0: -5}}, r"max_memory\[0\]=-5"),
    ({"max_memory": {"cpu": "5"}}, r"max_memory\['cpu'\]='5'.*5GB"),
    ({"max_memory": {"gpu": 5}}, "max_memory names the device 'gpu'"),
    ({"max_memory": [1]}, r"max_memory=\[1\]"),
    ({"no_split_module_classes": [5]}, "no_split_module_classes.*5"),
    ({"dtype": "bf16"}, "dtype='bf16'.*float16"),
    ({"special_dtypes": {"norm.weight": "half_float"}}, "'half_float'.*float16"),
)
def test_mistakes_are_named(wrong, told):
    for function in (maps.infer_auto_device_map, maps.get_balanced_memory):
        with pytest.raises(ValueError, match=told):
            function(Net(), **{"max_memory": {0: 1000, 1: 1000}, **wrong})
    if "max_memory" in wrong:
        with pytest.raises(ValueError, match=told):
            maps.get_max_memory(**wrong)


def test_what_matches_nothing_does_no_harm():
    budgets = {0: 236, "cpu": 1000}
    options = {"special_dtypes": {"stranger.*": "int8"}, "no_split_module_classes": ["Stranger", nn.BatchNorm1d]}
    assert maps.infer_auto_device_map(Net(), budgets, **options) == {"": 0}
    waiting = [("linear1", nn.Linear(3, 4))]
    tied = [["linear1.w.*", "x.*"], []]
    assert maps.fallback_allocate(waiting, {"linear1": 64}, 64, tied_parameters=tied)[0] == "linear1"


def test_fallback_allocate_counts_what_is_tied():
    model = _tied()
    waiting, sizes = list(model.named_children()), compute_module_sizes(model)
    assert maps.fallback_allocate(waiting, sizes, 64)[0] == "emb"
    model["head"] = nn.Sequential(model["head"], nn.Linear(4, 4))
    waiting, sizes, tied = list(model.named_children()), compute_module_sizes(model), [["emb.weight", "head.0.weight"]]
    assert maps.fallback_allocate(waiting, sizes, 64, [], tied)[0] == "mid"


def test_what_a_device_map_lacks_is_named_and_strangers_are_warned_about():
    with pytest.raises(ValueError, match="norm.running_mean"), pytest.warns(UserWarning, match="stranger"):
        maps.check_device_map(Net(), {"linear1": 0, "linear2": 0, "stranger": 0})


def test_clean_device_map_merges_by_name_not_by_text():
    assert maps.clean_device_map({"a.b": 0, "a.c": 0, "ab": 1}) == {"ab": 1, "a": 0}
    assert maps.clean_device_map({"a.b.x": 0, "a.b.y": 0, "a.c": 1}) == {"a.c": 1, "a.b": 0}
    assert maps.clean_device_map({"a": 0, "b": 0}) == {"": 0}
    assert maps.clean_device_map({}) == {}
    assert maps.clean_device_map({"a.b.x": 0, "a.b.y": 0, "c.x": 0, "c.y": 0}, "a") == {"c.x": 0, "c.y": 0, "a": 0}
    assert maps.clean_device_map({"a": 1, "a.b": 0, "c": 1}) == {"a": 1, "a.b": 0, "c": 1}
    assert maps.clean_device_map({"a.b.x": 0, "c": 1}) == {"a.b.x": 0, "c": 1}


# --- sizes and budgets ---


def test_size_with_ties_takes_the_first_holder_and_each_once():
    sizes, module = {"a": 10, "b": 14, "b.v": 3, "b.w": 6}, nn.Identity()
    waiting = [("c", module), ("b", module), ("b.w", module)]
    assert get_module_size_with_ties(["b.w", "b.v"], 10, sizes, waiting) == (18, ["b"], [module])
    assert get_module_size_with_ties(["x.*", "b"], 10, sizes, []) == (10, [], [])


def test_sizes_are_read_with_their_units_and_others_refused_by_name():
    sizes = {"1GiB": 2**30, "1.5GB": 1_500_000_000, "3KiB": 3072, "2 MB": 2 * 10**6, 7: 7}
    sizes.update(dict.fromkeys(["1GB", "8Gb", "1e3MB", "1_000MB"], 10**9))
    assert {size: convert_file_size_to_int(size) for size in sizes} == sizes
    for size in ("abc", "-1GB", -1, "5", "GB", None, 1.5):
        with pytest.raises(ValueError, match="size="):
            convert_file_size_to_int(size)


def test_bytes_of_dtypes_and_names_that_are_none():
    dtypes = [torch.bool, torch.float8_e4m3fn, "torch.float16", torch.int64, CustomDtype.INT4]
    assert [dtype_byte_size(dtype) for dtype in dtypes] == [1 / 8, 1, 2, 8, 0.5]
    for wrong in ("bf16", 2):
        with pytest.raises(ValueError, match=f"dtype={wrong!r}"):
            dtype_byte_size(wrong)
        for options in ({"dtype": wrong}, {"special_dtypes": {"layer.weight": wrong}}):
            with pytest.raises(ValueError, match=f"dtype={wrong!r}"):
                compute_module_sizes(nn.Identity(), **options)


def test_the_largest_layer_respects_blocks_that_stay_whole():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(5, 5), nn.Linear(6, 6)))
    assert calculate_maximum_sizes(model) == (456, (168, ["0", "1.1"]))
    model._no_split_modules = "Sequential"
    assert calculate_maximum_sizes(model)[1] == (288, ["1"])


def _six(count=6):
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))  # 64 bytes each


def test_budgets_are_parsed_and_put_in_filling_order():
    budgets = maps.get_max_memory({"disk": "1KB", "cpu": 3, 1: 5, 0: "2KiB"})
    assert list(budgets.items()) == [(0, 2048), (1, 5), ("cpu", 3), ("disk", 1000)]
    assert maps.get_max_memory({"cpu": 1.5}) == {"cpu": 1.5}


def test_devices_that_are_not_there_are_warned_about_once(caplog):
    maps.get_max_memory({101: 5, 100: 5, "cpu": 5})
    (message,) = caplog.messages
    assert message.startswith("Devices in max_memory that are not available: [100, 101]; available devices are [")
    caplog.clear()
    maps.get_balanced_memory(_six(), {100: 5})  # the warning comes when the budgets are used
    assert not caplog.messages


@cases(
    "model, budget, options, balanced",
    # An even share plus the margin, and the rest on the last device.
    (_six(), {0: 1000, 1: 1000, 2: 1000, "cpu": 7}, {}, {0: 128 + 80, 1: 128 + 80, 2: 1000, "cpu": 7}),
    # As much as possible of the first device is free, as far as the others hold the model.
    (_six(), {0: 1000, 1: 1000, 2: 1000}, {"low_zero": True}, {0: 0, 1: 192 + 80, 2: 1000}),
    (_six(), {0: 1000, 1: 300}, {"low_zero": True}, {0: 384 - 300, 1: 300}),
    # Indices need not begin at zero or follow each other; 1.15.0 takes positions for indices here.
    (_six(), {1: 1000, 3: 1000}, {}, {1: 192 + 80, 3: 1000}),
    (_six(), {1: 1000, 3: 1000}, {"low_zero": True}, {1: 0, 3: 1000}),
    # A model without modules has no margin, and whole blocks widen it.
    (nn.ParameterList([torch.ones(16) for _ in range(4)]), {0: 1000, 1: 1000}, {}, {0: 128, 1: 1000}),
    (nn.Sequential(_six(2), _six(1)[0]), {0: 999, 1: 999}, {}, {0: 96 + 80, 1: 999}),
    (
        nn.Sequential(_six(2), _six(1)[0]),
        {0: 999, 1: 999},
        {"no_split_module_classes": "Sequential"},
        {0: 96 + 160, 1: 999},
    ),
)
def test_balanced_budgets(model, budget, options, balanced):
    before = dict(budget)
    assert maps.get_balanced_memory(model, budget, **options) == balanced
    assert budget == before
