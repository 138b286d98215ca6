import pytest
import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.comm.base import Communicator
from accelerate.process import PartialState
from accelerate.runtime import storage


def test_alone_there_is_nobody_to_ask():
    communicator = comm.for_type("NO")
    tensor = torch.ones(2)
    assert communicator.world_size == 1 and communicator.rank == 0
    assert communicator.all_gather(tensor).tolist() == [1, 1]
    assert communicator.all_reduce({"a": tensor})["a"].tolist() == communicator.broadcast(tensor).tolist() == [1, 1]
    assert communicator.gather_object("x") == ["x"]
    assert communicator.broadcast_object_list([1]) == [1]
    communicator.barrier()
    with pytest.raises(ValueError, match="'median'"):
        communicator.all_reduce(tensor, "median")


def test_several_processes_without_a_group():
    assert type(comm.for_type("FSDP")) is Communicator, "an engine of a lone process"
    assert type(comm.current()) is Communicator and PartialState._shared_state
    storage.process.current["num_processes"] = 2
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.for_type("MULTI_CPU")


# A group of one exercises the same code as a larger one; tests/distributed has two processes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (100_000,)])
def test_group_of_one(process_group, dtype, shape):
    communicator = comm.for_type("MULTI_CPU")
    tensor = torch.ones(shape).to(dtype)
    gathered = communicator.all_gather(tensor)
    assert gathered.dtype is dtype and torch.equal(gathered, tensor.reshape(1) if shape == () else tensor)
    assert gathered.data_ptr() != tensor.data_ptr() or not tensor.numel()
    result = communicator.broadcast(tensor)
    assert torch.equal(result, tensor) and result.shape == tensor.shape
    if dtype is not torch.bool:
        assert torch.equal(communicator.all_reduce(tensor), tensor)
        assert communicator.all_reduce(tensor, "mean").shape == tensor.shape


def test_results_are_not_overwritten_by_the_next_exchange(process_group):
    communicator = comm.for_type("MULTI_CPU")
    first = communicator.all_gather(torch.tensor([1.0]))
    reduced = communicator.all_reduce(torch.tensor([2.0]))
    communicator.all_gather(torch.tensor([5.0]))
    communicator.all_reduce(torch.tensor([5.0]))
    assert first.tolist() == [1.0] and reduced.tolist() == [2.0]


def test_awkward_tensors(process_group):
    communicator = comm.for_type("MULTI_CPU")
    transposed = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(communicator.all_gather(transposed), transposed)
    needs_grad = torch.ones(2, requires_grad=True)
    assert not communicator.all_gather(needs_grad).requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert communicator.all_gather(conjugate).tolist() == [1 - 2j]
    with pytest.raises(TypeError, match="sparse"):
        communicator.all_gather(torch.eye(2).to_sparse())
    assert communicator.all_reduce(torch.tensor([1, 2]), "mean").dtype is torch.float32
    assert communicator.gather_object({"a": transposed})[0]["a"].shape == (3, 2)
    assert len(communicator.gather_object(list(range(50_000)))[0]) == 50_000
    assert communicator.broadcast_object_list(["x"]) == ["x"]
    with pytest.raises(ValueError, match="no process 3"):
        communicator.broadcast(transposed, 3)


def test_the_default_group_is_the_side_group_where_it_has_gloo(process_group):
    storage.process.filled()["distributed_type"] = "MULTI_CPU"
    assert comm.side_group() is dist.group.WORLD
    beside = comm.side_group(beside=True)
    assert beside is not dist.group.WORLD and comm.side_group(beside=True) is beside
    comm.forget()
    assert comm.side_group(beside=True) is not beside


def test_one_side_group_is_made_where_the_default_group_has_no_gloo():
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    state = PartialState()
    storage.process.current["distributed_type"] = "MULTI_GPU"
    group = comm.side_group()
    assert group is not dist.group.WORLD and comm.side_group() is group and dist.get_backend(group) == "gloo"
    state.destroy_process_group()
    assert comm.side_group() is None
