"""The permutation that grows: torch's, bit for bit, wherever its blocks end."""

import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accelerate.data.build import prepare_data_loader, skip_first_batches
from accelerate.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from accelerate.runtime import permutation
from accelerate.runtime.permutation import BLOCK, GrowingPermutation, can_grow

LARGE = range((1 << 20) + 3)


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    """Let permutations grow that are short enough to be compared in full."""
    monkeypatch.setattr(permutation, "SHORTEST", 1 << 20)


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("block", [2, 64, BLOCK])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 2])
def test_a_grown_permutation_is_torchs(block, blocks, beyond):
    length = block * blocks + beyond
    for seed in range(3) if length > 1 else ():
        ours, torchs = seeded(seed), seeded(seed)
        grown = GrowingPermutation(length, ours, block)
        wanted = torch.randperm(length, generator=torchs)
        assert torch.equal(ours.get_state(), torchs.get_state())
        for stop in {1, block, length // 2, length}:
            final = grown.grow(stop)
            assert min(stop, length) <= final <= length and torch.equal(grown.indices[:final].long(), wanted[:final])


def test_only_large_permutations_of_a_known_kind_grow(monkeypatch):
    assert [can_grow(length) for length in ((1 << 20) - 1, 1 << 20, (1 << 32) // 20)] == [False, True, False]
    monkeypatch.setattr(permutation, "_draws_as_torch", lambda: False)
    assert not can_grow(1 << 20)


@pytest.mark.parametrize("options", [{}, {"num_samples": 70_000}, {"num_samples": 1_100_000}], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_of_a_large_sampler_is_torchs(options, known, monkeypatch):
    """Two epochs of a program's generator, which has torch's state after the first batch and after each of them."""
    monkeypatch.setattr(permutation, "_draws_as_torch", lambda: known)
    ours, torchs = (RandomSampler(LARGE, generator=seeded(), **options) for _ in range(2))
    for _ in range(2):
        order, walk = iter(torchs), iter(BatchSamplerShard(BatchSampler(ours, 1000, False), even_batches=False))
        assert next(walk) == list(islice(order, 1000))
        assert torch.equal(ours.generator.get_state(), torchs.generator.get_state())
        assert [index for batch in walk for index in batch] == list(order)
        assert torch.equal(ours.generator.get_state(), torchs.generator.get_state())


def test_a_large_epoch_is_the_seeds_and_goes_on_in_the_middle():
    sampler = SeedableRandomSampler(LARGE, data_seed=3)
    wanted = torch.randperm(len(LARGE), generator=seeded(3)).tolist()
    assert list(sampler) == wanted and sampler.epoch == 1
    sampler.set_epoch(0)
    sampler = pickle.loads(pickle.dumps(sampler))
    shard = BatchSamplerShard(BatchSampler(sampler, 1000, False), 4, 1)
    for start, extra in ((0, 0), (5, 0), (200, 7), (262, 0)):
        sampler.set_epoch(0)
        first = start * 4000 + extra + 1000
        rest = list(SkipBatchSampler(shard, start, extra))
        assert rest[0] == (wanted + wanted)[first : first + 1000]


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_large_epoch_is_resumed_in_the_middle(seedable, workers):
    def loader():
        torch.manual_seed(3)
        data = DataLoader(LARGE, 1000, shuffle=True, num_workers=workers)
        return prepare_data_loader(data, num_processes=8, process_index=3, use_seedable_sampler=seedable)

    whole, resumed = loader(), loader()
    batches = iter(whole)
    for _ in range(3):
        next(batches)
    position, following = whole.state_dict(), next(batches)
    del batches
    torch.rand(5)
    resumed.load_state_dict(position)
    assert torch.equal(next(iter(resumed)), following)
    assert torch.equal(next(iter(skip_first_batches(loader(), 3))), following)
