"""Random orders that can be told and told again."""

import pickle

import pytest
import torch
from torch.utils.data import RandomSampler

from accelerate.data.samplers import ReplayableRandomSampler, SeedableRandomSampler, draw_seed


def order_of(seed, size=8):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def test_seedable_order_depends_on_seed_and_epoch_only():
    sampler = SeedableRandomSampler(range(8), data_seed=42)
    torch.rand(3)
    assert [list(sampler), list(sampler)] == [order_of(42), order_of(43)]
    assert sampler.epoch == 2
    sampler.set_epoch(1)
    assert list(sampler) == order_of(43)


def test_seedable_takes_the_seed_of_the_default_generator_without_drawing():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    sampler = SeedableRandomSampler(range(8))
    torch.manual_seed(6)
    assert list(sampler) == order_of(5)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_abandoned_iteration_does_not_move_the_epoch_on():
    sampler = SeedableRandomSampler(range(8), data_seed=1)
    next(iter(sampler))
    assert sampler.epoch == 0


def test_the_pickle_names_the_public_path():
    sampler = SeedableRandomSampler(range(8), data_seed=1)
    assert b"accelerate.data_loader" in pickle.dumps(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == order_of(1)


@pytest.mark.parametrize("options", [{}, {"num_samples": 5}, {"replacement": True, "num_samples": 70}])
def test_adopted_sampler_draws_what_the_plain_one_draws(options):
    torch.manual_seed(3)
    plain = RandomSampler(range(40), **options)
    want, after = [list(plain), list(plain)], torch.rand(1)
    torch.manual_seed(3)
    adopted = RandomSampler(range(40), **options)
    ReplayableRandomSampler.adopt(adopted)
    assert [list(adopted), list(adopted)] == want
    assert torch.rand(1) == after and adopted.generator is None


def test_adopted_sampler_replays_once():
    sampler = RandomSampler(range(40))
    ReplayableRandomSampler.adopt(sampler)
    first = list(sampler)
    seed = sampler.seed
    second = list(sampler)
    state = torch.get_rng_state()
    sampler.replay = seed
    assert list(sampler) == first != second
    assert torch.equal(torch.get_rng_state(), state), "a replay draws no new seed"
    assert list(sampler) not in (first, second)


def test_only_plain_random_samplers_are_adopted():
    class Custom(RandomSampler):
        pass

    custom = Custom(range(3))
    ReplayableRandomSampler.adopt(custom)
    ReplayableRandomSampler.adopt(None)
    assert type(custom) is Custom


def test_a_sampler_with_a_generator_uses_it():
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(9))
    ReplayableRandomSampler.adopt(sampler)
    assert list(sampler) == order_of(9)


def test_draw_seed_is_one_draw():
    torch.manual_seed(0)
    seed = draw_seed()
    torch.manual_seed(0)
    assert int(torch.empty((), dtype=torch.int64).random_()) == seed
