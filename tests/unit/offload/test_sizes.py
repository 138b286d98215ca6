"""Bytes of dtypes, modules and layers."""

import pytest
import torch
from torch import nn

from accelerate.config.enums import CustomDtype
from accelerate.offload.tensors import (
    _get_proper_dtype,
    calculate_maximum_sizes,
    class_names,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    format_bytes,
    get_max_layer_size,
    get_module_leaves,
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1GB", 10**9),
        ("1GiB", 2**30),
        ("1.5GB", 1_500_000_000),
        ("3KiB", 3072),
        ("2 MB", 2 * 10**6),
        ("8Gb", 10**9),
        ("1e3MB", 10**9),
        ("1_000MB", 10**9),
        (7, 7),
    ],
)
def test_sizes_are_read_with_their_units(size, expected):
    assert convert_file_size_to_int(size) == expected


@pytest.mark.parametrize("size", ["abc", "-1GB", -1, "5", "GB", None, 1.5])
def test_what_is_no_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match="size="):
        convert_file_size_to_int(size)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bool, 1 / 8), (torch.float8_e4m3fn, 1), ("float16", 2), (torch.int64, 8), (CustomDtype.INT4, 0.5)],
)
def test_dtype_byte_size(dtype, expected):
    assert dtype_byte_size(dtype) == expected


def test_dtype_names_resolve_and_unknown_ones_raise():
    assert _get_proper_dtype("torch.float16") is torch.float16
    assert _get_proper_dtype(None) is None
    with pytest.raises(ValueError, match="bf16"):
        _get_proper_dtype("bf16")


class _Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.index = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)


def test_every_prefix_sums_what_is_below_it():
    sizes = compute_module_sizes(_Mixed())
    assert sizes["layer"] == sizes["layer.weight"] + sizes["layer.bias"] == 64
    assert sizes["norm"] == 4 * 4 * 4 + 8
    assert sizes[""] == sizes["layer"] + sizes["norm"] + 16
    assert sizes["absent"] == 0


def test_a_dtype_shrinks_floats_but_neither_enlarges_nor_touches_integers():
    assert compute_module_sizes(_Mixed(), dtype="float16")["layer"] == 32
    assert compute_module_sizes(_Mixed(), dtype=torch.float64)["layer"] == 64
    assert compute_module_sizes(_Mixed(), dtype=torch.int8)["index"] == 16
    special = compute_module_sizes(_Mixed(), dtype="float16", special_dtypes={"layer.weight": torch.float32})
    assert (special["layer.weight"], special["layer.bias"]) == (48, 8)


def test_buffers_alone_and_tied_weights_once():
    assert compute_module_total_buffer_size(_Mixed()) == 4 * 4 * 2 + 8
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert compute_module_sizes(tied)[""] == 16


def test_leaves_are_names_without_names_below():
    assert get_module_leaves({"": 3, "a": 2, "a.b": 2, "ab": 1}) == ["a.b", "ab"]
    assert get_module_leaves({"": 3}) == []
    assert get_module_leaves({"a.b.c": 1, "a.d": 1}) == ["a.b.c", "a.d"]


def test_largest_layer_respects_blocks_that_stay_whole():
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(6, 6)))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (168, ["1.1"])
    assert get_max_layer_size(list(model.named_children()), sizes, ["Sequential"]) == (288, ["1"])
    assert calculate_maximum_sizes(model) == (408, (168, ["1.1"]))
    model._no_split_modules = "Sequential"
    assert calculate_maximum_sizes(model)[1][1] == ["1"]


def test_the_largest_layers_are_named_in_the_order_of_the_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, None) == (48, ["0", "1.0", "2"])
    assert get_max_layer_size([("", model)], sizes, None) == (48, ["0", "1.0", "2"])
    assert get_max_layer_size([], sizes, None) == (0, [])


@pytest.mark.parametrize("wrong", [{"dtype": "bf16"}, {"dtype": 2}, {"special_dtypes": {"layer.weight": "x"}}])
def test_dtypes_are_checked_before_anything_is_counted(wrong):
    argument = "dtype" if "dtype" in wrong else r"special_dtypes\['layer.weight'\]"
    with pytest.raises(ValueError, match=f"{argument}=.*float16"):
        compute_module_sizes(nn.Identity(), **wrong)


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
