"""Which checkpoints may go."""

import pytest

import checkpoint_samples as samples
from accelerate.checkpoint import pruning
from accelerate.checkpoint.inspect import survey
from accelerate.checkpoint.storage import storage_of


def found(folder):
    return survey(storage_of(folder))


def test_surplus(tmp_path):
    for number in range(4):
        samples.write(tmp_path / f"checkpoint_{number}", age=100 - number)
    samples.write(tmp_path / "best", age=500)
    (tmp_path / "checkpoint_9").mkdir()

    def old(*arguments):
        return [one.name for one in pruning.surplus(found(tmp_path), *arguments)]

    assert old(1) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert old(3) == ["checkpoint_0"]
    assert old(4) == old(9) == []
    with pytest.raises(ValueError, match="keep=0"):
        old(0)


def test_surplus_and_foreign_ones(tmp_path):
    samples.write(tmp_path / "checkpoint_0", age=100)
    samples.foreign(tmp_path / "checkpoint_1", age=50)
    samples.foreign(tmp_path / "checkpoint_2", age=20)
    assert pruning.surplus(found(tmp_path), 1) == []
    # The newest one that can be verified stays, whatever is newer.
    assert [one.name for one in pruning.surplus(found(tmp_path), 1, foreign=True)] == ["checkpoint_1"]
