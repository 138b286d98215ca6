"""The loader that reads on one process: several of them in this process, with a line in between."""

import pickle
from collections import deque
from itertools import cycle, islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data.broadcast import BatchBroadcast
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.state import GradientState

CPU = torch.device("cpu")


class Stream(IterableDataset):
    def __init__(self, length, error_at=None):
        self.length = length
        self.error_at = error_at

    def __iter__(self):
        for index in range(self.length):
            if index == self.error_at:
                raise OSError(f"row {index}")
            yield {"x": torch.tensor([index]), "name": f"row {index}"}


class Recorder:
    """Keeps what the sender broadcasts."""

    def __init__(self):
        self.sent = []

    def tensor(self, tensor):
        self.sent.append(tensor.clone())

    def object(self, value=None):
        self.sent.append(value)
        return value


class Replay:
    """Gives a receiver what the sender broadcast."""

    def __init__(self, sent):
        self.sent = deque(sent)

    def tensor(self, tensor):
        tensor.copy_(self.sent.popleft())

    def object(self, value=None):
        return self.sent.popleft()


def dispatched(loader, index, transport, processes, **options):
    loader = prepare_data_loader(loader, put_on_device=True, device=CPU, dispatch_batches=True, **options)
    loader.state = SimpleNamespace(num_processes=processes, process_index=index, device=CPU)
    shards = loader._layout().num_shards
    loader._broadcast = BatchBroadcast(transport, shards, CPU)
    return loader


def run(make, processes, epochs=1, skip=0, **options):
    """Iterate on all processes: the main one first, then the others with what it sent."""
    recorder = Recorder()
    results = []
    for index in range(processes):
        loader = dispatched(make(), index, recorder if index == 0 else Replay(recorder.sent), processes, **options)
        loader = skip_first_batches(loader, skip)
        steps = []
        for _ in range(epochs):
            for batch in loader:
                steps.append((batch, loader.end_of_dataloader, loader.remainder, loader.batch_counts))
        results.append(steps)
        assert not GradientState().in_dataloader
    return results


@settings(max_examples=60)
@given(st.integers(0, 30), st.integers(1, 4), st.booleans(), st.integers(2, 4), st.booleans(), st.integers(0, 2))
def test_parts_follow_the_specification(length, share, drop_last, processes, split, skip):
    size = share * processes
    rounds = [list(range(length))[at : at + size] for at in range(0, length, size)]
    if rounds and drop_last and len(rounds[-1]) < size:
        rounds.pop()
    skip = min(skip, len(rounds))
    head = rounds[0][:processes] if rounds else []  # of the epoch, also where its beginning is left out
    rounds = rounds[skip:]
    real = [len(numbers) for numbers in rounds]
    rounds = [numbers + list(islice(cycle(head), -len(numbers) % processes)) for numbers in rounds]

    results = run(
        lambda: DataLoader(Stream(length), size if split else share, drop_last=drop_last),
        processes,
        epochs=2,
        skip=skip,
        split_batches=split,
    )
    for index, steps in enumerate(results):
        parts = [numbers[len(numbers) // processes * index :][: len(numbers) // processes] for numbers in rounds]
        assert [batch["x"].view(-1).tolist() for batch, *_ in steps] == parts * 2
        assert [batch["name"] for batch, *_ in steps] == [[f"row {n}" for n in part] for part in parts] * 2
        ends = [number == len(rounds) - 1 for number in range(len(rounds))] * 2
        assert [end for _, end, *_ in steps] == ends
        remainders = [count if end else -1 for count, end in zip(real * 2, ends, strict=True)]
        assert [remainder for *_, remainder, _ in steps] == remainders
    counts = [[step[3] for step in steps] for steps in results]
    assert all(count == counts[0] for count in counts)
    assert [sum(count) for count in counts[0] if count] == [
        count for count, numbers in zip(real * 2, rounds * 2, strict=True) if count < len(numbers)
    ]


def test_batches_of_varying_size_lose_nothing():
    sizes = [2, 1, 2, 3, 1]
    numbers = iter(range(sum(sizes)))
    batches = [list(islice(numbers, size)) for size in sizes]
    data = [{"x": torch.tensor([n])} for n in range(sum(sizes))]
    results = run(lambda: DataLoader(data, batch_sampler=batches), 2)
    parts = [[batch["x"].view(-1).tolist() for batch, *_ in steps] for steps in results]
    assert parts == [[[0, 1], [3, 4, 5], [8]], [[2], [6, 7], [0]]]
    assert results[0][-1][1:] == (True, 1, (1, 0))


def test_ranks_of_one_replica_get_the_same_part():
    mesh = SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp_shard", "tp"))
    recorder = Recorder()
    parts = []
    for index in range(4):
        transport = recorder if index == 0 else Replay(recorder.sent)
        loader = DataLoader(Stream(8), 2)
        loader = prepare_data_loader(
            loader,
            put_on_device=True,
            dispatch_batches=True,
            num_processes=4,
            process_index=index,
            torch_device_mesh=mesh,
        )
        loader.state = SimpleNamespace(num_processes=4, process_index=index, device=CPU)
        loader._broadcast = BatchBroadcast(transport, 2, CPU)
        assert loader.total_batch_size == 4
        parts.append([batch["x"].view(-1).tolist() for batch in loader])
    assert parts == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


def test_a_slice_function_cuts_the_parts():
    calls = []

    def cut(batch, part, process_index=None, num_processes=None):
        calls.append((part, process_index, num_processes))
        return batch["x"][part].view(-1).tolist()

    results = run(lambda: DataLoader(Stream(4), 2), 2, slice_fn_for_dispatch=cut)
    assert [[batch for batch, *_ in steps] for steps in results] == [[[0, 1]], [[2, 3]]]
    assert calls == [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)]
    alone = prepare_data_loader(
        DataLoader(Stream(2), 2), put_on_device=True, dispatch_batches=True, slice_fn_for_dispatch=cut
    )
    assert list(alone) == [[0, 1]]


def test_an_error_while_reading_stops_all_processes():
    recorder = Recorder()
    main = dispatched(DataLoader(Stream(8, error_at=5), 2), 0, recorder, 2)
    with pytest.raises(OSError, match="row 5"):
        list(main)
    other = dispatched(DataLoader(Stream(8), 2), 1, Replay(recorder.sent), 2)
    with pytest.raises(RuntimeError, match="OSError: row 5"):
        list(other)
    assert not GradientState().in_dataloader


def test_batches_that_cannot_be_divided_are_refused():
    loader = dispatched(DataLoader(Stream(4), 2, collate_fn=lambda rows: {"n": len(rows)}), 0, Recorder(), 2)
    with pytest.raises(ValueError, match="cannot be divided among processes"):
        list(loader)


def test_alone_nothing_is_sent():
    loader = prepare_data_loader(DataLoader(Stream(5), 2), put_on_device=True)
    steps = [(batch["x"].view(-1).tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]
    assert steps == [([0, 1], False, -1), ([2, 3], False, -1), ([4], True, 1)]
    assert loader.batch_counts is None and loader.iteration == 1


@pytest.mark.parametrize(
    ("length", "drop_last", "split", "want"), [(7, False, False, 2), (7, True, False, 1), (7, False, True, 4)]
)
def test_length_and_batch_size_count_steps(length, drop_last, split, want):
    data = [{"x": torch.tensor([n])} for n in range(length)]
    loader = dispatched(DataLoader(data, 2, drop_last=drop_last), 0, Recorder(), 2, split_batches=split)
    assert len(loader) == want == len(list(loader))
    assert loader.total_batch_size == (2 if split else 4) and loader.total_dataset_length == length
    assert len(skip_first_batches(loader, 1)) == want - 1


def test_positions_count_steps():
    data = [{"x": torch.tensor([n])} for n in range(12)]
    loader = dispatched(DataLoader(data, 2), 0, Recorder(), 2)
    for batch in loader:
        if batch["x"][0] == 4:
            state = loader.state_dict()
            break
    again = dispatched(DataLoader(data, 2), 0, Recorder(), 2)
    again.load_state_dict(state)
    assert [batch["x"].view(-1).tolist() for batch in again] == [[8, 9]]
    assert [batch["x"].view(-1).tolist() for batch in again] == [[0, 1], [4, 5], [8, 9]]


def test_nothing_of_the_connection_is_pickled():
    loader = dispatched(DataLoader([1, 2], 2), 0, Recorder(), 2)
    loader.state = None
    assert pickle.loads(pickle.dumps(loader))._broadcast is None
