import pytest
import torch

from accelerate.config.enums import RNGType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.process import PartialState
from accelerate.runtime import storage
from accelerate.utils.random import set_seed, synchronize_rng_states


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
