"""Options of loaders that several processes have to agree on: a device mesh, a slice function, seeds."""

import warnings

import torch
from harness import everywhere, fresh_accelerator, run
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

from accelerate import DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader, skip_first_batches


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(torch.arange(self.length))


def values(loader):
    return [batch.tolist() for batch in loader]


def ranks_of_one_replica_share_their_data():
    accelerator = fresh_accelerator()
    world = accelerator.num_processes
    if world % 2:
        return
    halves = world // 2
    # Ranks in the layout of a mesh: which of them read alike, and which shard it is.
    layouts = {
        ("dp_shard", "tp"): ((halves, 2), [rank // 2 for rank in range(world)], halves),
        ("tp", "dp_shard"): ((2, halves), [rank % halves for rank in range(world)], halves),
        ("dp_replicate", "dp_shard"): ((2, halves), list(range(world)), world),
        ("cp", "tp"): ((halves, 2), [0] * world, 1),
    }
    for names, (shape, shard_of, shards) in layouts.items():
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        for dataset, dispatch, seedable in (
            (range(11), False, False),
            (range(11), False, True),
            (range(11), True, False),
            (Stream(11), False, False),
            (Stream(11), True, False),
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
                for rank, batches in enumerate(told):
                    assert batches == told[shard_of.index(shard_of[rank])], (case, told)
                of_shards = [told[shard_of.index(shard)] for shard in range(shards)]
                seen = [number for batches in of_shards for batch in batches for number in batch]
                assert set(seen) == set(range(11)) and len({len(batches) for batches in of_shards}) == 1, (case, told)
                rounds = [[n for part in step for n in part] for step in zip(*of_shards, strict=True)]
                order = [number for step in rounds for number in step][:11]
                assert sorted(order) == list(range(11)), (case, order)
                assert seedable or order == list(range(11)), (case, order)
            rest = values(skip_first_batches(loader, 1))
            loader.set_epoch(loader.iteration - 1)  # the same once more
            whole = values(loader)
            if dispatch:
                # What completes the last round is not the same there; it does not count.
                real = (
                    None if loader.batch_counts is None else loader.batch_counts[shard_of[accelerator.process_index]]
                )
                rest[-1:], whole[-1:] = [rest[-1][:real]], [whole[-1][:real]]
            assert rest == whole[1:], (case, rest, whole)


def a_slice_function_cuts_the_parts():
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rank, world = accelerator.process_index, accelerator.num_processes
    calls = []

    def every_nth(batch, part, process_index=None, num_processes=None):
        calls.append((part.stop - part.start, process_index, num_processes))
        return batch[process_index::num_processes]

    whole = DataLoader(torch.arange(4 * world), batch_size=2)
    loader = accelerator.prepare_data_loader(whole, slice_fn_for_dispatch=every_nth)
    got = values(loader)
    assert got == [list(range(at + rank, at + 2 * world, world)) for at in (0, 2 * world)], got
    assert calls == [(2, rank, world)] * 2
    # Without dispatching it has no part in anything, and that is said.
    accelerator = fresh_accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = accelerator.prepare_data_loader(whole, slice_fn_for_dispatch=every_nth)
    assert any("slice_fn_for_dispatch" in str(item.message) for item in caught) and len(calls) == 2
    assert sorted(sum(sum(everywhere(values(loader)), []), [])) == list(range(4 * world))


def the_order_is_that_of_the_data_seed():
    """Whatever the seeds of the ranks are, and whether the order is drawn on each rank or on one."""
    expected = {}
    for data_seed in (None, 3):
        for dispatch in (False, True):
            torch.manual_seed(7)
            accelerator = fresh_accelerator(
                dataloader_config=DataLoaderConfiguration(
                    use_seedable_sampler=True, data_seed=data_seed, dispatch_batches=dispatch
                )
            )
            if accelerator.process_index > 0:
                torch.manual_seed(100 + accelerator.process_index)
            loader = accelerator.prepare(DataLoader(torch.arange(13), batch_size=2, shuffle=True))
            for epoch in range(2):
                torch.rand(accelerator.process_index)
                found = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist()
                seed = 7 if data_seed is None else data_seed
                want = torch.randperm(13, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
                assert found == want, (data_seed, dispatch, epoch, found, want)
                assert expected.setdefault((data_seed, epoch), found) == found


if __name__ == "__main__":
    run(ranks_of_one_replica_share_their_data, a_slice_function_cuts_the_parts, the_order_is_that_of_the_data_seed)
