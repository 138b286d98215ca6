"""The bytes that tensors, modules and layers take."""

import pytest
import torch
from torch import nn

from accelerate.config.enums import CustomDtype
from accelerate.offload.tensors import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_module_size_with_ties,
)


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
