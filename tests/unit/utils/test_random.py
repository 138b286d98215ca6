import random
import re

import numpy as np
import pytest
import torch

from accelerate.config.enums import RNGType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.process import PartialState
from accelerate.runtime import storage
from accelerate.utils.random import set_seed, synchronize_rng_state, synchronize_rng_states


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_seed_repeats_all_generators():
    set_seed(3)
    first = draw()
    set_seed(np.int64(3))
    assert draw() == first
    set_seed(4)
    assert draw() != first


def test_device_specific_seeds_differ_by_rank_unless_ranks_share_layers():
    PartialState(cpu=True)

    def seeds(seed):
        for rank in range(4):
            storage.process.current["process_index"] = rank
            set_seed(seed, device_specific=True)
            yield torch.initial_seed()

    assert list(seeds(5)) == [5, 6, 7, 8] and list(seeds(2**32 - 1)) == [2**32 - 1, 0, 1, 2]
    storage.accelerator.current["parallelism_config"] = ParallelismConfig(tp_size=2, dp_shard_size=2)
    assert list(seeds(5)) == [5, 5, 6, 6]


def test_deterministic_mode():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("seed", "error"),
    [*((seed, TypeError) for seed in ("5", 5.5, None, [1])), *((seed, ValueError) for seed in (-1, 2**32))],
)
def test_what_is_no_seed(seed, error):
    with pytest.raises(error, match=re.escape(f"seed={seed!r}")):
        set_seed(seed)


@pytest.mark.parametrize("words", [["torch"], [None], ["python"], ["generator"], ["cuda"], [RNGType.TORCH]])
def test_synchronising_alone_changes_nothing(words):
    state = torch.get_rng_state()
    for word in words:
        synchronize_rng_state(word)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("rng_type", "generator", "error", "words"),
    [
        (RNGType.GENERATOR, None, AssertionError, "generator="),
        (RNGType.GENERATOR, 5, AttributeError, "get_state"),
        (RNGType.MLU, None, AssertionError, "'mlu' asks for the generator of a device"),
        ("generator", None, AssertionError, "generator="),
        ("dice", None, ValueError, "'dice'.*'torch'"),
    ],
)
def test_what_cannot_be_synchronised(rng_type, generator, error, words):
    with pytest.raises(error, match=words):
        synchronize_rng_states([rng_type], generator)
