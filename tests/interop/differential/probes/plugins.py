"""Every dataclass of `accelerate.utils.dataclasses`: each field at many values, what is resolved from them, and the methods."""

import copy
import datetime
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.fsdp as fsdp

from accelerate.utils import dataclasses
from interop.differential.core import Words, describe, probe, words

EDGES = [
    None, True, False, 0, 1, 2, -1, 2.5, 10**12, "", "1", "2", "0.5", "true", "FALSE", "auto", "nonsense", [], ["a"],
    {"a": 1},
]  # fmt: skip
NUMBERS = [None, 0, 1, 2, -1, 2.5, "2", "", "nonsense"]
SWITCHES = [None, True, False, 0, 1, "true", "False", "", "nonsense"]
STRATEGIES = [
    "FULL_SHARD", "full_shard", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2",
    "_HYBRID_SHARD_ZERO2",
]  # fmt: skip
ADDED = {
    *("shard_iterable_dataset", "continue_after_load", "exact", "async_save", "save_on_signal", "plan", "ep_size"),
    "pp_size",
    *("memory_snapshot", "module_precision"),
    "already_sharded",
}


def named(value):
    return value


# The arguments that a class needs; and the values of each field.
NEEDED = {
    "BnbQuantizationConfig": {"load_in_8bit": True},
    "TensorInformation": {"shape": torch.Size([2]), "dtype": torch.float32},
    "MegatronLMPlugin": {"context_parallel_size": 1},
}
TABLE = {
    "AORecipeKwargs": {
        "config": [None, {}, "nonsense", {"pad_inner_dim": True}], "module_filter_func": [None, named, "nonsense"],
        "pad_inner_dim": SWITCHES, "enable_fsdp_float8_all_gather": SWITCHES,
    }, "MSAMPRecipeKwargs": {"opt_level": words("O1 O2 O3 o1 nonsense", None, "", 1)},
    "AutocastKwargs": dict.fromkeys(["enabled", "cache_enabled"], EDGES),
    "BnbQuantizationConfig": {
        "load_in_8bit": SWITCHES, "load_in_4bit": SWITCHES, "llm_int8_threshold": [*NUMBERS, 6, float("nan")],
        "bnb_4bit_quant_type": words("fp4 nf4 NF4 af4 nonsense", None, "", 4), "bnb_4bit_use_double_quant": SWITCHES,
        "bnb_4bit_compute_dtype": words("fp16 bf16 fp32 float16 FP16", None, "", torch.bfloat16, torch.int8, 4),
        "torch_dtype": words("fp16 bf16 fp32 float32 nonsense", None, "", torch.float64, torch.bfloat16, 1),
        "skip_modules": [None, [], ["head"], "head", ("head",), 1, {"head": 1}],
        "keep_in_fp32_modules": [None, [], ["head"], "head", ("head",), 1, [1]],
    },
    "DataLoaderConfiguration": {
        **dict.fromkeys(
            ["split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"], EDGES,
        ), "data_seed": NUMBERS, "use_stateful_dataloader": SWITCHES,
    },
    "DeepSpeedSequenceParallelConfig": {
        "sp_seq_length": [*NUMBERS, 4096, "4096"], "sp_seq_length_is_variable": SWITCHES,
        "sp_attn_implementation": words(
            "eager sdpa SDPA flash_attention_2 flash_attention_3 flash_attention flex", None, "", 1,
        ),
    },
    "DistributedDataParallelKwargs": {
        **dict.fromkeys(
            ["dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "static_graph"], EDGES,
        ), **dict.fromkeys(["check_reduction", "gradient_as_bucket_view"], SWITCHES),
        **dict.fromkeys(
            ["comm_hook", "comm_wrapper"],
            words("no fp16 FP16 bf16 power_sgd batched_power_sgd nonsense", "", None, 1),
        ), "comm_state_option": [None, {}, {"matrix_approximation_rank": 2}, {"a": 1}, "nonsense", 1],
    },
    "GradScalerKwargs": dict.fromkeys(
        ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"], EDGES,
    ),
    "GradientAccumulationPlugin": {
        "num_steps": EDGES, **dict.fromkeys(["adjust_scheduler", "sync_with_dataloader", "sync_each_batch"], SWITCHES),
    },
    "InitProcessGroupKwargs": {
        "backend": words("nccl gloo GLOO mpi nonsense", "", None, 1),
        "init_method": words("env:// tcp://localhost:1 nonsense", None, "", 1),
        "timeout": [None, datetime.timedelta(seconds=5), datetime.timedelta(0), 5, 5.5, "5", -1, ""],
    },
    "ProfileKwargs": {
        "activities": [None, [], ["cpu"], ["CPU"], ["cuda"], ["cpu", "cuda"], ["nonsense"], "cpu", 1],
        "schedule_option": [
            None, {}, {"wait": 1, "warmup": 1, "active": 1}, {"a": 1}, {"wait": 1, "active": 0, "warmup": 0}, 1,
        ], "on_trace_ready": [None, named, 1],
        **dict.fromkeys(["record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"], SWITCHES),
        "output_trace_dir": Words([None, "", "traces", 1, Path("traces")]),
    },
    "ProjectConfiguration": {
        **dict.fromkeys(["project_dir", "logging_dir"], words("a a/b ~ ä", None, "", 1, Path("p"))),
        **dict.fromkeys(["automatic_checkpoint_naming", "save_on_each_node"], SWITCHES), "total_limit": NUMBERS,
        "iteration": NUMBERS,
    }, "TorchContextParallelConfig": {"cp_comm_strategy": words("allgather alltoall ALLGATHER ring", None, "", 1)},
    "TorchDynamoPlugin": {
        "backend": Words(
            [None, "no", "NO", "inductor", "INDUCTOR", "Eager", "aot_eager", "torchxla_trace_once"] + [
                "", "nonsense", 1,
            ],
        ), "mode": words("default reduce-overhead max-autotune max-autotune-no-cudagraphs DEFAULT x", None, "", 1),
        "fullgraph": SWITCHES, "dynamic": SWITCHES, "options": [None, {}, {"trace.enabled": True}, "a", 1],
        "disable": SWITCHES, "use_regional_compilation": SWITCHES,
    }, "TorchTensorParallelConfig": {"enable_async_tp": EDGES},
    "TorchTensorParallelPlugin": {"tp_size": NUMBERS, "torch_device_mesh": [None, 1, "nonsense"]},
    "TensorInformation": {"shape": [torch.Size([2, 3]), (1,), [], None], "dtype": [torch.int8, None, "float32"]},
    "KwargsHandler": {"nothing": [1]},
}  # fmt: skip
"""FSDP and the engines are in separate tables."""
FSDP = {
    "fsdp_version": [None, 1, 2, 3, 0, -1, "1", "2", "", "nonsense", 2.0],
    "sharding_strategy": words("1 3 9 nonsense", None, *STRATEGIES, fsdp.ShardingStrategy.SHARD_GRAD_OP, fsdp.ShardingStrategy.NO_SHARD, 1, 2, 3, 4, 5, 9, ""),
    "reshard_after_forward": words("true TRUE False 0 1 2 nonsense", None, True, False, 0, 1, 2, -1, "", *STRATEGIES, fsdp.ShardingStrategy.SHARD_GRAD_OP, fsdp.ShardingStrategy.NO_SHARD),
    "backward_prefetch": Words(
        [None, "BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "backward_pre", "", "nonsense", 1, 2, "1", "2", "3"]
        + [fsdp.BackwardPrefetch.BACKWARD_POST]
    ),
    "mixed_precision_policy": [
        None, "nonsense", {}, {"param_dtype": torch.float16},
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "buffer_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}, {"nonsense": 1},
        {"param_dtype": "bf16"}, "bf16", "fp16", "no", "BF16", "fp32",
        fsdp.MixedPrecision(param_dtype=torch.float16), fsdp.MixedPrecisionPolicy(param_dtype=torch.float16),
    ],
    "auto_wrap_policy": Words(
        [
            None, "TRANSFORMER_BASED_WRAP", "transformer_based_wrap", "SIZE_BASED_WRAP", "size_based_wrap",
            "NO_WRAP", "no_wrap", named,
        ]
        + ["", "nonsense", 1]
    ),
    "cpu_offload": [
        *SWITCHES, fsdp.CPUOffload(offload_params=True), fsdp.CPUOffload(offload_params=False),
        fsdp.CPUOffloadPolicy(), fsdp.OffloadPolicy(),
    ],
    "ignored_modules": [None, [], "head", ["head"], "layers.*", 1],
    "state_dict_type": Words(
        [
            None, "FULL_STATE_DICT", "full_state_dict", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT",
            "sharded_state_dict", 1, 2, 3, "1",
        ]
        + ["2", "4", "", "nonsense", fsdp.StateDictType.SHARDED_STATE_DICT]
    ),
    "state_dict_config": [None, fsdp.FullStateDictConfig(), fsdp.ShardedStateDictConfig(), "nonsense"],
    "optim_state_dict_config": [None, fsdp.FullOptimStateDictConfig(), fsdp.ShardedOptimStateDictConfig(), "nonsense"],
    "limit_all_gathers": SWITCHES,
    "use_orig_params": SWITCHES,
    "param_init_fn": [None, named, "nonsense"],
    "sync_module_states": SWITCHES,
    "forward_prefetch": SWITCHES,
    "activation_checkpointing": SWITCHES,
    "activation_checkpointing_offload": SWITCHES,
    "cpu_ram_efficient_loading": SWITCHES,
    "transformer_cls_names_to_wrap": [None, "", "A", "A,B", "A, B", ["A"], ["A", "B"], ("A",), [], {"A"}, 1],
    "min_num_params": [*NUMBERS, 10**8, "100000000"],
}  # fmt: skip


def plain(value):
    if isinstance(value, functools.partial):
        return {"partial": value.func, "args": plain(list(value.args)), "keywords": plain(value.keywords)}
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if type(value).__module__ == "accelerate.utils.dataclasses" and hasattr(value, "__dataclass_fields__"):
        return {type(value).__name__: fields_of(value)}
    return plain(value.config) if type(value).__name__ == "HfDeepSpeedConfig" else value


def fields_of(item):
    return {name: plain(value) for name, value in sorted(vars(item).items()) if name[0] != "_" and name not in ADDED}


def looks(item):
    found = fields_of(item)
    for method in ("to_dict", "to_kwargs"):
        if hasattr(item, method):
            found[method] = {k: plain(value) for k, value in sorted(getattr(item, method)().items()) if k not in ADDED}
    return found


@probe(
    *(f"utils.dataclasses:{kind}" for kind in TABLE), quick=99,
    kind=[*TABLE, "MegatronLMPlugin", "FullyShardedDataParallelPlugin", "DeepSpeedPlugin"],
)  # fmt: skip
def copies(kind):
    """The text of one, and whether a copy and another one with the same arguments are equal to it."""
    made, needed = getattr(dataclasses, kind), NEEDED.get(kind, {})
    item = made(**needed)
    seen = describe(fields_of(item))
    yield "text", [repr(item).partition("(")[0], str(item) == repr(item)]
    yield "equal", [item == item, item == made(**needed), item == 1]
    yield "copied", [describe(fields_of(do(item))) == seen for do in (copy.copy, copy.deepcopy)]


def register(kind, field, values, needed):
    def run(value):
        arguments = {**copy.deepcopy(needed), field: value}
        return looks(getattr(dataclasses, kind)(**arguments))

    run.__name__ = f"{kind}_{field}" + ("_" + "_".join(map(str, needed.values())) if needed else "")
    probe(f"utils.dataclasses:{kind}", value=values)(run)


for kind_, fields_ in TABLE.items():
    for field_, values_ in fields_.items():
        register(kind_, field_, values_, NEEDED.get(kind_, {}))
for field_, values_ in FSDP.items():
    for version_ in (1, 2):
        register(
            "FullyShardedDataParallelPlugin", field_, values_,
            {} if field_ == "fsdp_version" else {"fsdp_version": version_},
        )  # fmt: skip
        if field_ == "fsdp_version":
            break
