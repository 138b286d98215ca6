"""Streams across real processes: who reads what, each sample once, uneven ends, errors on one rank."""

import logging
import os
import warnings

import torch
from expect import logged, raised
from harness import Stream, everywhere, fresh_accelerator, learn, rank, world
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from accelerate import DataLoaderConfiguration, comm
from accelerate.data import reading
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils.imports import is_datasets_available, is_torchdata_stateful_dataloader_available

USUAL = ("check_", "stored_") if is_datasets_available() else ("check_",)
SHARDED = DataLoaderConfiguration(dispatch_batches=False)
DIVIDED = DataLoaderConfiguration(shard_iterable_dataset=False)


def own(lengths, error_at=None):
    """A stream that gives every rank its own part, of another length on every rank."""

    def rows():
        for row in range(lengths[rank()]):
            if error_at == (rank(), row):
                raise OSError(f"row {row}")
            yield 100 * rank() + row

    return Stream(rows)


def prepare(dataset, config, batch_size=2, **options):
    accelerator = fresh_accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(dataset, batch_size, **options))
    return accelerator, loader, accelerator.data_plan(loader)


def rows(loader):
    return [batch["x"].tolist() if isinstance(batch, dict) else batch.tolist() for batch in ended(loader)]


def ended(loader):
    """Iterate, with an operation of all ranks in every step that would hang if one of them had left."""
    communicator = comm.current()
    for batch in loader:
        assert communicator.all_reduce(torch.ones(1)).item() == world()
        yield batch


def stored(pieces, each=4):
    import datasets

    def read(numbers):
        yield from ({"x": 100 * number + row} for number in numbers for row in range(each))

    return datasets.IterableDataset.from_generator(read, gen_kwargs={"numbers": list(range(pieces))})


def stored_enough_pieces_are_divided():
    for pieces in (world(), 2 * world()):
        with logged("accelerate.data.build", logging.INFO) as lines:
            _, loader, found = prepare(stored(pieces), SHARDED)
        assert found.reading == reading.ByPieces.name
        assert len(lines) == (rank() == 0) and all("by pieces" in line for line in lines)
        for _ in range(2):
            parts = everywhere(sum(rows(loader), []))
            want = sorted(100 * number + row for number in range(pieces) for row in range(4))
            assert sorted(sum(parts, [])) == want, parts
        pieces_read = [{value // 100 for value in part} for part in parts]
        assert sum(map(len, pieces_read)) == pieces, "a rank reads its own pieces only"


def stored_uneven_pieces_end_together():
    pieces = world() + 1
    _, loader, found = prepare(stored(pieces), SHARDED)
    assert found.ends_by_vote
    with logged("accelerate.comm.in_step", logging.INFO) as lines:
        for _ in range(2):
            parts = everywhere(rows(loader))
            assert [len(part) for part in parts] == [2] * world(), parts
            assert len({value for part in parts for batch in part for value in batch}) == 4 * world()
    assert len(lines) == 2 * (rank() == 0) and all("rank 0 had at least one batch more" in line for line in lines)


def stored_too_few_pieces_are_read_by_all():
    with logged("accelerate.data.build", logging.INFO) as lines:
        _, loader, found = prepare(stored(1, each=4 * world()), SHARDED)
    assert found.reading == reading.ReadsEverything.name and not found.ends_by_vote
    assert all("reads everything, keeps its part" in line for line in lines)
    parts = everywhere(sum(rows(loader), []))
    assert sorted(sum(parts, [])) == list(range(4 * world()))


def stored_split_streams_are_left_alone():
    from datasets.distributed import split_dataset_by_node

    for pieces in (world(), world() + 1):
        stream = split_dataset_by_node(stored(pieces), rank=rank(), world_size=world())
        _, loader, found = prepare(stream, None)
        assert found.reading == reading.AlreadySplit.name and loader.dataset is stream
        parts = everywhere(sum(rows(loader), []))
        seen = sum(parts, [])
        assert len(seen) == len(set(seen)), "nothing is seen twice"
        assert len(seen) >= 4 * world()
    with raised(ValueError, f"divided among {world() + 1} nodes", "shard_iterable_dataset=False"):
        prepare(split_dataset_by_node(stored(2), rank=rank(), world_size=world() + 1), None)


def stored_workers_read_pieces_of_their_own():
    _, loader, found = prepare(stored(2 * world()), SHARDED, num_workers=2)
    assert found.reading == reading.ByPieces.name
    seen = sum(everywhere(sum(rows(loader), [])), [])
    assert len(seen) == len(set(seen)) == 8 * world()


def check_parts_of_the_users_own_end_together():
    for lengths in ([7] * world(), [3 + 2 * number for number in range(world())], [9, *range(world() - 1)]):
        _, loader, found = prepare(own(lengths), DIVIDED)
        assert found.reading == reading.AlreadySplit.name and type(loader) is not DataLoaderDispatcher
        with logged("accelerate.comm.in_step", logging.INFO) as lines:
            for _ in range(2):
                found_steps = [len(part) for part in everywhere(rows(loader))]
                assert found_steps == [min(-(-length // 2) for length in lengths)] * world(), (lengths, found_steps)
        left_over = rank() == 0 and len({-(-length // 2) for length in lengths}) > 1
        assert len(lines) == 2 * left_over and all("had at least one batch more" in line for line in lines)
        assert all(value // 100 == rank() for batch in loader for value in batch.tolist())


def check_the_end_is_known_when_the_last_batch_is_given():
    accelerator, loader, _ = prepare(own([4 + 4 * number for number in range(world())]), DIVIDED)
    assert [accelerator.gradient_state.end_of_dataloader for _ in ended(loader)] == [False, True]
    assert not accelerator.gradient_state.in_dataloader and loader.iteration == 1
    # With indices the last one of a rank is read a batch early.
    data = DataLoader(range(rank() + 6), 2)
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(already_sharded=True))
    assert [accelerator.gradient_state.end_of_dataloader for _ in accelerator.prepare(data)] == [False, False, True]


class Pieces(IterableDataset):
    """Rows in pieces, of which a rank reads its own, and whose length each part knows."""

    num_shards = 24

    def __init__(self, length, parts=1, index=0):
        self.numbers = range(index, length, parts)
        self.length = length

    def shard(self, num_shards, index):
        return Pieces(self.length, num_shards, index)

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        yield from self.numbers


def check_metrics_of_pieces_have_each_sample_once():
    for length in (6 * world(), 6 * world() + 1):  # a row that rank 0 alone has is omitted, as it says
        accelerator, loader, made = prepare(Pieces(length), SHARDED)
        assert loader.total_batch_size == made.total_batch_size == 2 * world()
        found = sum((accelerator.gather_for_metrics(batch).tolist() for batch in ended(loader)), [])
        assert all(sorted(each) == list(range(6 * world())) for each in everywhere(found)), found


def check_a_position_in_pieces_counts_those_of_all_ranks():
    _, loader, _ = prepare(Pieces(8 * world()), SHARDED)
    next(iter(loader))
    position = loader.state_dict()["accelerate_position"]
    assert (position["batches"], position["samples"]) == (1, 2 * world()), position


def check_metrics_where_a_length_is_an_estimate():
    """A filter leaves fewer rows than the length says: no rank has filled up anything."""

    class Filtered(Stream):
        def __len__(self):
            return 4 * world() + 2

    accelerator, loader, _ = prepare(Filtered(range(4 * world())), SHARDED)
    found = [accelerator.gather_for_metrics(batch).tolist() for batch in ended(loader)]
    assert sum(found, []) == list(range(4 * world())), found


def check_two_loaders_may_alternate():
    _, first, _ = prepare(own([6 + number for number in range(world())]), DIVIDED)
    _, second, _ = prepare(own([8] * world()), DIVIDED)
    assert len(list(zip(ended(first), ended(second), strict=False))) == 3


def check_an_error_of_one_rank_reaches_all():
    last = world() - 1
    for kind in (0, 2):
        _, loader, _ = prepare(own([8] * world(), error_at=(last, 5)), DIVIDED, num_workers=kind and 1)
        mine = (OSError, "row 5") if kind == 0 else ((OSError, RuntimeError), "row 5")
        with raised(
            *(mine if rank() == last else (RuntimeError, f"rank {last} failed", "OSError", "row 5", "batch 2"))
        ):
            rows(loader)
        assert everywhere(1) == [1] * world(), "the ranks can continue together"


def stored_positions_do_not_count_what_was_read_ahead():
    for stateful in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=False, use_stateful_dataloader=stateful)
        if stateful and not is_torchdata_stateful_dataloader_available():
            continue
        _, loader, found = prepare(stored(world() + 1), config, batch_size=1)
        assert found.ends_by_vote
        seen = []
        for batch in ended(loader):
            seen.append(batch["x"].tolist())
            if len(seen) == 2:
                state = loader.state_dict()
        assert len(seen) == 4
        _, again, _ = prepare(stored(world() + 1), config, batch_size=1)
        again.load_state_dict(state)
        assert rows(again) == seen[2:], (stateful, seen)


def check_join_uneven_inputs_is_left_to_itself():
    accelerator = fresh_accelerator(dataloader_config=DIVIDED)
    lengths = [2 + 2 * number for number in range(world())]
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(own(lengths), 2))
    with accelerator.join_uneven_inputs([model]):
        steps = [learn(accelerator, model(batch.float()[:, None]).sum()) for batch in loader]
    assert len(steps) == rank() + 1
    assert len(rows(loader)) == 1, "outside it they end together again"


def check_datapipes_are_divided_by_torch_or_by_us():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numbers = IterableWrapper(range(4 * world()))
        for pipe, config, way in (
            (numbers.sharding_filter(), None, reading.AlreadySplit),
            (numbers, None, reading.Dispatched),
            (numbers, SHARDED, reading.ReadsEverything),
        ):
            _, loader, found = prepare(pipe, config)
            assert found.reading == way.name
            parts = everywhere(sum(rows(loader), []))
            assert sorted(sum(parts, [])) == list(range(4 * world())), parts


def check_ranks_at_different_batches_are_refused():
    """Rank 0 continues in a loop that the others have left for another one."""
    _, loader, _ = prepare(own([20] * world()), DIVIDED)
    steps = iter(loader)
    next(steps)
    if rank() > 0:
        steps = iter(loader)
    if world() > 1:
        with raised(RuntimeError, "Processes are at different places: rank", "batch 3 of its loop number"):
            next(steps), next(steps)


def lost_process():
    """One rank dies in the middle; the others must end with an error, not wait."""
    _, loader, _ = prepare(own([10**6] * world()), DIVIDED)
    for number, _ in enumerate(loader):
        if number == 3 and rank() == 1:
            os._exit(9)
    print("survived")
