"""Weights of bitsandbytes, with the real library on the CPU: quantised when they are placed, and never without their scales."""

import copy

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.extensions.big_models.loading import quantize_and_offload_8bit
from accelerate.extensions.big_models.placement import align_module_device, quantizes, set_module_tensor_to_device
from accelerate.extensions.big_models.store import load_offloaded_weight
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from cases import cases

bnb = pytest.importorskip("bitsandbytes")

KINDS = ["int8", "fp4", "nf4-double"]
INPUT = torch.linspace(-1, 1, 3 * 128).reshape(3, 128)


def layer(kind, seed=0, outputs=128):
    """A layer whose weight is not quantised yet."""
    torch.manual_seed(seed)
    if kind == "int8":
        made = bnb.nn.Linear8bitLt(128, outputs, has_fp16_weights=False, threshold=6.0)
    else:
        kind, _, double = kind.partition("-")
        made = bnb.nn.Linear4bit(
            128, outputs, compute_dtype=torch.float32, compress_statistics=bool(double), quant_type=kind
        )
    return made.requires_grad_(False).eval()


def quantised(kind, seed=0):
    return layer(kind, seed).to("cpu")


def emptied(kind):
    made = layer(kind)
    for name in ("weight", "bias"):
        set_module_tensor_to_device(made, name, "meta")
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_quantised_as_the_library_does_it(kind):
    expected, source = quantised(kind), layer(kind)
    there = layer(kind)
    for _ in range(2):  # the second time nothing is left to do
        set_module_tensor_to_device(there, "weight", "cpu")
        assert torch.equal(there(INPUT), quantised(kind)(INPUT))
    made = emptied(kind)
    set_module_tensor_to_device(made, "bias", "cpu", value=source.bias)
    value = source.weight.data
    before = value.clone()
    set_module_tensor_to_device(made, "weight", "cpu", value=value)
    assert type(made.weight) is type(source.weight) and not made.weight.requires_grad
    assert torch.equal(made.weight.data, expected.weight.data) and torch.equal(value, before)
    assert torch.equal(made(INPUT), expected(INPUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_weight_is_handed_over_with_its_scales(kind):
    donor, made = quantised(kind, seed=1), quantised(kind)
    expected = quantised(kind, seed=1)(INPUT)
    made(INPUT)  # the layer has taken the scales of its first weight
    set_module_tensor_to_device(made, "weight", "cpu", value=donor.weight)
    set_module_tensor_to_device(made, "bias", "cpu", value=donor.bias)
    assert torch.equal(made(INPUT), expected) and torch.equal(made(INPUT), expected)
    assert torch.equal(donor(INPUT), expected), "the weight that was copied has changed"
    source = layer(kind, seed=2)  # and numbers that are not quantised yet
    for name in ("weight", "bias"):
        set_module_tensor_to_device(made, name, "cpu", value=getattr(source, name).data)
    assert torch.equal(made(INPUT), quantised(kind, seed=2)(INPUT))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ran_before", [False, True])
def test_on_meta_a_weight_keeps_its_scales_and_takes_its_numbers_back(kind, ran_before):
    made = quantised(kind)
    expected = quantised(kind)(INPUT)
    numbers = made.weight.data.clone()
    if ran_before and kind == "int8":
        made(INPUT)
    set_module_tensor_to_device(made, "weight", "meta")
    assert made.weight.is_meta and made.weight.shape == numbers.shape and made.weight.dtype is numbers.dtype
    if kind == "int8":
        assert made.state.CB is None and made.state.SCB is None, "the layer still holds the numbers"
    for _ in range(2):
        scales = {"fp16_statistics": made.weight.SCB} if kind == "int8" else {}
        set_module_tensor_to_device(made, "weight", "cpu", value=numbers, **scales)
        assert torch.equal(made(INPUT), expected)
        set_module_tensor_to_device(made, "weight", "meta")
    whole = quantised(kind).state_dict()
    kept = made.state_dict()
    assert kept.keys() == whole.keys()
    assert all(torch.equal(kept[name], whole[name]) for name in whole if name != "weight")


def test_eight_bit_numbers_are_not_cast_and_get_the_scales_given():
    made, donor = emptied("int8"), quantised("int8", seed=1)
    set_module_tensor_to_device(
        made, "weight", "cpu", value=donor.weight.data, dtype=torch.float16, fp16_statistics=donor.weight.SCB
    )
    set_module_tensor_to_device(made, "bias", "cpu", value=donor.bias)
    assert made.weight.dtype is torch.int8 and torch.equal(made(INPUT), donor(INPUT))


@cases(
    "kind, value, text",
    ("int8", torch.ones(128, 128, dtype=torch.int8), "fp16_statistics"),
    ("int8", torch.ones(3, 4), r"\(3, 4\).*\(128, 128\)"),
    ("nf4-double", torch.ones(8192, 1, dtype=torch.uint8), "without its scales"),
    ("nf4-double", torch.ones(128, 64), r"\(128, 64\).*\(128, 128\)"),
)
def test_values_that_mean_nothing_are_refused(kind, value, text):
    made = emptied(kind)
    with pytest.raises(ValueError, match=text):
        set_module_tensor_to_device(made, "weight", "cpu", value=value)
    assert made.weight.is_meta


def test_values_are_cast_before_they_are_quantised():
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        made = emptied("fp4")
        set_module_tensor_to_device(
            made, "weight", "cpu", value=torch.ones(128, 128, dtype=torch.float16), dtype=dtype
        )
        assert made.weight.quant_state.dtype is expected
    set_module_tensor_to_device(made, "weight", "meta")
    assert emptied("int8").weight.dtype is torch.float32
    cast = emptied("int8")
    set_module_tensor_to_device(cast, "weight", "meta", dtype=torch.float16)
    assert cast.weight.dtype is torch.float16


def test_weights_that_stay_in_half_precision_are_ordinary_ones():
    made = bnb.nn.Linear8bitLt(128, 128, has_fp16_weights=True)
    assert not quantizes(made.weight)
    set_module_tensor_to_device(made, "weight", "cpu", value=torch.ones(128, 128))
    assert made.weight.dtype is torch.float32 and made.weight.requires_grad
    assert quantizes(layer("int8").weight) and quantizes(layer("fp4").weight) and not quantizes(torch.ones(1))


def test_packed_weights_in_a_floating_point_storage():
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(128, 128, False, torch.float32, quant_type="nf4", quant_storage=torch.bfloat16)
    made = made.requires_grad_(False).to("cpu")  # training, so that no CPU packs it in its own way
    expected, numbers = made(INPUT), made.weight.data.clone()
    set_module_tensor_to_device(made, "weight", "meta")
    set_module_tensor_to_device(made, "weight", "cpu", value=numbers)
    assert made.weight.dtype is torch.bfloat16 and torch.equal(made(INPUT), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_align_leaves_the_layer_as_it_was(kind, device):
    made = quantised(kind)
    with torch.no_grad():
        expected = made(INPUT)
        weight = made.weight
        with align_module_device(made, device):
            assert made.weight.device.type == device
            assert device == "meta" or torch.equal(made(INPUT), expected)
        assert made.weight is weight and torch.equal(made(INPUT), expected)


def model(kind, before):
    made = nn.Sequential(quantised(kind), nn.ReLU(), quantised(kind, seed=1), nn.LayerNorm(128)).requires_grad_(False)
    made.eval()
    if before:
        made(INPUT)
    return made


OFFLOADS = {
    "cpu_offload": lambda made, folder: cpu_offload(made, "cpu"),
    "disk_offload": lambda made, folder: disk_offload(made, folder, "cpu"),
    "dispatch_model": lambda made, folder: dispatch_model(
        made, {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}, offload_dir=folder
    ),
    "hook": lambda made, folder: add_hook_to_module(made[2], AlignDevicesHook("cpu", offload=True)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", OFFLOADS)
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "used"])
def test_offloaded_layers_give_the_same_bits(kind, way, before, tmp_path):
    with torch.no_grad():
        expected = model(kind, before)(INPUT)
        made = model(kind, before)
        OFFLOADS[way](made, tmp_path)
        assert made[2].weight.is_meta
        for _ in range(3):
            assert torch.equal(made(INPUT), expected)
        assert made[2].weight.is_meta
        remove_hook_from_submodules(made)
        assert not any(tensor.is_meta for tensor in made.parameters())
        assert torch.equal(made(INPUT), expected)


def test_offloaded_models_take_no_memory_between_forwards_and_are_copied_apart(tmp_path):
    made = model("int8", before=True)
    expected = model("int8", before=False)(INPUT)
    disk_offload(made, tmp_path, "cpu")
    for one in (made, copy.deepcopy(made), made):
        with torch.no_grad():
            assert torch.equal(one(INPUT), expected)
        for part in (one[0], one[2]):
            assert part.weight.is_meta and part.weight.CB is None and part.state.CB is None and part.state.SCB is None


@pytest.mark.parametrize("prequantised", [False, True])
def test_layers_are_written_as_they_compute(prequantised, tmp_path):
    # A name that holds the word once more: only the end tells the scales.
    made = nn.ModuleDict({"weighting": layer("int8")})
    value, expected = made["weighting"].weight.data.clone(), quantised("int8").weight
    index, scales = {}, expected.SCB if prequantised else None
    given = expected.data if prequantised else value
    quantize_and_offload_8bit(made, given, "weighting.weight", torch.float16, tmp_path, index, scales)
    assert set(index) == {"weighting.weight", "weighting.SCB"}
    written = {name: load_offloaded_weight(tmp_path / f"{name}.dat", entry) for name, entry in index.items()}
    assert torch.equal(written["weighting.weight"], expected.data)
    assert torch.equal(written["weighting.SCB"], expected.SCB)
    weight = made["weighting"].weight
    assert weight.is_meta and weight.dtype is torch.int8 and torch.equal(weight.SCB, expected.SCB)
