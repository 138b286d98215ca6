"""States and checkpoints of sharded models, and how models are sharded."""

import pathlib
import re

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from interop.differential.core import probe
from interop.differential.probes.modeling import Net
from interop.differential.probes.offload import state

KINDS = ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]


def files(folder):
    """Return the names in a folder; of a format's own files the kind alone."""
    names = sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*") if p.is_file())
    return sorted({re.sub(r"__\d+_\d+", "__", name) for name in names if not name.startswith(".")})


@probe(
    "utils.fsdp_utils:save_fsdp_model", "utils.fsdp_utils:load_fsdp_model", "utils.fsdp_utils:save_fsdp_optimizer",
    "utils.fsdp_utils:load_fsdp_optimizer", kind=KINDS, version=[1, 2], index=[0, 3], adapter_only=[False, True],
    use_dcp=[True, False], what=["model", "optimizer"],
)  # fmt: skip
def unsharded_checkpoints(kind, version, index, adapter_only, use_dcp, what):
    """What is saved of a model that is not sharded, since 1.15.0 shards none on one process without a GPU."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if what == "model":
        fsdp_utils.save_fsdp_model(
            plugin, accelerator, model, "folder", index, adapter_only=adapter_only, use_dcp=use_dcp
        )
        found, other = files("folder"), nn.Linear(2, 2)
        fsdp_utils.load_fsdp_model(
            plugin, accelerator, other, "folder", index, adapter_only=adapter_only, use_dcp=use_dcp
        )
        return found, torch.equal(model.weight, other.weight)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, "folder", index, use_dcp=use_dcp)
    found, other = files("folder"), torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, other, model, "folder", index, use_dcp=use_dcp)
    return found, other.state_dict()


STATES = {
    "model": lambda: {"model": {"w": torch.ones(2), "b.c": torch.zeros(1, dtype=torch.float16)}},
    "bare": lambda: {"w": torch.ones(2)}, "empty": dict, "one": lambda: {"model": {"w": torch.ones(3)}},
    "optimizer": lambda: {"optimizer": {"state": {"w": torch.ones(2)}}},
    "numbers": lambda: {"model": {"w": torch.ones(2), "n": 5}},
}  # fmt: skip


@probe(
    "utils.fsdp_utils:merge_fsdp_weights", folder=["nothing", "empty", "file", "around", "wrapped", ""],
    output=["out", "file"], safe=[True, False],
)  # fmt: skip
def merge_nothing(folder, output, safe):
    pathlib.Path("empty").mkdir()
    pathlib.Path("file").write_text("text")
    dcp.save(STATES["model"](), checkpoint_id="around/pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"model": {"model": {"w": torch.ones(2)}}}, checkpoint_id="wrapped", no_dist=True)
    fsdp_utils.merge_fsdp_weights(folder, output, safe)
    return sorted(str(p) for p in pathlib.Path(output).rglob("*"))


@probe(
    "utils.fsdp_utils:fsdp2_prepare_model", "utils.fsdp_utils:fsdp2_apply_ac",
    "utils.fsdp_utils:fsdp2_load_full_state_dict", processes=2,
    function=["fsdp2_apply_ac", "fsdp2_prepare_model", "fsdp2_load_full_state_dict"], wrap=["Block", "nothing"],
    checkpointing=[False, True],
)  # fmt: skip
def fsdp2(function, wrap, checkpointing):
    """Each function on the model that the one before it makes, with 1.15.0's plugin, which prepare() ignores on CPUs."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[wrap],
        activation_checkpointing=checkpointing, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    full = {name: t + 1 for name, t in model.state_dict().items()}
    if function == "fsdp2_load_full_state_dict":
        fully_shard(model)
        fsdp_utils.fsdp2_load_full_state_dict(accelerator, model, full if accelerator.is_main_process else {})
    else:
        model = getattr(fsdp_utils, function)(accelerator, model)
    return [name for name, _ in model.named_modules()], state(model), [type(m).__name__ for m in model.modules()]
