"""Collectives and the process state with two processes or more; exits with an error if anything is off.

Run by `tests/distributed/test_operations.py`, or by hand: torchrun --nproc_per_node 2 check_operations.py
"""

import logging
from collections import UserDict, namedtuple
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import fresh_accelerator, raised

from accelerate import comm
from accelerate.logging import get_logger
from accelerate.process import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import operations as ops
from accelerate.utils.random import set_seed, synchronize_rng_states

Pair = namedtuple("Pair", "x y")


def expect(error: type[Exception], function, *fragments: str) -> None:
    """Require that a call raises an error whose text has all fragments."""
    with raised(error, *fragments):
        function()


def check_state(state: PartialState) -> None:
    assert state.use_distributed and state.num_processes == dist.get_world_size() > 1
    assert state.process_index == dist.get_rank() and state.is_last_process == (
        state.process_index == state.num_processes - 1
    )
    if state.device.type == "cpu":
        assert state.distributed_type == "MULTI_CPU" and state.backend == "gloo"
    expect(ValueError, lambda: PartialState(timeout=timedelta(seconds=77)), "seconds=77", "timeout")


def check_gather(rank: int, size: int, device: torch.device) -> None:
    everyone = list(range(size))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        wanted = torch.tensor(everyone, device=device).to(dtype)
        assert torch.equal(ops.gather(wanted[rank]), wanted), dtype
        assert torch.equal(ops.gather(wanted[rank : rank + 1]), wanted), dtype
    data = {"a": torch.full((2, 3), rank, device=device), "b": Pair(torch.tensor([rank], device=device), [])}
    for _ in range(4):
        result = ops.gather(UserDict(data))
        assert isinstance(result, UserDict) and isinstance(result["b"], Pair)
        assert result["a"].shape == (2 * size, 3) and result["b"].x.tolist() == everyone
        large = ops.gather(torch.full((300_000,), float(rank), device=device, requires_grad=True))
        assert large.view(size, -1).mean(1).tolist() == everyone and not large.requires_grad
    columns = torch.arange(6.0, device=device).view(2, 3).t() + rank
    assert torch.equal(ops.gather(columns), torch.cat([columns - rank + r for r in everyone]))
    assert ops.gather(torch.ones(0, 4, device=device)).shape == (0, 4)
    assert ops.gather_object([rank, {"r": rank}]) == [item for r in everyone for item in (r, {"r": r})]
    assert ops.gather_object(["x" * 10_000 * (rank + 1)]) == ["x" * 10_000 * (r + 1) for r in everyone]


def check_reduce_and_broadcast(rank: int, size: int, device: torch.device) -> None:
    total = sum(range(1, size + 1))
    for length in (1, 2_000_000):
        mine = torch.full((length,), rank + 1.0, device=device)
        assert ops.reduce({"a": mine}, "sum")["a"][-1].item() == total
        assert ops.reduce(mine)[0].item() == total / size and mine[0].item() == rank + 1
        assert ops.reduce(mine, "max")[-1].item() == size
        assert ops.broadcast([mine.clone()])[0][-1].item() == 1
        assert ops.broadcast(mine, size - 1) is mine and mine[0].item() == size
    assert ops.reduce(torch.tensor(rank, device=device), "sum").shape == ()
    assert ops.reduce(torch.tensor([rank], device=device), "mean").item() == (size - 1) / 2
    weight = torch.nn.Parameter(torch.full((2,), rank + 1.0, device=device))
    for reduction, value, gradient in (("sum", total, 1), ("mean", total / size, 1 / size), ("max", size, 1)):
        weight.grad = None
        loss = ops.reduce(weight.sum() * (rank + 1), reduction)
        loss.backward()
        torch.testing.assert_close(weight.grad.cpu(), torch.full((2,), gradient * (rank + 1.0)))
        assert ops.reduce(weight, reduction)[0].item() == value
    columns = torch.full((2, 3), rank, device=device)
    data = {"a": weight, "b": [Pair(columns[:, 1], torch.tensor(rank, device=device))]}
    result = ops.broadcast(data, size - 1)
    assert result["a"] is weight and weight.tolist() == [size] * 2 and weight.requires_grad
    assert columns[0].tolist() == [rank, size - 1, rank] and data["b"][0].y.item() == size - 1
    communicator = comm.current()
    assert communicator.all_reduce(torch.tensor([rank], device=device), "max").item() == size - 1
    assert communicator.all_reduce(torch.tensor([rank], device=device), "min").item() == 0
    objects = [rank, {"r": rank}]
    assert ops.broadcast_object_list(objects, from_process=size - 1) is objects
    assert objects == [size - 1, {"r": size - 1}]
    tensor = torch.ones(2, 3, dtype=torch.float64, device=device) * 5 if rank == size - 1 else None
    shape, code = ops.gather_tensor_shape(tensor)
    assert shape.tolist() == [[2], [3]] and ops.TENSOR_INT_TO_DTYPE[code] is torch.float64
    assert ops.copy_tensor_to_devices(tensor).sum().item() == 30


def check_pad(rank: int, size: int, device: torch.device) -> None:
    data = {"a": torch.ones(2 + rank, device=device), "b": [torch.ones(2, 2 + rank, device=device), torch.tensor(1.0)]}
    padded = ops.pad_across_processes(data, pad_index=7)
    assert padded["a"].tolist() == [1] * (2 + rank) + [7] * (size - 1 - rank)
    assert padded["b"][0].shape == (2, 2 + rank) and padded["b"][1].shape == ()
    wide = ops.pad_across_processes(data["b"][0], dim=1, pad_first=True)
    assert wide.shape == (2, size + 1) and wide[0].tolist() == [0] * (size - 1 - rank) + [1] * (2 + rank)
    assert ops.gather(padded["a"]).shape == (size * (size + 1),)


def check_disagreement(rank: int, size: int, device: torch.device) -> None:
    """Every rank must raise, none may hang, and the next operation must work."""
    error = ops.DistributedOperationException
    other = int(rank == 1)
    shapes = ("Process 0: float32[2]", "Process 1: float32[3]", "process(es) 1")
    for _ in range(3):
        expect(error, lambda: ops.gather(torch.ones(2 + other, device=device)), *(shapes if size > 2 else shapes[:2]))
        assert ops.gather(torch.tensor([rank], device=device)).tolist() == list(range(size))
    expect(error, lambda: ops.reduce(torch.ones(2 + other, device=device)), "operations.reduce")
    expect(error, lambda: ops.broadcast(torch.ones(2 + other, device=device)), "operations.broadcast")
    expect(
        error, lambda: ops.gather(torch.ones(2).to(device, torch.float64 if other else torch.float32)), "float64[2]"
    )
    expect(error, lambda: ops.gather({"ab"[other]: torch.ones(1, device=device)}), "structure")
    expect(error, lambda: ops.pad_across_processes(torch.ones([2] * (1 + other), device=device)))
    expect(error, lambda: ops.gather(torch.ones(500_000 + other, device=device)), "500001")
    expect(error, lambda: (ops.gather if other else ops.reduce)(torch.ones(1, device=device)), "`gather`", "`reduce`")
    expect(
        error, lambda: ops.gather_object([1]) if other else ops.gather(torch.ones(1, device=device)), "`gather_object`"
    )
    PartialState().debug = True
    expect(error, lambda: ops.gather({"a": torch.ones(2 + other, device=device)}), "'a': float32[3]")
    expect(error, lambda: ops.pad_across_processes(torch.ones([2] * (1 + other), device=device)), "float32[2, 2]")
    ops.pad_across_processes(torch.ones(2 + rank, device=device))
    PartialState().debug = False
    assert ops.gather(torch.tensor([rank], device=device)).tolist() == list(range(size))


def check_splitting_and_order(state: PartialState, rank: int, size: int) -> None:
    with state.split_between_processes(list(range(2 * size + 1)), apply_padding=True) as piece:
        assert len(piece) == 3 and ops.gather_object(piece)[: 2 * size + 1][:3] == [0, 1, 2]
    store = dist.distributed_c10d._get_default_store()
    for first in (state.main_process_first, state.local_main_process_first):
        with first():
            turn = store.add(f"turn/{first.__name__}", 1)
            assert (turn == 1) == (rank == 0)
    logger, handler, heard = get_logger(__name__), logging.Handler(), []
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.logger.addHandler(handler)
    logger.warning("in order", in_order=True)
    assert ops.gather_object(heard) == [f"[RANK {each}] in order" for each in range(size)]
    assert (state.on_main_process(lambda: "ran")() == "ran") == (rank == 0)
    assert (state.on_process(lambda: "ran", process_index=1)() == "ran") == (rank == 1)


def check_random(rank: int, size: int) -> None:
    set_seed(3, device_specific=True)
    assert len(set(ops.gather_object([torch.rand(1).item()]))) == size
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    drawn = (torch.rand(1).item(), torch.rand(1, generator=generator).item())
    assert len(set(ops.gather_object([drawn]))) == 1


def check_live_accelerator() -> None:
    """An Accelerator survives a reset of the shared state: it gathers and trains, and a later one has settings of its own."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    net = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = dict(accelerator.state.__dict__)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState._shared_state == {} and PartialState._shared_state == {}
    assert accelerator.state.__dict__ == before
    later = fresh_accelerator(mixed_precision="bf16")
    assert later.mixed_precision == "bf16" and accelerator.mixed_precision == "no"
    for each in (accelerator, later):
        assert each.distributed_type == before["distributed_type"] and each.num_processes == dist.get_world_size()
        rank = torch.tensor([each.process_index], device=each.device)
        assert each.gather(rank).tolist() == list(range(each.num_processes))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
        optimizer.step()


def check_reset_and_adopt(state: PartialState) -> None:
    group, before = dist.group.WORLD, dict(state.__dict__)
    AcceleratorState._reset_state(reset_partial_state=True)
    state.wait_for_everyone()
    adopted = PartialState(timeout=timedelta(minutes=7))
    assert dist.group.WORLD is group
    assert {**adopted.__dict__, "_cpu": before["_cpu"]} == before and adopted.__dict__ is not state.__dict__
    assert ops.gather_with(comm.for_type(state.distributed_type), torch.tensor([1], device=state.device)).sum() > 1
    adopted.destroy_process_group()
    assert not dist.is_initialized() and PartialState().process_index == before["process_index"]
    PartialState._reset_state()
    fresh = PartialState()
    assert dist.is_initialized() and fresh.num_processes == before["num_processes"]
    assert len(ops.gather_object([fresh.process_index])) == fresh.num_processes


def main() -> None:
    state = PartialState()
    rank, size, device = state.process_index, state.num_processes, state.device
    check_state(state)
    check_gather(rank, size, device)
    check_reduce_and_broadcast(rank, size, device)
    check_pad(rank, size, device)
    check_disagreement(rank, size, device)
    check_splitting_and_order(state, rank, size)
    check_random(rank, size)
    check_live_accelerator()
    check_reset_and_adopt(PartialState())
    PartialState().wait_for_everyone()
    PartialState().print("ok operations")


if __name__ == "__main__":
    main()
