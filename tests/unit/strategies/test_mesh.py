import pytest
import torch
from torch import distributed

from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies import mesh as layout
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


def test_accelerators_do_not_share_shards_over_gloo():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        layout.check_backend(torch.device("cpu"))
        with pytest.raises(ValueError, match="backend='gloo' cannot gather shards on cuda"):
            layout.check_backend(torch.device("cuda", 0))
    finally:
        distributed.destroy_process_group()
