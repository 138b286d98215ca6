"""Loaders across real processes: nothing lost, nothing doubled, all in step; and what the processes have to share.

accelerate launch --cpu --num_processes 2 check_loaders.py
"""

import warnings
from functools import partial

import torch
from expect import raised
from harness import Stream, everywhere, fresh_accelerator, rank, shared_folder, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

from accelerate import DataLoaderConfiguration
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accelerate.state import GradientState
from accelerate.utils.random import synchronize_rng_states


def read(length, error_at=None):
    """The rows of a stream that only the main process can read, which grow wider; one of them it cannot read."""
    assert rank() == 0, "only the main process reads a dispatched stream"
    for index in range(length):
        if index == error_at:
            raise OSError(f"row {index}")
        yield {"index": index, "wide": [float(index)] * (2 + index // 4), "name": f"row {index}"}


def dispatched(length, batch_size, error_at=None, **options):
    whole = DataLoader(Stream(partial(read, length, error_at)), batch_size, collate_fn=by_width)
    return prepare_data_loader(whole, put_on_device=True, **options)


def by_width(rows):
    """Each batch has a separate shape."""
    width = 2 + rows[0]["index"] // 8
    wide = torch.tensor([(row["wide"] + [row["index"]] * width)[:width] for row in rows], dtype=torch.float32)
    return {"index": torch.tensor([row["index"] for row in rows]), "wide": wide, "name": [row["name"] for row in rows]}


def values(loader):
    return [batch.tolist() for batch in loader]


def indices(loader):
    return [batch["index"].tolist() for batch in loader]


def check_independent_generators_draw_one_order():
    """Processes whose default generators differ still draw one common order, whichever other generators are synchronised."""
    fresh_accelerator()
    torch.manual_seed(rank())
    torch.rand(rank() + 1)
    for sampler in (None, WeightedRandomSampler([1.0] * 12, 12, replacement=False)):
        loader = DataLoader(range(12), 2, sampler=sampler, shuffle=sampler is None)
        for seedable, kinds in ((False, ["generator"]), (True, ["generator"]), (False, ["torch"]), (False, [])):
            prepared = prepare_data_loader(loader, rng_types=kinds, use_seedable_sampler=seedable)
            orders = [sum(sum(everywhere(values(prepared)), []), []) for _ in range(2)]
            assert set(orders[0]) == set(orders[1]) == set(range(12)) and orders[0] != orders[1], orders
    synchronize_rng_states(["torch"])


def check_rows_of_any_width_are_dispatched():
    accelerator = fresh_accelerator()
    loader = dispatched(16 * world(), 4 * world(), split_batches=True)
    assert isinstance(loader, DataLoaderDispatcher)
    for epoch in range(2):
        mine = []
        for batch in loader:
            assert batch["index"].device == batch["wide"].device == accelerator.device
            assert batch["name"] == [f"row {index}" for index in batch["index"].tolist()]
            assert [row.max().item() for row in batch["wide"]] == batch["index"].tolist()
            counts = loader.batch_counts
            mine += batch["index"].tolist()[: None if counts is None else counts[rank()]]
        assert sorted(sum(everywhere(mine), [])) == list(range(16 * world())) and loader.iteration == epoch + 1


def check_the_length_of_a_dispatched_loader_is_its_steps():
    data = torch.arange(2 * (2 * world() + 1))  # one batch more than two steps take
    for drop_last, steps in ((False, 3), (True, 2)):
        accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        loader = accelerator.prepare(DataLoader(data, batch_size=2, drop_last=drop_last))
        assert len(loader) == len(list(loader)) == (steps if world() > 1 else 3), (drop_last, len(loader))


def check_dispatched_loops_are_left_early_or_fail_together():
    fresh_accelerator()
    loader = dispatched(24, 2 * world(), split_batches=True)
    found = indices(loader)
    assert indices(skip_first_batches(loader, 1)) == found[1:] and loader.iteration == 2
    for batch in loader:
        assert batch["index"].tolist() == found[0]
        break
    assert not GradientState().in_dataloader
    assert indices(loader) == found, "all processes left at the same batch and start again"
    with raised(*((OSError,) if rank() == 0 else (RuntimeError, "OSError")), "row 5"):
        list(dispatched(12, 4, error_at=5, dispatch_batches=True))
    assert everywhere(1) == [1] * world()


class EveryOther:
    """A batch sampler that knows its rank; the last one has a batch more."""

    def __init__(self):
        self.num_replicas, self.rank = world(), rank()

    def __iter__(self):
        return iter([[self.rank], [world() + self.rank], [2 * world()]][: 2 + (self.rank == world() - 1)])


def check_what_a_sampler_has_divided_is_read_as_it_is():
    if world() == 1:
        return
    for length in range(4 * world(), 6 * world() + 1):
        accelerator = fresh_accelerator()
        sampler = DistributedSampler(range(length), world(), rank(), seed=length)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = accelerator.prepare(DataLoader(range(length), 2, sampler=sampler))
        assert [("DistributedSampler" in str(one.message), one.filename) for one in caught] == [(True, __file__)]
        for epoch in range(2):
            mine, metric = [], []
            for batch in loader:
                mine += batch.tolist()
                metric += accelerator.gather_for_metrics(batch).tolist()
            assert sampler.epoch == epoch and mine == list(sampler)
            assert sorted(metric) == list(range(length)), (length, metric)
    with shared_folder() as folder:
        for number, _ in enumerate(loader):
            if number == 1:
                rest = list(sampler)[4:]
                accelerator.save_state(folder)
                break
        accelerator.load_state(folder)
        assert sum(values(loader), []) == rest, "the interrupted epoch continues, on every rank"
    loader = accelerator.prepare(DataLoader(range(3 * world()), batch_sampler=EveryOther()))
    assert values(loader) == [[rank()], [world() + rank()]], "all ranks stop together"


def check_ranks_of_one_replica_share_their_data():
    accelerator = fresh_accelerator()
    ranks, halves = range(world()), world() // 2
    if world() % 2:
        return
    # Ranks in the layout of a mesh: which of them read alike, and which shard it is.
    layouts = {
        ("dp_shard", "tp"): ((halves, 2), [each // 2 for each in ranks], halves),
        ("tp", "dp_shard"): ((2, halves), [each % halves for each in ranks], halves),
        ("dp_replicate", "dp_shard"): ((2, halves), list(ranks), world()),
        ("cp", "tp"): ((halves, 2), [0] * world(), 1),
    }
    for names, (shape, shard_of, shards) in layouts.items():
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        for dataset, dispatch, seedable in (
            (range(11), False, False),
            (range(11), False, True),
            (range(11), True, False),
            (Stream(torch.arange(11)), False, False),
            (Stream(torch.arange(11)), True, False),
        ):
            loader = prepare_data_loader(
                DataLoader(dataset, batch_size=2, shuffle=seedable),
                put_on_device=True,
                dispatch_batches=dispatch,
                torch_device_mesh=mesh,
                use_seedable_sampler=seedable,
                data_seed=5,
            )
            case = (names, type(dataset).__name__, dispatch, seedable)
            for _ in range(2):
                told = everywhere(values(loader))
                assert all(told[each] == told[shard_of.index(shard_of[each])] for each in ranks), (case, told)
                of_shards = [told[shard_of.index(shard)] for shard in range(shards)]
                rounds = [[n for part in step for n in part] for step in zip(*of_shards, strict=True)]
                order = [number for step in rounds for number in step][:11]
                assert sorted(order) == list(range(11)), (case, order)
                assert seedable or order == list(range(11)), (case, order)
            rest = values(skip_first_batches(loader, 1))
            loader.set_epoch(loader.iteration - 1)  # the same once more
            whole = values(loader)
            if dispatch:
                # What completes the last round is not the same there; it does not count.
                real = None if loader.batch_counts is None else loader.batch_counts[shard_of[rank()]]
                rest[-1:], whole[-1:] = [rest[-1][:real]], [whole[-1][:real]]
            assert rest == whole[1:], (case, rest, whole)


def check_metrics_of_dispatched_batches_with_several_rows_per_sample_are_complete():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = DataLoader(list(range(4 * world())), 2, collate_fn=lambda samples: torch.tensor(samples * 2))
    found = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(loader)]
    assert sorted(torch.cat(found).tolist()) == sorted([*range(4 * world())] * 2)


def check_a_slice_function_cuts_the_parts():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    calls = []

    def every_nth(batch, part, process_index=None, num_processes=None):
        calls.append((part.stop - part.start, process_index, num_processes))
        return batch[process_index::num_processes]

    whole = DataLoader(torch.arange(4 * world()), batch_size=2)
    loader = accelerator.prepare_data_loader(whole, slice_fn_for_dispatch=every_nth)
    got = values(loader)
    assert got == [list(range(at + rank(), at + 2 * world(), world())) for at in (0, 2 * world())], got
    assert calls == [(2, rank(), world())] * 2
    # Without dispatching it has no part in anything, and that is said.
    accelerator = fresh_accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = accelerator.prepare_data_loader(whole, slice_fn_for_dispatch=every_nth)
    assert any("slice_fn_for_dispatch" in str(item.message) for item in caught) and len(calls) == 2
    assert sorted(sum(sum(everywhere(values(loader)), []), [])) == list(range(4 * world()))


def check_workers_forked_straight_after_a_collective_live():
    """A worker that hangs in `os.fork` next to the threads of the process group shows as a loader that times out."""
    accelerator = fresh_accelerator()
    loader = DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True, num_workers=2, timeout=30)
    model, loader = accelerator.prepare(nn.Linear(4, 1), loader)
    for _ in range(10 if world() == 2 else 1):
        for batch in loader:
            accelerator.backward(model(batch).sum())
