"""Comparisons of the commands that write checkpoints and configuration files again."""

import os
from pathlib import Path

import torch
import yaml

from accelerate.commands import merge, to_fsdp2
from interop.differential.core import probe
from interop.differential.probes.configs import HEAD
from interop.differential.probes.launching import listed


def shards(nested):
    import torch.distributed.checkpoint as dcp

    weights = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(4, dtype=torch.bfloat16)}
    place = "checkpoint/pytorch_model_fsdp_0" if nested else "checkpoint"
    dcp.save({"model": weights}, checkpoint_id=place, no_dist=True)
    return weights


@probe(
    "commands.merge:merge_command", options=["", "--unsafe_serialization", "--remove_checkpoint_dir"],
    nested=[True, False], output=["out", "out/deep", "checkpoint"],
)  # fmt: skip
def merged(options, nested, output):
    shards(nested)
    merge.merge_command(merge.merge_command_parser().parse_args(["checkpoint", output, *options.split()]))
    yield "files", sorted(name for name in os.listdir(output) if "safetensors" in name or name.endswith(".bin"))
    yield "source", os.path.isdir("checkpoint")
    from safetensors.torch import load_file

    safe = "unsafe" not in options
    path = f"{output}/model.safetensors" if safe else f"{output}/pytorch_model.bin"
    yield "weights", dict(sorted((load_file(path) if safe else torch.load(path, weights_only=True)).items()))


FSDP_KEYS = {
    "fsdp_sharding_strategy": [
        "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD", "1", 1, "full_shard",
        "what", None,
    ],
    "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "what"],
    "fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT", "what"],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"],
    "fsdp_min_num_params": [0, 100],
    **dict.fromkeys(
        listed(
            "fsdp_offload_params fsdp_forward_prefetch fsdp_use_orig_params fsdp_sync_module_states fsdp_cpu_ram_efficient_loading "
            "fsdp_activation_checkpointing"
        ),
        [True, False],
    ),
    "fsdp_transformer_layer_cls_to_wrap": ["Block", "A,B"],
    "fsdp_version": [1, 2, "1", "2", 3],
    "fsdp_what": [1],
}  # fmt: skip


@probe(
    "commands.to_fsdp2:convert_config_to_fsdp2", base=[{}, {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}], quick=12,
    given=[None, *((key, value) for key, values in FSDP_KEYS.items() for value in values)],
)  # fmt: skip
def converted(base, given):
    config = {
        "distributed_type": "FSDP", "mixed_precision": "no",
        "fsdp_config": {**base, **({given[0]: given[1]} if given else {})},
    }  # fmt: skip
    found = to_fsdp2.convert_config_to_fsdp2(config)
    return {**found, "fsdp_config": dict(sorted(found["fsdp_config"].items()))}


@probe(
    "commands.to_fsdp2:to_fsdp2_command", "commands.to_fsdp2:load_config",
    line=[
        "--config_file f.yaml", "--config_file f.yaml --output_file g.yaml", "--config_file f.yaml --overwrite",
        "--config_file f.yaml --output_file h.yaml", "--config_file f.yaml --output_file h.yaml --overwrite",
        "--config_file none.yaml --overwrite", "--config_file no.yaml --overwrite",
        "--config_file two.yaml --overwrite", "--config_file f.yaml --output_file d/g.yaml",
    ],
)  # fmt: skip
def rewritten(line):
    head = {**HEAD, "distributed_type": "FSDP"}
    section = {
        "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": False,
    }  # fmt: skip
    contents = {"f": {**head, "fsdp_config": section}, "h": {"old": 1}, "no": {**head, "distributed_type": "NO"}, "two": {**head, "fsdp_config": {**section, "fsdp_version": 2}}}  # fmt: skip
    for name, content in contents.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    args = to_fsdp2.to_fsdp2_command_parser().parse_args(line.split())
    try:
        to_fsdp2.to_fsdp2_command(args)
    finally:
        found = {
            name: yaml.safe_load(Path(name).read_text()) for name in sorted(os.listdir()) if name.endswith(".yaml")
        }
    yield from found.items()
