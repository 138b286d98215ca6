"""Models and optimizers saved and loaded by the public functions, in the layout that a test names."""

import os

import torch

from accelerate.checkpoint import layouts, state
from accelerate.checkpoint.manifest import PARAMETER_NAMES
from accelerate.checkpoint.state import names_file
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils


def _plugin(layout):
    kind = {
        "full": "FULL_STATE_DICT",
        "sharded": "SHARDED_STATE_DICT",
        "local": "LOCAL_STATE_DICT",
        None: "SHARDED_STATE_DICT",
    }
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind[layout])
    return plugin, layout != "local"


def save_model(model, folder, index=0, layout="sharded"):
    plugin, use_dcp = _plugin(layout)
    fsdp_utils.save_fsdp_model(plugin, None, model, os.fspath(folder), index, use_dcp=use_dcp)


def load_model(model, folder, index=0, prefer=None, strict=True):
    if not strict:
        read, own, layout, _ = layouts.read_for_model(model, folder, index, prefer, strict)
        return state.apply_model(model, read, own, layout=layout, strict=strict)
    plugin, use_dcp = _plugin(prefer)
    return fsdp_utils.load_fsdp_model(plugin, None, model, os.fspath(folder), index, use_dcp=use_dcp)


def save_optimizer(optimizer, model, folder, index=0, layout="sharded"):
    plugin, use_dcp = _plugin(layout)
    fsdp_utils.save_fsdp_optimizer(plugin, None, optimizer, model, os.fspath(folder), index, use_dcp=use_dcp)


def load_optimizer(optimizer, model, folder, index=0):
    plugin, use_dcp = _plugin(None)
    fsdp_utils.load_fsdp_optimizer(plugin, None, optimizer, model, os.fspath(folder), index, use_dcp=use_dcp)


def write_names(optimizer, model, folder):
    with open(os.path.join(folder, PARAMETER_NAMES), "wb") as file:
        file.write(names_file([optimizer], [model]))


def same(mine, theirs):
    """Say whether two nested structures are equal in every bit."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return mine == theirs
