import pytest

from accelerate.parallel import mesh as layout
from accelerate.parallelism_config import ParallelismConfig
from sharded_samples import fake_group


@pytest.fixture(params=[0, 5, 15])
def rank(request):
    with fake_group(request.param, 16):
        yield request.param


def test_places(rank):
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2, tp_size=2)
    mesh = config.get_device_mesh("cpu")
    assert layout.submesh(None, "tp") is None and layout.rank(None, "tp") == 0
    assert layout.rank(mesh, "tp") == rank % 2
    assert layout.rank(mesh, "cp") == rank // 2 % 2
    assert layout.rank(mesh, "dp_replicate") == rank // 8
    assert layout.submesh(mesh, "dp_cp").size() == 8
    assert layout.submesh(mesh, "sp") is None
    assert (layout.submesh(mesh, "dp").size(), layout.rank(mesh, "dp")) == (4, rank // 4)
