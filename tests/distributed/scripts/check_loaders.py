"""Prepared loaders across real processes: nothing lost, nothing doubled, all in step.

accelerate launch --cpu --num_processes 2 check_loaders.py
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from accelerate import comm
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accelerate.state import GradientState, PartialState
from accelerate.utils.random import synchronize_rng_states


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"index": torch.tensor([index]), "name": f"row {index}"}


class Stream(IterableDataset):
    """A stream that only the main process can read as it is."""

    def __init__(self, length, error_at=None):
        self.length = length
        self.error_at = error_at

    def __iter__(self):
        if PartialState().process_index != 0:
            raise AssertionError("only the main process reads a dispatched stream")
        for index in range(self.length):
            if index == self.error_at:
                raise OSError(f"row {index}")
            # Rows of growing width: each batch has its own shape.
            yield {
                "index": torch.tensor([index]),
                "wide": torch.full((2 + index // 4,), float(index)),
                "name": f"row {index}",
            }


def indices(batch):
    return batch["index"].view(-1).tolist()


def everywhere(state, value):
    """The values of all processes, in their order."""
    return comm.for_type(state.distributed_type).gather_object(value) if state.num_processes > 1 else [value]


def check_sharded(state, **options):
    for length in (1, 7, 12, 13):
        loader = prepare_data_loader(
            DataLoader(Rows(length), 2, shuffle=True), put_on_device=True, rng_types=["generator"], **options
        )
        orders = []
        for _ in range(2):
            mine, steps = [], 0
            for batch in loader:
                assert batch["index"].device == state.device
                assert batch["name"] == [f"row {index}" for index in indices(batch)]
                counts, shard = loader.batch_counts, state.process_index
                mine += indices(batch) if counts is None else indices(batch)[: counts[shard]]
                steps += 1
            parts = everywhere(state, (mine, steps, loader.remainder))
            assert sorted(sum((part for part, *_ in parts), [])) == list(range(length)), (length, parts)
            assert len({(steps, remainder) for _, steps, remainder in parts}) == 1, parts
            orders.append(parts)
        assert length < 7 or orders[0] != orders[1], "every epoch has its own order"


def check_independent_generators(state):
    """Processes whose default generators differ still draw one common order."""
    torch.manual_seed(state.process_index)
    torch.rand(state.process_index + 1)
    for sampler in (None, WeightedRandomSampler([1.0] * 12, 12, replacement=False)):
        loader = DataLoader(Rows(12), 2, sampler=sampler, shuffle=sampler is None)
        for seedable in (False, True):
            prepared = prepare_data_loader(loader, rng_types=["generator"], use_seedable_sampler=seedable)
            mine = sum((indices(batch) for batch in prepared), [])
            seen = sum(everywhere(state, mine), [])
            assert set(seen) == set(range(12)), seen
    torch.manual_seed(0)
    synchronize_rng_states(["torch"])


def check_dispatched(state):
    count = state.num_processes
    for length in (0, 1, 5, 8, 13):
        for split in (False, True):
            for drop_last in (False, True):
                loader = DataLoader(Stream(length), 2 * count if split else 2, drop_last=drop_last, collate_fn=widest)
                loader = prepare_data_loader(loader, put_on_device=True, split_batches=split)
                assert isinstance(loader, DataLoaderDispatcher)
                for epoch in range(2):
                    mine, ends = [], []
                    for batch in loader:
                        assert batch["index"].device == state.device
                        assert batch["name"] == [f"row {index}" for index in indices(batch)]
                        assert [row.max().item() for row in batch["wide"]] == indices(batch)
                        counts = loader.batch_counts
                        mine += indices(batch) if counts is None else indices(batch)[: counts[state.process_index]]
                        ends.append((loader.end_of_dataloader, loader.remainder))
                    parts = everywhere(state, (mine, ends))
                    kept = length // (2 * count) * 2 * count if drop_last else length
                    assert sorted(sum((part for part, _ in parts), [])) == list(range(kept)), (length, parts)
                    assert all(ends == parts[0][1] for _, ends in parts)
                    assert [end for end, _ in ends] == [False] * (len(ends) - 1) + [True] * bool(ends)
                    assert loader.iteration == epoch + 1


def widest(rows):
    """Pad the rows of a batch to one width; dispatched batches of different width are joined by the caller's choice."""
    width = 6
    return {
        "index": torch.stack([row["index"] for row in rows]),
        "wide": torch.stack([torch.nn.functional.pad(row["wide"], (0, width - len(row["wide"]))) for row in rows]),
        "name": [row["name"] for row in rows],
    }


def check_views_and_early_ends(state):
    loader = prepare_data_loader(DataLoader(Stream(12), 2, collate_fn=widest), put_on_device=True)
    whole = [indices(batch) for batch in loader]
    assert [indices(batch) for batch in skip_first_batches(loader, 1)] == whole[1:] and loader.iteration == 2
    for batch in loader:
        assert indices(batch) == whole[0]
        break
    assert not GradientState().in_dataloader
    assert [indices(batch) for batch in loader] == whole, "all processes left at the same batch and start anew"

    loader = prepare_data_loader(DataLoader(Stream(12, error_at=5), 2, collate_fn=widest), put_on_device=True)
    try:
        list(loader)
    except OSError as error:
        assert state.process_index == 0 and "row 5" in str(error)
    except RuntimeError as error:
        assert state.process_index > 0 and "OSError: row 5" in str(error)
    else:
        raise AssertionError("the error has to reach every process")
    state.wait_for_everyone()


def check_resuming(state):
    def build():
        return prepare_data_loader(DataLoader(Rows(24), 2, shuffle=True), rng_types=["generator"])

    torch.manual_seed(3)
    loader = build()
    list(loader)
    seen = []
    for batch in loader:
        seen.append(indices(batch))
        if len(seen) == 2:
            saved, generator = loader.state_dict(), torch.get_rng_state()
    following = [indices(batch) for batch in loader]
    torch.manual_seed(77 + state.process_index)
    again = build()
    torch.set_rng_state(generator)
    again.load_state_dict(saved)
    assert [indices(batch) for batch in again] == seen[2:]
    assert [indices(batch) for batch in again] == following


def measure(state, batches=400):
    """Median time per batch of a dispatched loader, in microseconds."""
    rows = [{"x": torch.zeros(8), "y": torch.zeros(1)}] * (batches * state.num_processes)
    loader = prepare_data_loader(DataLoader(rows, 4), put_on_device=True, dispatch_batches=True)
    times, start = [], time.perf_counter()
    for _ in loader:
        now = time.perf_counter()
        times.append(now - start)
        start = now
    return sorted(times)[len(times) // 2] * 1e6


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    state = PartialState(cpu=not torch.cuda.is_available())
    check_sharded(state)
    check_sharded(state, use_seedable_sampler=True)
    check_independent_generators(state)
    check_dispatched(state)
    check_views_and_early_ends(state)
    check_resuming(state)
    if arguments.measure:
        state.print(f"dispatched: {measure(state):.0f} us per batch")
    state.print("ok loaders")
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
