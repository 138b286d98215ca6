"""The folders of a run; the fields of DataLoaderConfiguration are recorded (tests/architecture)."""

import pytest

from accelerate.config.project import DataLoaderConfiguration, ProjectConfiguration


def test_logs_go_to_the_project_unless_told_otherwise():
    assert ProjectConfiguration("run").logging_dir == "run"
    assert ProjectConfiguration("run", "logs").logging_dir == "logs"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_keeps_at_least_one(limit):
    with pytest.raises(ValueError, match=f"total_limit is {limit}"):
        ProjectConfiguration(total_limit=limit)
    assert ProjectConfiguration(total_limit=1).total_limit == 1
    assert ProjectConfiguration(total_limit="2").total_limit == 2
    with pytest.raises(ValueError, match="total_limit is 'two'"):
        ProjectConfiguration(total_limit="two")


def test_removed_reader_per_node_names_replacement():
    with pytest.raises(ValueError, match="dispatch_readers='per_node' is not supported.*already_sharded=True"):
        DataLoaderConfiguration(dispatch_readers="per_node")
