"""The configuration of data loaders."""

import dataclasses

from accelerate.config.data import DataLoaderConfiguration


def test_fields_in_order_with_their_defaults():
    assert dataclasses.asdict(DataLoaderConfiguration()) == {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": False,
        "data_seed": None,
        "non_blocking": False,
        "use_stateful_dataloader": False,
        "shard_iterable_dataset": True,
        "continue_after_load": True,
    }
    assert DataLoaderConfiguration(True, False, False).split_batches is True


def test_fields_can_be_assigned_later():
    configuration = DataLoaderConfiguration()
    configuration.data_seed, configuration.non_blocking, configuration.dispatch_batches = 3, True, True
    assert configuration == DataLoaderConfiguration(data_seed=3, non_blocking=True, dispatch_batches=True)
