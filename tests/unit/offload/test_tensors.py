"""Names of tensors, those that several names share, and the bytes that tensors, modules and layers take."""

import pytest
import torch
from torch import nn

from accelerate.config.enums import CustomDtype
from accelerate.offload.tensors import (
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    device_of,
    dtype_byte_size,
    find_tied_parameters,
    format_bytes,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
    get_non_persistent_buffers,
    is_peft_model,
    named_module_tensors,
    retie_parameters,
)

# --- names ---


def test_tensors_come_in_order_and_asking_changes_nothing():
    inner = nn.BatchNorm1d(2)
    inner.register_buffer("mask", torch.ones(1), persistent=False)
    model = nn.Sequential(nn.Linear(2, 2), inner)
    assert [name for name, _ in named_module_tensors(model)] == []
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    assert names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"] and {"1.mask", "1.running_mean"} < set(names)
    assert "1.running_mean" not in dict(named_module_tensors(model, include_buffers=False, recurse=True))
    before = [set(module._non_persistent_buffers_set) for module in model.modules()]
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"mask"}
    found = get_non_persistent_buffers(model, recurse=True, fqns=True)
    assert found == {"1.mask"}
    found.add("other")
    assert [set(module._non_persistent_buffers_set) for module in model.modules()] == before


# --- ties ---


def _tied():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("c", "a", "b")})
    model["b"].weight = model["c"].weight
    return model


def test_tied_names_are_found_and_tied_again_to_the_one_that_holds_data():
    model = _tied()
    groups = find_tied_parameters(model)
    assert groups == [["b.weight", "c.weight"]] and find_tied_parameters(nn.Linear(2, 2)) == []
    kept = model["c"].weight
    model["b"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    retie_parameters(model, groups)
    assert model["b"].weight is kept
    first, second = (nn.Parameter(torch.empty(2, 2, device="meta")) for _ in range(2))
    model["b"].weight, model["c"].weight = first, second
    retie_parameters(model, groups)  # nothing to share yet
    assert model["b"].weight is first and model["c"].weight is second
    assert check_tied_parameters_in_config(model) is is_peft_model(model) is False


def test_the_longest_entry_gives_the_device():
    device_map = {"": "disk", "a": 0, "a.b": 1}
    assert [device_of(name, device_map) for name in ("a.b.w", "a.c", "ab")] == [1, 0, "disk"]
    with pytest.raises(ValueError, match=r"'x\.w'"):
        device_of("x.w", {"a": 0})


def test_many_ties_over_several_devices_warn_once(caplog):
    tied = [[f"a.{number}", f"b.{number}"] for number in range(12)]
    check_tied_parameters_on_same_device([*tied, ["a.x", "a.y"]], {"a": 0, "b": "disk"})
    (message,) = caplog.messages
    assert "{'a.0': 0, 'b.0': 'disk'}" in message and "a.4" in message and "a.5" not in message
    assert "and 7 more" in message
    caplog.clear()
    check_tied_parameters_on_same_device(tied, {"": 0})
    assert not caplog.messages
    with pytest.raises(ValueError, match=r"'c\.0'"):
        check_tied_parameters_on_same_device([["a.0", "c.0"]], {"a": 0})


def test_size_with_ties_takes_the_first_holder_and_each_once():
    sizes, module = {"a": 10, "b": 14, "b.v": 3, "b.w": 6}, nn.Identity()
    waiting = [("c", module), ("b", module), ("b.w", module)]
    assert get_module_size_with_ties(["b.w", "b.v"], 10, sizes, waiting) == (18, ["b"], [module])
    assert get_module_size_with_ties(["x.*", "b"], 10, sizes, []) == (10, [], [])


# --- bytes ---


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


class _Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.index = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


def test_every_prefix_sums_what_is_below_it_and_tied_weights_count_once():
    sizes = compute_module_sizes(_Mixed())
    assert sizes["layer"] == sizes["layer.weight"] + sizes["layer.bias"] == 64
    assert sizes["norm"] == 4 * 4 * 4 + 8 and sizes["absent"] == 0
    assert sizes[""] == sizes["layer"] + sizes["norm"] + 16
    assert compute_module_total_buffer_size(_Mixed()) == 4 * 4 * 2 + 8
    assert compute_module_sizes(_tied())[""] == 32


def test_a_dtype_shrinks_floats_but_neither_enlarges_nor_touches_integers():
    assert compute_module_sizes(_Mixed(), dtype="float16")["layer"] == 32
    assert compute_module_sizes(_Mixed(), dtype=torch.float64)["layer"] == 64
    assert compute_module_sizes(_Mixed(), dtype=torch.int8)["index"] == 16
    special = compute_module_sizes(_Mixed(), dtype="float16", special_dtypes={"layer.weight": torch.float32})
    assert (special["layer.weight"], special["layer.bias"]) == (48, 8)


def test_leaves_are_names_without_names_below():
    assert get_module_leaves({"": 3, "a": 2, "a.b": 2, "ab": 1}) == ["a.b", "ab"]
    assert get_module_leaves({"": 3}) == []
    assert get_module_leaves({"a.b.c": 1, "a.d": 1}) == ["a.b.c", "a.d"]


def test_largest_layer_respects_blocks_that_stay_whole_and_names_come_in_order():
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(6, 6)))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (168, ["1.1"])
    assert get_max_layer_size(list(model.named_children()), sizes, ["Sequential"]) == (288, ["1"])
    assert calculate_maximum_sizes(model) == (408, (168, ["1.1"]))
    model._no_split_modules = "Sequential"
    assert calculate_maximum_sizes(model)[1][1] == ["1"]
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    sizes = compute_module_sizes(model)
    for modules in (list(model.named_children()), [("", model)]):
        assert get_max_layer_size(modules, sizes, None) == (48, ["0", "1.0", "2"])
    assert get_max_layer_size([], sizes, None) == (0, [])


def test_class_names():
    assert class_names(None) == set()
    assert class_names("Block") == class_names(("Block",)) == class_names({"Block"}) == {"Block"}
    assert class_names([nn.Linear, "Block"]) == {"Linear", "Block"} and class_names(nn.Linear) == {"Linear"}
    with pytest.raises(ValueError, match="no_split_module_classes holds 3"):
        class_names(["Block", 3])


def test_sizes_for_people():
    sizes = [0, 1023, 1024, 3 * 2**19, 5 * 2**30, 0.125, -2048, float("inf")]
    written = ["0 bytes", "1023 bytes", "1.00 KiB", "1.50 MiB", "5.00 GiB", "0.125 bytes", "-2.00 KiB", "inf GiB"]
    assert [format_bytes(size) for size in sizes] == written
