import copy
import json
import math
import os
import pickle
import types

import pytest
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate.config.parallel import TorchContextParallelConfig, TorchTensorParallelConfig
from accelerate.parallelism_config import ParallelismConfig


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PARALLELISM_CONFIG_"):
            monkeypatch.delenv(name)


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


def test_defaults():
    config = ParallelismConfig()
    assert config.total_size == config.data_parallel_size == config.non_data_parallel_size == 1
    assert config._sizes == {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "sp": 1}
    assert config.active_mesh_dims == config.dp_dim_names == config.non_dp_dim_names == []
    assert config.fsdp_dim_names == ["dp_shard_cp"]
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert config.tp_handler is config.cp_handler is config.sp_handler is None


def test_environment(monkeypatch):
    for name, size in (("DP_REPLICATE", 2), ("DP_SHARD", 3), ("TP", 4), ("CP", 5)):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    config = ParallelismConfig()
    assert config._sizes == {"dp_replicate": 2, "dp_shard": 3, "tp": 4, "cp": 5, "sp": 1}
    assert config.total_size == 120
    assert config.cp_handler == TorchContextParallelConfig("alltoall")
    assert ParallelismConfig(tp_size=1).tp_size == 1


def test_dimension_names():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2))
    # The ranks of tensor parallelism are neighbours; sequences that are shared through torch shard parameters as well.
    assert ParallelismConfig(tp_size=2, sp_size=4)._get_mesh() == (("sp", "tp"), (4, 2))
    config = ParallelismConfig(dp_shard_size=2, sp_size=2, sp_backend="torch")
    assert config.dp_shard_cp_dim_names == ["dp_shard", "sp"] and config.dp_cp_dim_names == ["dp_shard", "sp"]
    assert ParallelismConfig(dp_shard_size=2, sp_size=2).dp_shard_cp_dim_names == ["dp_shard"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"tp_size": size}, "tp_size is") for size in (0, -1, "x", 1.5)),
        ({"cp_size": 2, "sp_size": 2}, "both split the sequence"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "dp_replicate_size=2"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "cp_size=2"),
        ({"cp_backend": "x"}, "cp_backend is 'x'"),
        ({"sp_backend": "x"}, "sp_backend is 'x'"),
        ({"tp_size": 2, "tp_handler": 5}, "tp_handler is a int"),
        ({"cp_size": 2, "cp_handler": TorchTensorParallelConfig()}, "must be a TorchContextParallelConfig"),
    ],
)
def test_refused_settings(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**options)


def test_to_json():
    handler = TorchTensorParallelConfig(plan={"up": ColwiseParallel(), "down": "rowwise"})
    plan = json.loads(json.dumps(ParallelismConfig(tp_size=2, tp_handler=handler).to_json()))["tp_handler"]["plan"]
    assert plan["down"] == "rowwise" and "ColwiseParallel" in plan["up"], "torch's styles are shown in words"
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    shown = json.loads(json.dumps(config.to_json()))
    assert shown["dp_shard_size"] == 2
    assert shown["cp_handler"] == {"cp_comm_strategy": "allgather"}
    assert shown["sp_handler"] is None
    restored = ParallelismConfig(**{k: v for k, v in shown.items() if not k.endswith("handler")})
    assert restored._sizes == config._sizes and "dp_shard_size=2" in repr(config)


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
    flat = mesh._flatten_mapping
    assert flat["dp"].mesh.tolist() == [0, 4, 8, 12]
    assert flat["dp_shard_cp"].mesh.tolist() == [0, 2, 4, 6]
    assert flat["dp_cp"].mesh.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert config.device_mesh is None


def test_mesh_is_built_once(world):
    config = ParallelismConfig(dp_shard_size=4, tp_size=4)
    mesh = config.get_device_mesh("cpu")
    assert config.get_device_mesh() is config.get_device_mesh("cpu") is config.device_mesh is mesh
    with pytest.raises(ValueError, match="'cuda'.*'cpu'"):
        config.get_device_mesh("cuda")
    assert pickle.loads(pickle.dumps(config)).device_mesh is None
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize(
    ("sizes", "run", "after"),
    [
        ({"dp_shard_size": 2, "tp_size": 2}, accelerator(4), 4),
        ({"dp_shard_size": 2, "tp_size": 2}, accelerator(4, fsdp2=True), 4),
        ({}, accelerator(1, several=False), 1),
        ({}, accelerator(4), 4),  # processes that nothing claims are replicas
        ({"sp_size": 2}, accelerator(4), 2),  # DeepSpeed takes the others
    ],
)
def test_sizes_that_fit(sizes, run, after):
    config = ParallelismConfig(**sizes)
    config._validate_accelerator(run)
    assert config.total_size == math.prod(config._sizes.values()) == after
    assert config.dp_replicate_size == (4 if sizes == {} and after == 4 else 1)


@pytest.mark.parametrize(
    ("sizes", "run", "text"),
    [
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
    ],
)
def test_sizes_that_do_not_fit(sizes, run, text):
    with pytest.raises(ValueError, match=text):
        ParallelismConfig(**sizes)._validate_accelerator(run)


def test_a_subclass_may_add_a_dimension():
    class WithExperts(ParallelismConfig):
        def __post_init__(self):
            super().__post_init__()
            self.ep_size = 2
            self._sizes["ep"] = 2

        @property
        def non_dp_dim_names(self):
            return [*super().non_dp_dim_names, "ep"]

    config = WithExperts(dp_shard_size=2)
    assert config.total_size == 4
    assert config._get_mesh() == (("dp_shard", "ep"), (2, 2))
