"""Streams across real processes: who reads what, each sample once, uneven ends, errors on one rank.

`check_loaders.py` runs these checks; as a program this loses a process.
"""

import logging
import os
import warnings
from contextlib import contextmanager

import torch
from harness import everywhere, fresh_accelerator, raised, run
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate import DataLoaderConfiguration
from accelerate.data import iterable, plan
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import PartialState
from accelerate.utils.imports import is_datasets_available, is_torchdata_stateful_dataloader_available

SHARDED = DataLoaderConfiguration(dispatch_batches=False)
DIVIDED = DataLoaderConfiguration(shard_iterable_dataset=False)


class Own(IterableDataset):
    """A stream that gives every rank its own part, of another length on every rank."""

    def __init__(self, lengths, error_at=None):
        self.lengths = lengths
        self.error_at = error_at

    def __iter__(self):
        rank = PartialState().process_index
        for row in range(self.lengths[rank]):
            if self.error_at == (rank, row):
                raise OSError(f"row {row}")
            yield 100 * rank + row


def rank():
    return PartialState().process_index


def world():
    return PartialState().num_processes


def prepare(dataset, config, batch_size=2, **options):
    accelerator = fresh_accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(dataset, batch_size, **options))
    return accelerator, loader, accelerator.data_plan(loader)


def rows(loader):
    return [batch["x"].tolist() if isinstance(batch, dict) else batch.tolist() for batch in ended(loader)]


def ended(loader):
    """Iterate, with an operation of all ranks in every step that would hang if one of them had left."""
    from accelerate import comm

    communicator = comm.current()
    for batch in loader:
        assert communicator.all_reduce(torch.ones(1)).item() == world()
        yield batch


@contextmanager
def logged(name):
    """Collect what a logger says."""
    records, logger, handler = [], logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


def stored(pieces, each=4):
    import datasets

    def read(numbers):
        for number in numbers:
            for row in range(each):
                yield {"x": 100 * number + row}

    return datasets.IterableDataset.from_generator(read, gen_kwargs={"numbers": list(range(pieces))})


def enough_pieces_are_divided():
    for pieces in (world(), 2 * world()):
        with logged("accelerate.data.build") as lines:
            _, loader, found = prepare(stored(pieces), SHARDED)
        assert found.reading == plan.BY_PIECES
        assert len(lines) == (rank() == 0) and all("by pieces" in line for line in lines)
        for _ in range(2):
            parts = everywhere(sum(rows(loader), []))
            want = sorted(100 * number + row for number in range(pieces) for row in range(4))
            assert sorted(sum(parts, [])) == want, parts
        pieces_read = [{value // 100 for value in part} for part in parts]
        assert sum(map(len, pieces_read)) == pieces, "a rank reads its own pieces only"


def uneven_pieces_end_together():
    pieces = world() + 1
    _, loader, found = prepare(stored(pieces), SHARDED)
    assert found.uneven
    with logged("accelerate.data.iterable") as lines:
        for _ in range(2):
            parts = everywhere(rows(loader))
            assert [len(part) for part in parts] == [2] * world(), parts
            assert len({value for part in parts for batch in part for value in batch}) == 4 * world()
    assert len(lines) == 2 * (rank() == 0) and all("rank 0 had at least one batch more" in line for line in lines)


def too_few_pieces_are_read_by_all():
    with logged("accelerate.data.build") as lines:
        _, loader, found = prepare(stored(1, each=4 * world()), SHARDED)
    assert found.reading == plan.EVERYTHING and not found.uneven
    assert all("reads everything, keeps its part" in line for line in lines)
    parts = everywhere(sum(rows(loader), []))
    assert sorted(sum(parts, [])) == list(range(4 * world()))


def split_streams_are_left_alone():
    from datasets.distributed import split_dataset_by_node

    for pieces in (world(), world() + 1):
        stream = split_dataset_by_node(stored(pieces), rank=rank(), world_size=world())
        _, loader, found = prepare(stream, None)
        assert found.reading == plan.SPLIT_ALREADY and loader.dataset is stream
        parts = everywhere(sum(rows(loader), []))
        seen = sum(parts, [])
        assert len(seen) == len(set(seen)), "nothing is seen twice"
        assert len(seen) >= 4 * world()
    with raised(ValueError, f"divided among {world() + 1} nodes", "shard_iterable_dataset=False"):
        prepare(split_dataset_by_node(stored(2), rank=rank(), world_size=world() + 1), None)


def workers_read_pieces_of_their_own():
    _, loader, found = prepare(stored(2 * world()), SHARDED, num_workers=2)
    assert found.reading == plan.BY_PIECES
    seen = sum(everywhere(sum(rows(loader), [])), [])
    assert len(seen) == len(set(seen)) == 8 * world()


def parts_of_the_users_own_end_together():
    for lengths in ([7] * world(), [3 + 2 * number for number in range(world())], [9, *range(world() - 1)]):
        _, loader, found = prepare(Own(lengths), DIVIDED)
        assert found.reading == plan.SPLIT_ALREADY and type(loader) is not DataLoaderDispatcher
        with logged("accelerate.data.iterable") as lines:
            for _ in range(2):
                found_steps = [len(part) for part in everywhere(rows(loader))]
                assert found_steps == [min(-(-length // 2) for length in lengths)] * world(), (lengths, found_steps)
        left_over = rank() == 0 and len({-(-length // 2) for length in lengths}) > 1
        assert len(lines) == 2 * left_over and all("had at least one batch more" in line for line in lines)
        assert all(value // 100 == rank() for batch in loader for value in batch.tolist())


def the_end_is_known_when_the_last_batch_is_given():
    accelerator, loader, _ = prepare(Own([4 + 4 * number for number in range(world())]), DIVIDED)
    ends = []
    for _ in ended(loader):
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [False, True]
    assert not accelerator.gradient_state.in_dataloader and loader.iteration == 1


def two_loaders_may_alternate():
    _, first, _ = prepare(Own([6 + number for number in range(world())]), DIVIDED)
    _, second, _ = prepare(Own([8] * world()), DIVIDED)
    assert len(list(zip(ended(first), ended(second), strict=False))) == 3


def an_error_of_one_rank_reaches_all():
    last = world() - 1
    for kind in (0, 2):
        _, loader, _ = prepare(Own([8] * world(), error_at=(last, 5)), DIVIDED, num_workers=kind and 1)
        mine = kind == 0 and OSError or (OSError, RuntimeError)
        if rank() == last:
            with raised(mine, "row 5"):
                rows(loader)
        else:
            with raised(RuntimeError, f"rank {last} failed", "OSError", "row 5", "batch 2"):
                rows(loader)
        assert everywhere(1) == [1] * world(), "the ranks can go on together"


def positions_do_not_count_what_was_read_ahead():
    for stateful in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=stateful)
        if stateful and not is_torchdata_stateful_dataloader_available():
            continue
        _, loader, found = prepare(stored(world() + 1), config, batch_size=1)
        assert found.uneven
        seen = []
        for batch in ended(loader):
            seen.append(batch["x"].tolist())
            if len(seen) == 2:
                state = loader.state_dict()
        assert len(seen) == 4
        _, again, _ = prepare(stored(world() + 1), config, batch_size=1)
        again.load_state_dict(state)
        assert rows(again) == seen[2:], (stateful, seen)


def without_a_vote_each_ends():
    _, loader, _ = prepare(Own([2 + 2 * number for number in range(world())]), DIVIDED)
    with iterable.uneven_ends():
        assert len(list(loader)) == rank() + 1
    assert len(rows(loader)) == 1


def join_uneven_inputs_is_left_to_itself():
    accelerator = fresh_accelerator(dataloader_config=DIVIDED)
    lengths = [2 + 2 * number for number in range(world())]
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(Own(lengths), 2))
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            steps += 1
    assert steps == rank() + 1
    assert len(rows(loader)) == 1, "outside it they end together again"


def datapipes_are_divided_by_torch_or_by_us():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numbers = IterableWrapper(range(4 * world()))
        _, loader, found = prepare(numbers.sharding_filter(), None)
        assert found.reading == plan.SPLIT_ALREADY
        parts = everywhere(sum(rows(loader), []))
        assert sorted(sum(parts, [])) == list(range(4 * world())), parts
        for config in (None, SHARDED):
            _, loader, found = prepare(numbers, config)
            assert found.reading == (plan.EVERYTHING if config else plan.DISPATCHED)
            parts = everywhere(sum(rows(loader), []))
            assert sorted(sum(parts, [])) == list(range(4 * world())), parts


def ranks_at_different_batches_are_refused():
    """Rank 0 goes on in a loop that the others have left for another one."""
    _, loader, _ = prepare(Own([20] * world()), DIVIDED)
    steps = iter(loader)
    next(steps)
    if rank() > 0:
        steps = iter(loader)
    if world() > 1:
        with raised(RuntimeError, "Processes are at different places: rank", "batch 3 of its loop number"):
            next(steps), next(steps)


def lost_process():
    """One rank dies in the middle; the others must end with an error, not wait."""
    _, loader, _ = prepare(Own([10**6] * world()), DIVIDED)
    for number, _ in enumerate(loader):
        if number == 3 and rank() == 1:
            os._exit(9)
    print("survived")


STORED = [
    enough_pieces_are_divided,
    uneven_pieces_end_together,
    too_few_pieces_are_read_by_all,
    split_streams_are_left_alone,
    workers_read_pieces_of_their_own,
    positions_do_not_count_what_was_read_ahead,
]
CHECKS = [
    *(STORED if is_datasets_available() else []),
    parts_of_the_users_own_end_together,
    the_end_is_known_when_the_last_batch_is_given,
    two_loaders_may_alternate,
    an_error_of_one_rank_reaches_all,
    without_a_vote_each_ends,
    join_uneven_inputs_is_left_to_itself,
    datapipes_are_divided_by_torch_or_by_us,
    ranks_at_different_batches_are_refused,  # the last one: the ranks have counted different loops
]


if __name__ == "__main__":
    fresh_accelerator()
    run(lost_process)
