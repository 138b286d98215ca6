import copy
import itertools
import json
import os
import pickle
import types

import pytest
import torch.distributed as dist
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
        num_processes=processes, is_fsdp2=fsdp2, multi_device=several and not fsdp2, use_distributed=processes > 1
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


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2), (2, 3), (1, 2), (1, 4))))
def test_arithmetic(sizes):
    replicate, shard, tp, cp = sizes
    config = ParallelismConfig(replicate, shard, tp, cp)
    assert (
        config.total_size == config.data_parallel_size * config.non_data_parallel_size == replicate * shard * tp * cp
    )
    assert (config.tp_enabled, config.cp_enabled, config.dp_replicate_enabled) == (tp > 1, cp > 1, replicate > 1)
    assert config.active_mesh_dims == config.dp_dim_names + config.non_dp_dim_names
    assert set(config.dp_cp_dim_names) >= set(config.dp_shard_cp_dim_names) >= {"dp_shard"}


def test_dimension_names():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=2)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2))


def test_tensor_parallel_ranks_are_neighbours():
    assert ParallelismConfig(tp_size=2, sp_size=4)._get_mesh() == (("sp", "tp"), (4, 2))


@pytest.mark.parametrize("size", [0, -1, "x", 1.5])
def test_bad_sizes(size):
    with pytest.raises(ValueError, match="tp_size is"):
        ParallelismConfig(tp_size=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_size": 2, "sp_size": 2}, "both split the sequence"),
        ({"dp_replicate_size": 2, "tp_size": 2}, "dp_replicate_size=2"),
        ({"dp_replicate_size": 2, "cp_size": 2}, "cp_size=2"),
        ({"cp_backend": "x"}, "cp_backend is 'x'"),
        ({"sp_backend": "x"}, "sp_backend is 'x'"),
        ({"tp_size": 2, "tp_handler": 5}, "tp_handler is a int"),
        ({"cp_size": 2, "cp_handler": TorchTensorParallelConfig()}, "must be a TorchContextParallelConfig"),
    ],
)
def test_what_does_not_combine(options, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**options)


def test_set_size():
    config = ParallelismConfig()
    config._set_size("tp", 4)
    assert config.tp_size == config._sizes["tp"] == config.total_size == 4
    with pytest.raises(AssertionError, match="ep"):
        config._set_size("ep", 2)


def test_to_json():
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    shown = json.loads(json.dumps(config.to_json()))
    assert shown["dp_shard_size"] == 2
    assert shown["cp_handler"] == {"cp_comm_strategy": "allgather"}
    assert shown["sp_handler"] is None
    restored = ParallelismConfig(**{k: v for k, v in shown.items() if not k.endswith("handler")})
    assert restored._sizes == config._sizes


def test_repr_has_the_sizes():
    assert "dp_shard_size=2" in repr(ParallelismConfig(dp_shard_size=2))


def test_nothing_to_build():
    assert ParallelismConfig().build_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None


def test_mesh_needs_a_device_type_once():
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


def test_matching_processes():
    for fsdp2 in (True, False):
        ParallelismConfig(dp_shard_size=2, tp_size=2)._validate_accelerator(accelerator(4, fsdp2))


def test_mismatch_shows_the_arithmetic():
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    with pytest.raises(ValueError) as caught:
        config._validate_accelerator(accelerator(8))
    assert "dp_replicate_size=1 x dp_shard_size=2 x tp_size=2 x cp_size=1 x sp_size=1 = 4, but 8" in str(caught.value)


def test_sequence_parallel_leaves_the_rest_to_deepspeed():
    config = ParallelismConfig(sp_size=2)
    config._validate_accelerator(accelerator(4))
    assert config._sizes["sp"] == config.total_size == 2
    with pytest.raises(ValueError, match="sp_size=2 = 2, but 3"):
        config._validate_accelerator(accelerator(3))


def test_unclaimed_processes_are_replicas():
    config = ParallelismConfig()
    config._validate_accelerator(accelerator(4))
    assert config.dp_replicate_size == config.total_size == 4


@pytest.mark.parametrize("options", [{}, {"tp_size": 4}, {"dp_replicate_size": 4}])
def test_fsdp_needs_something_to_shard_over(options):
    with pytest.raises(ValueError, match="nothing to shard over"):
        ParallelismConfig(**options)._validate_accelerator(accelerator(4, fsdp2=True))


def test_one_process_needs_nothing():
    ParallelismConfig()._validate_accelerator(accelerator(1, several=False))


def test_sizes_without_cooperation():
    lonely = types.SimpleNamespace(num_processes=2, is_fsdp2=False, multi_device=False, use_distributed=False)
    with pytest.raises(ValueError, match="accelerate launch"):
        ParallelismConfig(dp_shard_size=2)._validate_accelerator(lonely)


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


def test_a_plan_with_torchs_styles_is_told_in_words():
    from torch.distributed.tensor.parallel import ColwiseParallel

    handler = TorchTensorParallelConfig(plan={"up": ColwiseParallel(), "down": "rowwise"})
    told = ParallelismConfig(tp_size=2, tp_handler=handler).to_json()
    plan = json.loads(json.dumps(told))["tp_handler"]["plan"]
    assert plan["down"] == "rowwise" and "ColwiseParallel" in plan["up"]


def test_sequences_shared_through_torch_shard_parameters_as_well():
    config = ParallelismConfig(dp_shard_size=2, sp_size=2, sp_backend="torch")
    assert config.dp_shard_cp_dim_names == ["dp_shard", "sp"] and config.dp_cp_dim_names == ["dp_shard", "sp"]
    assert ParallelismConfig(dp_shard_size=2, sp_size=2).dp_shard_cp_dim_names == ["dp_shard"]
    with pytest.raises(ValueError, match="sp_backend is 'jax'; choose 'deepspeed' or 'torch'"):
        ParallelismConfig(sp_backend="jax")
