"""Collectives with two processes or more; manually: accelerate launch --cpu --num_processes 2 check_operations.py."""

import random
from collections import UserDict, namedtuple

import torch
import torch.distributed as dist
from expect import raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader

from accelerate import Accelerator, comm
from accelerate.process import PartialState
from accelerate.utils import operations as ops

Pair = namedtuple("Pair", "x y")
RANK, SIZE, DEVICE = PartialState().process_index, PartialState().num_processes, PartialState().device
EVERYONE = list(range(SIZE))
ACCELERATOR = Accelerator()


def check_nested_tensors_are_refused() -> None:
    for layout in (torch.strided, torch.jagged):
        rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)
        for call in (ops.gather, ops.broadcast, ops.reduce):
            with raised(TypeError, "to_padded_tensor"):
                call({"x": rows})


def check_gather() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8):
        wanted = torch.tensor(EVERYONE, device=DEVICE).to(dtype)
        assert torch.equal(ops.gather(wanted[RANK]), wanted), dtype
        assert torch.equal(ops.gather(wanted[RANK : RANK + 1]), wanted), dtype
    data = {"a": torch.full((2, 3), RANK, device=DEVICE), "b": Pair(torch.tensor([RANK], device=DEVICE), [])}
    for _ in range(4):
        result = ops.gather(UserDict(data))
        assert isinstance(result, UserDict) and isinstance(result["b"], Pair)
        assert result["a"].shape == (2 * SIZE, 3) and result["b"].x.tolist() == EVERYONE
        large = ops.gather(torch.full((300_000,), float(RANK), device=DEVICE, requires_grad=True))
        assert large.view(SIZE, -1).mean(1).tolist() == EVERYONE and not large.requires_grad
    columns = torch.arange(6.0, device=DEVICE).view(2, 3).t() + RANK
    assert torch.equal(ops.gather(columns), torch.cat([columns - RANK + r for r in EVERYONE]))
    assert ops.gather(torch.ones(0, 4, device=DEVICE)).shape == (0, 4)
    assert ops.gather_object([RANK, {"r": RANK}]) == [item for r in EVERYONE for item in (r, {"r": r})]
    row = torch.tensor([RANK], device=DEVICE)
    both = (EVERYONE, {"x": ["a"] * SIZE, "n": tuple(EVERYONE)})
    assert ops.gather_object(([RANK], {"x": ["a"], "n": RANK})) == both
    assert ops.gather_object({"x": row, "none": None})["x"].tolist() == EVERYONE
    loader = ACCELERATOR.prepare(DataLoader(list(range(2 * SIZE + 1)), batch_size=1))
    found: dict = {"rows": [], "names": [], "more": []}
    for batch in loader:  # the last round is filled up
        names = [str(batch.item())]
        result = ACCELERATOR.gather_for_metrics(
            {"rows": batch, "names": names, "more": (names, batch.tolist()), "n": 1}
        )
        assert result["n"] == (1,) * SIZE
        found = {
            "rows": found["rows"] + result["rows"].tolist(),
            "names": found["names"] + result["names"],
            "more": found["more"] + result["more"][1],
        }
    assert found["rows"] == found["more"] == [int(name) for name in found["names"]] == list(range(2 * SIZE + 1))
    assert ops.gather_object({RANK: 1}) == dict.fromkeys(EVERYONE, (1,))
    for wrong, message in (
        ("text", "pass a list"),
        ({"x": torch.zeros(1, RANK)}, "cannot concatenate tensors in ['x']"),
        ({RANK: []}, "from some ranks only"),
        ({"x": [] if RANK else None}, "a NoneType and list in ['x']"),
    ):
        with raised(TypeError, message):
            ops.gather_object(wrong)
    assert ops.gather_object(["x" * 10_000 * (RANK + 1)]) == ["x" * 10_000 * (r + 1) for r in EVERYONE]


def check_gather_with_gradients() -> None:
    """A loss over the samples of all ranks: the mean of the gradients over the ranks is that of one process with all samples."""
    rows = torch.randn(2 * SIZE, 3, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    mine = rows[2 * RANK : 2 * RANK + 2]
    weight = torch.nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(6)).to(DEVICE))

    def contrast(own: torch.Tensor, everyone: torch.Tensor, first: int) -> torch.Tensor:
        labels = torch.arange(first, first + len(own), device=DEVICE)
        return torch.nn.functional.cross_entropy(own @ everyone.T, labels)

    (expected,) = torch.autograd.grad(contrast(rows @ weight, rows @ weight, 0), weight)
    for whole in (True, False):  # each rank has the loss of all samples, or that of its samples against all
        own = mine @ weight
        gathered = ACCELERATOR.gather({"a": own, "b": own.sum()}, differentiable=True)
        assert torch.equal(gathered["a"], ACCELERATOR.gather(own)) and gathered["b"].shape == (SIZE,)
        loss = contrast(gathered["a"], gathered["a"], 0) if whole else contrast(own, gathered["a"], 2 * RANK)
        (found,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(ops.reduce(found, "mean"), expected)
    (slope,) = torch.autograd.grad((ops.gather_with(comm.current(), weight.sum(), True) * (RANK + 1)).sum(), weight)
    assert slope.unique().tolist() == [sum(range(1, SIZE + 1))]


def check_reduce_and_broadcast() -> None:
    total = sum(range(1, SIZE + 1))
    for length in (1, 2_000_000):
        mine = torch.full((length,), RANK + 1.0, device=DEVICE)
        assert ops.reduce({"a": mine}, "sum")["a"][-1].item() == total
        assert ops.reduce(mine)[0].item() == total / SIZE and mine[0].item() == RANK + 1
        assert ops.reduce(mine, "max")[-1].item() == SIZE
        assert ops.broadcast([mine.clone()])[0][-1].item() == 1
        assert ops.broadcast(mine, SIZE - 1) is mine and mine[0].item() == SIZE
    assert ops.reduce(torch.tensor(RANK, device=DEVICE), "sum").shape == ()
    assert ops.reduce(torch.tensor([RANK], device=DEVICE), "mean").item() == (SIZE - 1) / 2
    for _ in range(2):  # the second call is an expected one
        short = torch.tensor([200, RANK], device=DEVICE, dtype=torch.uint8), torch.tensor(RANK > 0, device=DEVICE)
        mean, share = ops.reduce(short, "mean")
        torch.testing.assert_close(mean.cpu(), torch.tensor([200, (SIZE - 1) / 2]))
        assert abs(share.item() - (SIZE - 1) / SIZE) < 1e-6
    weight = torch.nn.Parameter(torch.full((2,), RANK + 1.0, device=DEVICE))
    kinds = (("sum", total, 1), ("mean", total / SIZE, 1 / SIZE), ("max", SIZE, 1), ("none", total, 1))
    for reduction, value, gradient in kinds:
        weight.grad = None
        loss = ops.reduce(weight.sum() * (RANK + 1), reduction)
        loss.backward()
        torch.testing.assert_close(weight.grad.cpu(), torch.full((2,), gradient * (RANK + 1.0)))
        assert ops.reduce(weight, reduction)[0].item() == value
        with torch.no_grad():
            assert not ops.reduce(weight, reduction).requires_grad
    columns = torch.full((2, 3), RANK, device=DEVICE)
    data = {"a": weight, "b": [Pair(columns[:, 1], torch.tensor(RANK, device=DEVICE))]}
    result = ops.broadcast(data, SIZE - 1)
    assert result["a"] is weight and weight.tolist() == [SIZE] * 2 and weight.requires_grad
    assert columns[0].tolist() == [RANK, SIZE - 1, RANK] and data["b"][0].y.item() == SIZE - 1
    communicator = comm.current()
    assert communicator.all_reduce(torch.tensor([RANK], device=DEVICE), "max").item() == SIZE - 1
    assert communicator.all_reduce(torch.tensor([RANK], device=DEVICE), "min").item() == 0
    objects = [RANK, {"r": RANK}]
    assert ops.broadcast_object_list(objects, from_process=SIZE - 1) is objects
    assert objects == [SIZE - 1, {"r": SIZE - 1}]
    tensor = torch.ones(2, 3, dtype=torch.float64, device=DEVICE) * 5 if RANK == SIZE - 1 else None
    shape, code = ops.gather_tensor_shape(tensor)
    assert shape.tolist() == [[2], [3]] and ops.TENSOR_INT_TO_DTYPE[code] is torch.float64
    assert ops.copy_tensor_to_devices(tensor).sum().item() == 30


def check_disagreement() -> None:
    """Every rank must raise, none may hang, and the next operation must work."""
    other = int(RANK == 1)
    odd, one = torch.ones(2 + other, device=DEVICE), torch.ones(1, device=DEVICE)
    shapes = ("Process 0: float32[2]", "Process 1: float32[3]", "process(es) 1")
    deep = [*[1] * other, 2]
    cases = [
        *[(lambda: ops.gather(odd), shapes if SIZE > 2 else shapes[:2])] * 3,
        (lambda: ops.reduce(odd), ["operations.reduce"]),
        (lambda: ops.broadcast(odd), ["operations.broadcast"]),
        (lambda: ops.gather(torch.ones(2).to(DEVICE, torch.float64 if other else torch.float32)), ["float64[2]"]),
        (lambda: ops.gather({"ab"[other]: one}), ["{'b': float32[1]}"]),
        (lambda: ops.broadcast(one, other), ["float32[1], 1"]),
        (lambda: ops.pad_across_processes(torch.ones(deep, device=DEVICE)), []),
        (lambda: ops.gather(torch.ones(500_000 + other, device=DEVICE)), ["500001"]),
        (lambda: (ops.gather if other else ops.reduce)(one), ["`gather`", "`reduce`"]),
        (lambda: ops.gather_object([1]) if other else ops.gather(one), ["`gather_object`"]),
    ]
    debugged = [
        (lambda: ops.gather({"a": odd}), ["'a': float32[3]"]),
        (lambda: ops.pad_across_processes(torch.ones(deep, device=DEVICE)), ["float32[?, ?]"]),
    ]
    for PartialState().debug, table in ((False, cases), (True, debugged)):
        for call, fragments in table:
            with raised(ops.DistributedOperationException, *fragments):
                call()
            assert ops.gather(torch.tensor([RANK], device=DEVICE)).tolist() == EVERYONE
        assert len(ops.pad_across_processes(torch.ones(2 + RANK, device=DEVICE))) == SIZE + 1
    PartialState().debug = False
    part = DTensor.from_local(one, init_device_mesh(DEVICE.type, (SIZE,)), [Shard(0)])
    for call in (ops.gather, ops.reduce, ACCELERATOR.gather_for_metrics):
        with raised(ValueError, "got a DTensor", "tensor.full_tensor()"):
            call(part)


def check_loops_take_one_collective_a_call() -> None:
    """Calls that repeat are expected, also where several take turns; none costs more than the first times."""

    def loop(times: int) -> None:
        for _ in range(times):
            assert ops.gather(torch.tensor(RANK, device=DEVICE)).tolist() == EVERYONE
            ops.gather({"a": torch.ones(32, 10, device=DEVICE), "b": torch.ones(32, dtype=torch.int64, device=DEVICE)})
            assert ops.reduce(torch.tensor(1.0, device=DEVICE), "sum").item() == SIZE
            assert ops.gather_object([RANK]) == EVERYONE
            assert ops.broadcast(torch.tensor([RANK], device=DEVICE)).item() == 0
            ops.pad_across_processes(torch.ones(RANK + 1, device=DEVICE))

    loop(2)
    with torch.profiler.profile() as profile:
        loop(5)
    seen = [event.name for event in profile.events() if event.name.startswith("gloo:all")]
    assert DEVICE.type != "cpu" or len(seen) == 30, seen


def check_random_calls() -> None:
    """Ranks stay in step whatever comes: each call may be one of several, and one rank may get it wrong."""
    draw = random.Random(0)  # the same on all ranks
    kinds = {
        "gather": lambda tensor: ops.gather(tensor)[0].item() == 0,
        "sum": lambda tensor: ops.reduce(tensor, "sum")[0].item() == sum(EVERYONE),
        "max": lambda tensor: ops.reduce(tensor, "max")[0].item() == SIZE - 1,
        "broadcast": lambda tensor: ops.broadcast(tensor.clone(), SIZE - 1)[0].item() == SIZE - 1,
        "minimum": lambda tensor: comm.current().all_reduce(tensor, "min")[0].item() == 0,
        "object": lambda tensor: [len(item) for item in ops.gather_object([tensor.tolist()])] == [len(tensor)] * SIZE,
    }
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    kept = [(draw.choice([*kinds]), draw.choice([1, 40, 300]), draw.choice(dtypes)) for _ in range(4)]
    for number in range(150):
        first = kept[number % 4] if draw.random() < 0.8 else (draw.choice([*kinds]), 100_000, torch.float32)
        other, wrong = draw.choice(kept), draw.choice([-1, -1, -1, *EVERYONE])
        kind, length, dtype = other if wrong == RANK else first
        tensor = torch.full((length,), float(RANK), device=DEVICE).to(dtype)
        objects = {first[0], other[0]} == {"object"}
        if wrong < 0 or other == first or objects:
            same = wrong < 0 or other == first
            assert kinds[kind](tensor) or not same, (number, first)
        else:
            with raised(ops.DistributedOperationException):
                kinds[kind](tensor)
    dist.barrier()
