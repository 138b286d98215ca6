import copy
import math
import pickle
import types

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate.data.layout import ShardLayout
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies.mesh import submesh
from cases import cases


@pytest.fixture
def world():
    """A process group of 16 ranks that exist only in name; this is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


def accelerator(processes, fsdp2=False, several=True):
    return types.SimpleNamespace(
        num_processes=processes,
        is_fsdp2=fsdp2,
        multi_device=several and not fsdp2,
        use_distributed=processes > 1 and several is not None,
    )


@cases(
    "options, message",
    *(({"tp_size": size}, "tp_size is") for size in (0, -1, "x", 1.5)),
    ({"cp_size": 2, "sp_size": 2}, "both split the sequence"),
    ({"dp_replicate_size": 2, "tp_size": 2}, "dp_replicate_size=2"),
    ({"dp_replicate_size": 2, "cp_size": 2}, "cp_size=2"),
    ({"cp_backend": "x"}, "cp_backend is 'x'"),
    ({"sp_backend": "x"}, "sp_backend is 'x'"),
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**options)


def test_nothing_to_build():
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None
    with pytest.raises(ValueError, match="device_type"):
        ParallelismConfig(tp_size=2).get_device_mesh()


def test_mesh_with_flattened_dimensions(world):
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert tuple(mesh.shape) == (2, 2, 2, 2)
    assert submesh(mesh, "dp").mesh.tolist() == [0, 4, 8, 12]
    assert submesh(mesh, "dp_shard_cp").mesh.tolist() == [0, 2, 4, 6]
    assert submesh(mesh, "dp_cp").mesh.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert submesh(mesh, "sp") is None
    assert config.device_mesh is None


def test_mesh_is_built_once(world):
    config = ParallelismConfig(dp_shard_size=4, tp_size=4)
    mesh = config.get_device_mesh("cpu")
    assert config.get_device_mesh() is config.get_device_mesh("cpu") is config.device_mesh is mesh
    with pytest.raises(ValueError, match="'cuda'.*'cpu'"):
        config.get_device_mesh("cuda")
    assert pickle.loads(pickle.dumps(config)).device_mesh is None
    assert copy.deepcopy(config) == config


def test_pipelines(monkeypatch, world):
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", "4")
    config = ParallelismConfig(dp_replicate_size=4)
    assert config.pp_size == 4 and config.pp_enabled and config.total_size == 16
    assert config.non_data_parallel_size == 4 and config.data_parallel_size == 4
    assert config.active_mesh_dims == ["dp_replicate", "pp"] and config.dp_cp_dim_names == ["dp_replicate"]
    mesh = config.build_device_mesh("cpu")
    assert mesh.mesh_dim_names == ("pp", "dp_replicate")  # ranks of one pipeline are far apart
    assert [layout.shard_index for layout in ShardLayout.of_all(16, mesh)] == [0, 1, 2, 3] * 4
    for name in ("tp_size", "cp_size", "sp_size", "ep_size"):
        with pytest.raises(ValueError, match=f"pp_size=4 with {name}=2"):
            ParallelismConfig(**{name: 2})


@cases(
    "sizes, run, after",
    ({"dp_shard_size": 2, "tp_size": 2}, accelerator(4), 4),
    ({"dp_shard_size": 2, "tp_size": 2}, accelerator(4, fsdp2=True), 4),
    ({}, accelerator(1, several=False), 1),
    ({}, accelerator(4), 4),  # processes that nothing claims are replicas
    ({"sp_size": 2}, accelerator(4), 2),  # DeepSpeed takes the others
)
def test_sizes_that_fit(sizes, run, after):
    config = ParallelismConfig(**sizes)
    config._validate_accelerator(run)
    assert config.total_size == math.prod(config._sizes.values()) == after
    assert config.dp_replicate_size == (4 if sizes == {} and after == 4 else 1)


@cases(
    "sizes, run, text",
    (
        {"dp_shard_size": 2, "tp_size": 2},
        accelerator(8),
        "dp_replicate_size=1 x dp_shard_size=2 x tp_size=2 x cp_size=1 x sp_size=1 = 4, but 8",
    ),
    ({"sp_size": 2}, accelerator(3), "sp_size=2 = 2, but 3"),
    ({"dp_shard_size": 1, "tp_size": 2}, accelerator(2, several=None), "accelerate launch"),
    *(
        (sizes, accelerator(4, fsdp2=True), "nothing to shard over")
        for sizes in ({}, {"tp_size": 4}, {"dp_replicate_size": 4})
    ),
)
def test_sizes_that_do_not_fit(sizes, run, text):
    with pytest.raises(ValueError, match=text):
        ParallelismConfig(**sizes)._validate_accelerator(run)
