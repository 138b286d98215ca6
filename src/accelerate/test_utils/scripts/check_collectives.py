"""Checks of the processes and of what they say to each other."""

import torch

from accelerate.accelerator import Accelerator
from accelerate.state import PartialState
from accelerate.test_utils.testing import are_the_same_tensors
from accelerate.utils.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.utils.random import set_seed, synchronize_rng_states


def check_processes(accelerator: Accelerator) -> None:
    """All processes agree on how many they are, each has its own number, and a split loses nothing."""
    state = PartialState()
    counts = gather_object([state.num_processes])
    ranks = gather_object([state.process_index])
    assert set(counts) == {len(ranks)}, f"The processes count {counts} processes, and {len(ranks)} answered."
    assert sorted(ranks) == list(range(state.num_processes)), f"The ranks are {ranks}."
    assert (state.process_index == 0) == state.is_main_process, "The main process is not rank 0."
    everything = list(range(10 * state.num_processes + 1))
    with state.split_between_processes(everything) as mine:
        found = sorted(gather_object(list(mine)))
    assert found == everything, f"split_between_processes made {found} of {everything}."


def check_gather(accelerator: Accelerator) -> None:
    """Gathering puts the tensors of all ranks in the order of the ranks, in every type and inside containers."""
    count, rank, device = accelerator.num_processes, accelerator.process_index, accelerator.device
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        mine = torch.full((2, 3), rank % 2, device=device, dtype=dtype)
        expected = torch.tensor([r % 2 for r in range(count) for _ in range(2)], device=device).to(dtype)
        found = gather({"a": [mine]})["a"][0]
        assert torch.equal(found, expected[:, None].expand(-1, 3)), f"gather of {dtype} gave {found.tolist()}."


def check_reduce(accelerator: Accelerator) -> None:
    """Sums and means are those of arithmetic."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((4,), float(rank + 1), device=accelerator.device)
    for how, expected in (("sum", count * (count + 1) / 2), ("mean", (count + 1) / 2)):
        found = reduce(mine.clone(), how)
        assert torch.allclose(found, torch.full_like(mine, expected)), f"{how} is {found.tolist()}, not {expected}."


def check_broadcast(accelerator: Accelerator) -> None:
    """Every rank receives the tensor and the objects of one rank, whichever it is."""
    count, rank = accelerator.num_processes, accelerator.process_index
    for source in {0, count - 1}:
        found = broadcast(torch.full((3,), float(rank), device=accelerator.device), from_process=source)
        assert found.eq(source).all(), f"broadcast from {source} gave {found.tolist()}."
        words = broadcast_object_list([f"of {rank}", {"rank": rank}], from_process=source)
        assert words == [f"of {source}", {"rank": source}], f"broadcast_object_list from {source} gave {words}."


def check_pad(accelerator: Accelerator) -> None:
    """Tensors of different length are padded to the longest, at the end that was asked for, and can be gathered then."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((rank + 1,), float(rank + 1), device=accelerator.device)
    for first in (False, True):
        padded = pad_across_processes(mine, pad_index=-1, pad_first=first)
        assert padded.shape == (count,), f"Padded to {tuple(padded.shape)}, the longest has {count}."
        own = padded[count - rank - 1 :] if first else padded[: rank + 1]
        assert torch.equal(own, mine), f"The values moved: {padded.tolist()} ({first=})."
        kept = gather(padded)
        assert kept.ne(-1).sum() == count * (count + 1) // 2, f"After padding, gather gave {kept.tolist()}."


def check_gather_object(accelerator: Accelerator) -> None:
    """Objects of all ranks arrive, also where the ranks have different numbers of them."""
    count, rank = accelerator.num_processes, accelerator.process_index
    found = gather_object([{"rank": rank, "text": "x" * rank}] * (rank + 1))
    expected = [{"rank": r, "text": "x" * r} for r in range(count) for _ in range(r + 1)]
    assert found == expected, f"gather_object gave {found}."


def check_trigger(accelerator: Accelerator) -> None:
    """A trigger that one rank sets is seen by all, once."""
    if accelerator.process_index == accelerator.num_processes - 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger(), "The trigger of the last rank was not seen."
    assert not accelerator.check_trigger(), "The trigger was seen twice."


def check_random_numbers(accelerator: Accelerator) -> None:
    """Random generators agree after they were synchronised."""
    set_seed(1 + accelerator.process_index)
    generator = torch.Generator().manual_seed(100 + accelerator.process_index)
    synchronize_rng_states(["torch", "generator"], generator=generator)
    for source in (None, generator):
        drawn = torch.rand(4, generator=source).to(accelerator.device)
        assert are_the_same_tensors(drawn), f"The ranks drew {gather_object([drawn.tolist()])}."
