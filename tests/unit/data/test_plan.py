"""Who reads what, and which samples of a round are real."""

from types import SimpleNamespace

import pytest
import torch

from accelerate.data.plan import RoundLog, ShardLayout, real_per_shard


def mesh(names, shape):
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return SimpleNamespace(mesh=ranks, mesh_dim_names=names)


def test_without_a_mesh_every_process_has_its_own_shard():
    assert ShardLayout.of(4, 3) == ShardLayout(num_shards=4, shard_index=3)


@pytest.mark.parametrize(
    ("names", "shape", "shards", "indices"),
    [
        (("dp_shard", "tp"), (2, 2), 2, [0, 0, 1, 1]),
        (("tp", "dp_shard"), (2, 2), 2, [0, 1, 0, 1]),
        (("dp_replicate", "dp_shard", "cp"), (2, 2, 2), 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (("sp",), (2,), 1, [0, 0]),
    ],
)
def test_ranks_of_one_replica_share_a_shard(names, shape, shards, indices):
    layouts = [ShardLayout.of(len(indices), rank, mesh(names, shape)) for rank in range(len(indices))]
    assert {layout.num_shards for layout in layouts} == {shards}
    assert [layout.shard_index for layout in layouts] == indices


def test_a_mesh_that_does_not_tell_is_refused():
    with pytest.raises(ValueError, match="no dimension names"):
        ShardLayout.of(2, 0, mesh(None, (2,)))
    with pytest.raises(ValueError, match="holds process 5 0 times"):
        ShardLayout.of(6, 5, mesh(("dp_shard",), (2,)))


def test_real_samples_come_first():
    assert real_per_shard(real=4, size=3, shards=3) == (3, 1, 0)
    log = RoundLog()
    log.note(number=7, real=4, size=3, shards=3)
    assert log.padded == {7: (3, 1, 0)}
    log.clear()
    assert log.padded == {}
