"""Models and optimizers saved and loaded in the layout that a test names, by the public functions where they are installed."""

import os

import torch

from accelerate.checkpoint import dcp, formats, layouts, model_io, optimizers, state
from accelerate.checkpoint.manifest import PARAMETER_NAMES
from accelerate.checkpoint.model_io import names_file
from accelerate.checkpoint.verify import with_manifest
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.utils import fsdp_utils


def _plugin(layout):
    return FullyShardedDataParallelPlugin(state_dict_type=f"{(layout or 'sharded').upper()}_STATE_DICT")


def _write(values, folder, kind, index, layout):
    shards, file = layouts.usual_names(kind, index)
    if layout == "sharded":
        dcp.save({kind: values}, os.path.join(folder, shards))
        return
    values = state.gathered(values)
    if state.rank_and_size()[0] == 0:
        os.makedirs(folder, exist_ok=True)
        formats.write_torch(os.path.join(folder, file), values)


def save_model(model, folder, index=0, layout="sharded"):
    if hasattr(fsdp_utils, "save_fsdp_model"):
        return fsdp_utils.save_fsdp_model(_plugin(layout), None, model, os.fspath(folder), index)
    return _write(model_io.io_of(model).model_state(model).values, folder, "model", index, layout)


def load_model(model, folder, index=0, prefer=None, strict=True):
    if strict and hasattr(fsdp_utils, "load_fsdp_model"):
        return fsdp_utils.load_fsdp_model(_plugin(prefer), None, model, os.fspath(folder), index)
    read, own = layouts.read_for_model(model, with_manifest(os.fspath(folder)), index, prefer, strict)
    return model_io.io_of(model).apply_model(model, read, own, strict=strict)


def save_optimizer(optimizer, model, folder, index=0, layout="sharded"):
    if hasattr(fsdp_utils, "save_fsdp_optimizer"):
        return fsdp_utils.save_fsdp_optimizer(_plugin(layout), None, optimizer, model, os.fspath(folder), index)
    values = model_io.io_of(model).optimizer_state(optimizer, model)
    return _write(values, folder, "optimizer", index, layout)


def load_optimizer(optimizer, model, folder, index=0):
    if hasattr(fsdp_utils, "load_fsdp_optimizer"):
        return fsdp_utils.load_fsdp_optimizer(_plugin(None), None, optimizer, model, os.fspath(folder), index)
    return optimizer.load_state_dict(
        optimizers.read_for_optimizer(optimizer, model, with_manifest(os.fspath(folder)), index, "sharded")
    )


def write_names(optimizer, model, folder):
    with open(os.path.join(folder, PARAMETER_NAMES), "wb") as file:
        file.write(names_file([optimizer], [model]))


def same(mine, theirs):
    """Return whether two nested structures are equal in every bit."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return mine == theirs
