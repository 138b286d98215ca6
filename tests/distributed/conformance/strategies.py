"""The strategies of the suite: on how many processes each runs, what an Accelerator is told, and what does not apply to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchContextParallelConfig
from accelerate.utils.versions import is_torch_version
from distributed.conformance.model import MAX_NORM
from distributed.scripts.harness import CPU


@dataclass(frozen=True)
class Strategy:
    """One way for processes to share the training."""

    name: str
    processes: tuple[int, ...]  # the numbers of processes that it runs on
    options: Callable[[], dict[str, Any]] = dict  # the arguments of an Accelerator, again for each
    same_batch: int = 1  # how many ranks work on one batch (tensor, context and sequence parallelism)
    part: float | None = None  # of all parameters on one rank; None if they are divided evenly among all
    splits_sequence: bool = False  # ranks take parts of the sequences, in `maybe_context_parallel`
    groups: bool = True  # the optimizer may have several groups of parameters within a layer
    tolerance: float = 1e-5  # largest difference from one process in float32
    without: Mapping[str, str] = field(default_factory=dict)  # checks that do not apply, and why
    environment: Mapping[str, str] = field(default_factory=dict)  # what turns it on
    slow: tuple[int, ...] = ()  # the numbers of processes on which it is left to the slow tests
    arrives: Callable[[nn.Module], Any] | None = None  # shards the model manually, in place, before it is prepared
    needs: str = ""  # a library that changes what other tests see: its tests have a separate environment


def _fsdp(version: int, **more: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **more,
    )


def _fsdp1(kind: str, processes: tuple[int, ...] = (2,), slow: tuple[int, ...] = (2,), **more: Any) -> Strategy:
    name = f"fsdp1-{kind.lower()}"
    options: dict[str, Any] = {"sharding_strategy": kind, **more}
    part = 1.0 if kind == "NO_SHARD" else None
    return Strategy(name, processes, lambda: {"fsdp_plugin": _fsdp(1, **options)}, part=part, groups=False, slow=slow)


def _mesh(**sizes: Any) -> ParallelismConfig:
    """Sizes go by the names of their dimensions, other settings by their own."""
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    return ParallelismConfig(**{f"{name}_size" if name in axes else name: value for name, value in sizes.items()})


# Of the parameters of `model.Model` what a rank has when two of them share the linear layers of the blocks, and nothing else.
_SPLIT_LAYERS = 0.59


def _overlay(name: str, shard: bool, processes: int, slow: bool = False, **sizes: Any) -> Strategy:
    """Tensor, context or sequence parallelism, alone or over FSDP2."""
    axis = next(axis for axis in ("tp", "cp", "sp") if axis in sizes)

    def options() -> dict[str, Any]:
        plugin = {"fsdp_plugin": _fsdp(2)} if shard else {}
        return {"parallelism_config": _mesh(**sizes), **plugin}

    return Strategy(
        name,
        (processes,),
        options,
        same_batch=sizes[axis],
        part=_SPLIT_LAYERS / (2 if shard else 1) if axis == "tp" else None if shard else 1.0,
        splits_sequence=axis != "tp",
        slow=(processes,) if slow else (),
    )


def _zero(stage: int, processes: tuple[int, ...] = (2,), offload: str = "none") -> Strategy:
    def options() -> dict[str, Any]:
        settings = {"zero_stage": stage, "gradient_clipping": MAX_NORM, "zero3_save_16bit_model": True}
        return {"deepspeed_plugin": DeepSpeedPlugin(offload_optimizer_device=offload, **settings)}

    without = dict.fromkeys(
        ("computes_in_bf16", "reports"), "buffers stay in float32 next to weights in bf16; check_deepspeed.py"
    )
    if stage == 3:
        without["has_its_part"] = "between two forwards the parameters are empty"
    name = f"zero{stage}{'-offload' * (offload != 'none')}"
    return Strategy(name, processes, options, part=1.0, without=without, needs="deepspeed")


def _arrives(names: tuple[str, ...], slow: bool = False, **how: Any) -> Strategy:
    """Return a model sharded by torch alone over a mesh of two ranks a dimension, from which the Accelerator takes its layout."""

    def shard(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu" if CPU else "cuda", (2,) * len(names), mesh_dim_names=names)
        if "tp" in names:
            styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
            parallelize_module(model, mesh["tp"], {name: styles[word]() for name, word in model._tp_plan.items()})
        if data := tuple(name for name in names if name != "tp"):
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh[data])

    count = 2 ** len(names)
    return Strategy(f"arrived-{'-'.join(names)}", (count,), arrives=shard, slow=(count,) if slow else (), **how)


_ALL = (
    Strategy("single", (1,), slow=(1,)),
    Strategy("ddp", (2, 4), part=1.0, slow=(4,)),
    _fsdp1("FULL_SHARD", (1, 2), slow=(1,)),
    _fsdp1("SHARD_GRAD_OP"),
    _fsdp1("NO_SHARD"),
    _fsdp1("HYBRID_SHARD"),
    _fsdp1("HYBRID_SHARD_ZERO2"),
    Strategy(
        "fsdp1-orig_params",
        (2,),
        lambda: {"fsdp_plugin": _fsdp(1, use_orig_params=True, state_dict_type="SHARDED_STATE_DICT")},
        slow=(2,),
    ),
    Strategy(
        "hsdp-fsdp1",
        (4,),
        lambda: {
            "fsdp_plugin": _fsdp(1, sharding_strategy="HYBRID_SHARD"),
            "parallelism_config": _mesh(dp_replicate=2, dp_shard=2),
        },
        part=1 / 2,
        groups=False,
        slow=(4,),
    ),
    Strategy("fsdp2", (1, 2, 4), lambda: {"fsdp_plugin": _fsdp(2)}, slow=(1, 4)),
    Strategy("fsdp2-no_reshard", (2,), lambda: {"fsdp_plugin": _fsdp(2, reshard_after_forward=False)}, slow=(2,)),
    # Two of four ranks have all of a layer between them, from its forward to its backward.
    Strategy("fsdp2-reshard_2", (4,), lambda: {"fsdp_plugin": _fsdp(2, reshard_after_forward=2)}, slow=(4,)),
    Strategy("fsdp2-offload", (2,), lambda: {"fsdp_plugin": _fsdp(2, cpu_offload=True)}, slow=(2,)),
    Strategy(
        "hsdp",
        (4,),
        lambda: {"fsdp_plugin": _fsdp(2), "parallelism_config": _mesh(dp_replicate=2, dp_shard=2)},
        part=1 / 2,
        slow=(4,),
    ),
    _overlay("tp", False, 2, tp=2),
    _overlay("fsdp2-tp", True, 4, slow=True, dp_shard=2, tp=2),
    _overlay("fsdp2-cp", True, 2, slow=True, cp=2),
    _overlay("fsdp2-cp-alltoall", True, 2, slow=True, cp=2, cp_handler=TorchContextParallelConfig("alltoall")),
    _overlay("fsdp2-dp-cp", True, 4, slow=True, dp_shard=2, cp=2),
    _overlay("sp", False, 2, sp=2, sp_backend="torch"),
    _overlay("fsdp2-sp", True, 2, slow=True, sp=2, sp_backend="torch"),
    _overlay("fsdp2-dp-sp", True, 4, slow=True, dp_shard=2, sp=2, sp_backend="torch"),
    _arrives(("fsdp",)),
    _arrives(("tp",), slow=True, same_batch=2, part=_SPLIT_LAYERS),
    _arrives(("replicate", "shard"), slow=True, part=1 / 2),
    _arrives(("dp", "tp"), slow=True, same_batch=2, part=_SPLIT_LAYERS / 2),
    # Not of this package: see `averaging`, which the tests install next to it.
    Strategy("third-party", (2,), part=1.0, environment={"USE_AVERAGING": "true"}),
    _zero(0),
    _zero(1),
    _zero(2, (1, 2, 4)),
    _zero(2, offload="cpu"),
    _zero(3, (1, 2, 4)),
)
# Over gloo `fully_shard` needs torch 2.10.
_OLD = is_torch_version("<", "2.10")
_SHARDED = ("fsdp2", "arrived-fsdp", "arrived-replicate", "arrived-dp")
STRATEGIES: dict[str, Strategy] = {one.name: one for one in _ALL if not (_OLD and one.name.startswith(_SHARDED))}
