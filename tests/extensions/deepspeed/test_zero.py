"""DeepSpeed's files, made here as its ranks write them: read without DeepSpeed, and opened only where they are needed."""

import dataclasses
import os
import sys
import types

import pytest
import torch

from accelerate.checkpoint import layouts
from accelerate.checkpoint.formats import describe
from accelerate.checkpoint.manifest import DamagedCheckpoint, Manifest
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.extensions.deepspeed import zero

RANKS = 4
SHAPES = {"a": torch.Size((4, 3)), "b": torch.Size((7,)), "c": torch.Size((5, 2))}
WEIGHTS = {
    name: torch.arange(shape.numel()).float().view(shape) + 100 * number
    for number, (name, shape) in enumerate(SHAPES.items())
}
MOMENTS = {name: value + 0.5 for name, value in WEIGHTS.items()}


@dataclasses.dataclass
class fragment_address:
    numel: int
    start: int


@pytest.fixture
def deepspeed_record(monkeypatch):
    """Let what is saved name DeepSpeed's class."""
    name = "deepspeed.utils.tensor_fragment"
    for end in (9, 15, len(name)):
        monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    sys.modules[name].fragment_address = fragment_address
    monkeypatch.setattr(fragment_address, "__module__", name)


def whole(values, order):
    return torch.cat([values[name].flatten() for name in order])


def sliced(order):
    """Stages 1 and 2: what each rank has of one flat tensor, and where the parameters are in it."""
    length = -(-sum(shape.numel() for shape in SHAPES.values()) // RANKS)
    for rank in range(RANKS):
        first, last, begin, places = rank * length, (rank + 1) * length, 0, {}
        for name in order:
            end = begin + SHAPES[name].numel()
            if max(first, begin) < min(last, end):
                start = max(first, begin)
                places[name] = fragment_address(min(last, end) - start, start - first)
            begin = end
        base = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": whole(MOMENTS, order)[first:last].clone()}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        yield {
            "single_partition_of_fp32_groups": [whole(WEIGHTS, order)[first:last].clone()],
            "param_slice_mappings": [places],
            "base_optimizer_state": base,
        }


def split(order):
    """Stage 3: an even part of every parameter."""

    def part(values, rank):
        pieces = []
        for name in order:
            start, count, length = zero.part_of(values[name].numel(), rank, RANKS)
            piece = torch.zeros(length)
            piece[:count] = values[name].flatten()[start : start + count]
            pieces.append(piece)
        return torch.cat(pieces)

    for rank in range(RANKS):
        base = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": part(MOMENTS, rank)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        yield {"fp32_flat_groups": [part(WEIGHTS, rank)], "optimizer_state_dict": base}


def written(folder, how, order=tuple(SHAPES)):
    folder = folder / "pytorch_model"
    folder.mkdir(parents=True)
    shapes = [{name: SHAPES[name] for name in SHAPES}]
    for rank, shard in enumerate(how(order)):
        torch.save({"optimizer_state_dict": shard}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        head = {"module": {name: value.bfloat16() for name, value in WEIGHTS.items()}, "param_shapes": shapes}
        head |= {"shared_params": {}, "buffer_names": [], "frozen_param_shapes": None}
        name = f"zero_pp_rank_{rank}_mp_rank_00" if how is split else "mp_rank_00"
        torch.save(head, folder / f"{name}_model_states.pt")
    return folder


def ruin(folder, rank):
    (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"nothing that anybody can read")


@pytest.mark.parametrize("how", [sliced, split])
def test_the_whole_is_joined(tmp_path, deepspeed_record, how):
    folder = written(tmp_path, how)
    model, optimizer = zero.ZeroLayout().open(str(folder), "model"), zero.ZeroLayout().open(str(folder), "optimizer")
    read, states = model.read(model.state), optimizer.read(optimizer.state)
    assert all(torch.equal(read[name], WEIGHTS[name]) and read[name].dtype is torch.float32 for name in SHAPES)
    assert all(torch.equal(states["state"][name]["exp_avg"], MOMENTS[name]) for name in SHAPES)
    assert all(values["step"] == 3 for values in states["state"].values())
    assert states["param_groups"] == [{"lr": 0.1, "params": list(SHAPES)}]


def test_parameters_that_lie_in_another_order_are_found(tmp_path, deepspeed_record):
    """DeepSpeed's round_robin_gradients puts them so."""
    model = zero.ZeroLayout().open(str(written(tmp_path, sliced, ("c", "a", "b"))), "model")
    read = model.read(model.state)
    assert all(torch.equal(read[name], WEIGHTS[name]) for name in SHAPES)


@pytest.mark.parametrize("how", [sliced, split])
def test_files_are_opened_by_those_that_need_them(tmp_path, deepspeed_record, how):
    folder = written(tmp_path, how)
    ruin(folder, RANKS - 1)
    model = zero.ZeroLayout().open(str(folder), "model")
    assert torch.equal(model.elements(model.state["a"], 1, 3), WEIGHTS["a"].flatten()[1:3])
    assert torch.equal(model.elements(model.state["a"], 5, 8), WEIGHTS["a"].flatten()[5:8])
    with pytest.raises(DamagedCheckpoint, match=f"rank_{RANKS - 1}_mp_rank_00_optim_states.pt could not be read"):
        model.read(model.state["c"])


def test_what_is_opened_is_compared_with_its_checksum(tmp_path, deepspeed_record):
    folder = written(tmp_path, sliced)
    names = [f"pytorch_model/{name}" for name in sorted(os.listdir(folder))]
    listing = Manifest({name: describe(tmp_path / name) for name in names})
    last = folder / f"bf16_zero_pp_rank_{RANKS - 1}_mp_rank_00_optim_states.pt"
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 1
    last.write_bytes(data)
    model = layouts.required(CheckpointFolder(str(tmp_path), listing), "model", 0, None).open()
    assert torch.equal(model.read(model.state["a"]), WEIGHTS["a"])
    with pytest.raises(DamagedCheckpoint, match="optim_states.pt has changed"):
        model.read(model.state["c"])
