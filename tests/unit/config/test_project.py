"""The data and the folders of a run."""

import dataclasses
from pathlib import Path

import pytest

from accelerate.config.project import DataLoaderConfiguration, ProjectConfiguration


def test_logs_go_to_the_project_unless_told_otherwise():
    assert ProjectConfiguration("run").logging_dir == "run"
    assert ProjectConfiguration("run", "logs").logging_dir == "logs"
    assert ProjectConfiguration(Path("run")).logging_dir == Path("run")
    assert ProjectConfiguration().project_dir is None


def test_set_directories():
    project = ProjectConfiguration()
    project.set_directories("first")
    assert (project.project_dir, project.logging_dir) == ("first", "first")
    project.set_directories("second")
    assert (project.project_dir, project.logging_dir) == ("second", "first")


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_keeps_at_least_one(limit):
    with pytest.raises(ValueError, match=f"total_limit is {limit}"):
        ProjectConfiguration(total_limit=limit)
    assert ProjectConfiguration(total_limit=1).total_limit == 1
    assert ProjectConfiguration(total_limit="2").total_limit == 2
    with pytest.raises(ValueError, match="total_limit is 'two'"):
        ProjectConfiguration(total_limit="two")


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
