"""Loaders that are divided among the processes before they are prepared: by a sampler that knows its rank, or as their user says."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.comm import operations
from accelerate.data import reading
from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from accelerate.training import metrics
from cases import cases
from loader_samples import Numbers, SizedStream, needs_torchdata, values


def loader_of(rank, shards, length, size=4, shuffle=False, sampler_drops=False, **options):
    data = Numbers(length)
    sampler = DistributedSampler(data, shards, rank, shuffle=shuffle, drop_last=sampler_drops)
    return DataLoader(data, size, sampler=sampler, **options)


def prepared(loader, rank, shards, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gives part")
        return prepare_data_loader(loader, num_processes=shards, process_index=rank, **options)


class Around(Sampler):
    """A batch sampler around another sampler, under a separate name."""

    def __init__(self, inner):
        self.inner, self.itself = inner, self

    def __iter__(self):
        return iter([[index] for index in self.inner])

    def __len__(self):
        return len(self.inner)


class Ranked:
    """A batch sampler that knows its rank as some libraries call it."""

    def __init__(self, world="world_size", rank="rank", parts=2, index=1):
        setattr(self, world, parts)
        setattr(self, rank, index)

    def __iter__(self):
        return iter([[1], [3, 5]])

    def __len__(self):
        return 2


@cases(
    "part",
    Ranked(),
    Ranked("num_replicas"),
    Ranked("data_parallel_size", "data_parallel_rank"),
    BatchSampler(DistributedSampler(range(7), 2, 1, shuffle=False), 2, drop_last=False),
    BatchSamplerShard(BatchSampler(range(7), 2, drop_last=False), 2, 1),
    Around(DistributedSampler(range(7), 2, 1, shuffle=False)),
    ids=["world_size", "num_replicas", "data_parallel_size", "inside", "shard", "around"],
)
def test_samplers_of_other_libraries_are_recognised(part):
    want = list(part)
    with pytest.warns(UserWarning, match="part 1 of 2 already"):
        loader = prepare_data_loader(DataLoader(Numbers(7), batch_sampler=part), num_processes=2, process_index=1)
    # They may end at different steps, so the processes vote in a real run.
    assert values(loader) == want and loader.batch_sampler is part
    assert loader._reading.ends_by_vote is (type(part) is not BatchSampler)


def test_what_is_not_divided_or_said_to_be_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loader in (loader_of(0, 1, 8), DataLoader(Numbers(8), batch_sampler=Ranked(parts=1, index=0))):
            prepare_data_loader(loader)  # one process
        shared = prepare_data_loader(loader_of(0, 1, 8, 2), num_processes=2, process_index=1)
        assert values(shared) == [[2, 3], [6, 7]], "a sampler of one part is divided"
        for loader, want in (
            (loader_of(1, 2, 8, 2), [[1, 3], [5, 7]]),
            (loader_of(0, 3, 9, 2), [[0, 3], [6]]),  # exactly what it gives
            (DataLoader(Numbers(3), 2), [[0, 1], [2]]),
            (DataLoader(SizedStream(3), 2), [[0, 1], [2]]),
        ):
            told = prepare_data_loader(loader, num_processes=2, process_index=1, already_sharded=True)
            assert values(told) == want and type(told._reading) is reading.AlreadySplit


@cases(
    "given, seen, named",
    ((0, 4), (0, 2), "part 0 of 4.*part 0 of 2"),
    ((0, 2), (1, 2), "part 0 of 2.*part 1 of 2"),
    ((1, 2), (0, 1), "part 1 of 2.*part 0 of 1"),
)
def test_the_part_of_another_process_is_refused(given, seen, named):
    with pytest.raises(ValueError, match=rf"{named}.*already_sharded=True"):
        prepare_data_loader(loader_of(*given, 8), process_index=seen[0], num_processes=seen[1])


def test_ranks_of_one_replica_share_the_part_of_their_replica():
    mesh = SimpleNamespace(mesh_dim_names=("dp_shard", "tp"), mesh=torch.arange(4).view(2, 2))
    for rank in range(4):
        loader = prepared(loader_of(rank // 2, 2, 8), rank, 4, torch_device_mesh=mesh)
        assert values(loader) == values(loader_of(rank // 2, 2, 8)) and loader.total_batch_size == 8
    with pytest.raises(ValueError, match=r"part 3 of 4 already.*part 1 of 2.*tp, cp or sp share one"):
        prepared(loader_of(3, 4, 8), 3, 4, torch_device_mesh=mesh)


def test_one_part_for_one_of_several_processes_is_what_its_sampler_gives(monkeypatch):
    """Libraries that prepare for one process among two leave the division to the sampler."""
    monkeypatch.setattr("accelerate.data.build.PartialState", lambda: SimpleNamespace(
        num_processes=2, process_index=1, is_main_process=False, device=torch.device("cpu"), distributed_type="NO"
    ))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = prepare_data_loader(loader_of(1, 2, 8), num_processes=1, process_index=0)
    assert values(loader) == [[1, 3, 5, 7]]


def test_split_batches_makes_the_batches_smaller_or_is_refused():
    loader = prepared(loader_of(1, 2, 8), 1, 2, split_batches=True)
    assert values(loader) == [[1, 3], [5, 7]] and loader.batch_size == 2 and loader.total_batch_size == 4
    part = Ranked()
    part.batch_size = 2
    with pytest.raises(ValueError, match="split_batches=True would cut the batches of a Ranked"):
        prepared(DataLoader(Numbers(7), batch_sampler=part), 1, 2, split_batches=True)


def test_epochs_reach_the_sampler_and_a_shortened_epoch_is_its_own():
    loader, plain = prepared(loader_of(1, 2, 12, 2, shuffle=True), 1, 2), loader_of(1, 2, 12, 2, shuffle=True)
    for epoch in range(2):
        plain.sampler.set_epoch(epoch)
        assert values(loader) == values(plain)
    loader.set_epoch(1)
    assert values(skip_first_batches(loader, 1)) == values(plain)[1:]


@pytest.mark.parametrize("stateful", [False, pytest.param(True, marks=needs_torchdata)])
def test_an_interrupted_epoch_goes_on_exactly(stateful):
    options = {"use_stateful_dataloader": stateful}
    whole = values(prepared(loader_of(1, 2, 19, 2, shuffle=True), 1, 2, **options))
    loader = prepared(loader_of(1, 2, 19, 2, shuffle=True), 1, 2, **options)
    for _, batch in zip(range(2), loader, strict=False):
        assert batch is not None
        state = loader.state_dict()
    assert state["accelerate_position"]["samples"] == 8
    again = prepared(loader_of(1, 2, 19, 2, shuffle=True), 1, 2, **options)
    again.load_state_dict(state)
    assert values(again) == whole[2:]


def test_an_interrupted_epoch_goes_on_on_another_number_of_processes():
    loaders = [prepared(loader_of(rank, 2, 24, 2, shuffle=True), rank, 2) for rank in range(2)]
    seen, states = [], []
    for loader in loaders:
        for _, batch in zip(range(3), loader, strict=False):
            seen += batch.tolist()
            state = loader.state_dict()
        states.append(state)
    rest = []
    for rank in range(3):
        loader = prepared(loader_of(rank, 3, 24, 2, shuffle=True), rank, 3)
        loader.load_state_dict(states[0])
        rest += sum(values(loader), [])
    assert sorted(seen + rest) == list(range(24)), "12 samples are two steps of three processes"
    uneven = prepared(loader_of(0, 5, 24, 2), 0, 5)
    with pytest.warns(UserWarning, match="last 2 samples will be seen again"):
        uneven.load_state_dict(states[0])
    other = prepare_data_loader(DataLoader(Numbers(24), 2), num_processes=3, process_index=0, already_sharded=True)
    states[0]["accelerate_position"]["data"] = None
    with pytest.warns(UserWarning, match=r"steps of 2 batches.*among 3 processes.*deals them out in turn"):
        other.load_state_dict(states[0])


@pytest.mark.parametrize("objects", [False, True])
def test_a_metric_sees_each_sample_once(monkeypatch, objects):
    """The exchange is played by the test: what each rank has is gathered in the order of ranks."""
    for shards in (2, 3, 4):
        for length in range(shards, 14):
            for drops in (False, True):
                for sampler_drops in (False, True):
                    options = {"drop_last": drops, "sampler_drops": sampler_drops}
                    loaders = [loader_of(rank, shards, length, 2, **options) for rank in range(shards)]
                    ranks = [prepared(loader, rank, shards) for rank, loader in enumerate(loaders)]
                    seen = []
                    for batches in zip(*ranks, strict=True):
                        each = sum((batch.tolist() for batch in batches), [])
                        name = "gather_object_with" if objects else "gather_with"
                        monkeypatch.setattr(operations, name, lambda *_, e=each: e if objects else torch.tensor(e))
                        accelerator = SimpleNamespace(
                            gradient_state=SimpleNamespace(
                                active_dataloader=ranks[0],
                                end_of_dataloader=ranks[0].end_of_dataloader,
                                remainder=ranks[0].remainder,
                            ),
                            _communicator=None, parallelism_config=None, torch_device_mesh=None, num_processes=shards,
                        )  # fmt: skip
                        found = metrics.gather_for_metrics(accelerator, batches[0], objects)
                        seen += found if objects else found.tolist()
                    case = shards, length, drops, sampler_drops
                    assert len(seen) == len(set(seen)), case
                    if not (drops or sampler_drops):
                        assert sorted(seen) == list(range(length)), case


def test_parts_of_a_stream_are_counted_whole_in_a_metric():
    loader = prepare_data_loader(DataLoader(SizedStream(7), 2), num_processes=2, process_index=1, already_sharded=True)
    assert [loader.remainder for _ in loader] == [0] * 4, "7 samples of this process's own, none of which fills up"


@pytest.mark.parametrize("option, value", [("already_sharded", True), ("shard_iterable_dataset", False)])
def test_the_configuration_reaches_the_loader_and_functions_of_upstreams_signature(monkeypatch, option, value):
    data = Numbers(5) if option == "already_sharded" else SizedStream(5)
    config = DataLoaderConfiguration(**{option: value})
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(data, 2))
    assert type(loader._reading) is reading.AlreadySplit and len(values(loader)) == 3

    def upstreams(dataloader, device=None, **options):
        assert option not in options, "functions that users put in its place do not know it"
        return prepare_data_loader(dataloader, device, **options)

    monkeypatch.setattr("accelerate.accelerator.prepare_data_loader", upstreams)
    assert Accelerator(cpu=True).prepare(DataLoader(data, 2))._reading.name != reading.AlreadySplit.name
