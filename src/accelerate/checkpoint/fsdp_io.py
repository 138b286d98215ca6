"""Saving models that are spread over ranks, and loading them into another number of ranks or another layout.

Names are those of the user and tensors are whole, so each strategy reads what any other wrote, on any number of ranks: see
`fsdp_state` for the strategies, and `fsdp_files` for the files.

Saving and loading have steps: a save takes the state (all ranks) and writes it; a load asks the model for its sharding (all
ranks), reads without changing anything (any rank, alone), and gives the model what was read (all ranks).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint import dcp, fsdp_optimizer, fsdp_state, readers
from accelerate.checkpoint.fsdp_files import is_extra, model_specs, required, write
from accelerate.checkpoint.fsdp_state import Layout, ModelState, together
from accelerate.checkpoint.readers import Reader
from accelerate.modules.named import match_names

Path = str | os.PathLike[str]


# -- reading -----------------------------------------------------------------------------------------------------------


@fsdp_state.quietly()
def read_model(
    own: ModelState, reader: Reader, ties: Sequence[Sequence[str]] = (), strict: bool = True
) -> dict[str, Any]:
    """Read a model's state into new memory, each rank its shards; nothing else changes. Any rank, alone.

    Args:
        own: the state of the model that will get it, whose sharding is taken.
        reader: of what is stored, in whatever layout.
        ties: names of the model that mean one parameter; one of them is enough.
        strict: raise when a name is missing or unexpected.

    Raises:
        RuntimeError: names or shapes differ; the message lists them.
        DamagedCheckpoint: a file is damaged.
    """
    stored = model_specs(reader)
    pairs = match_names(own.values, stored)
    parts = {wanted: stored[name] for name, wanted in pairs.items()}
    unexpected = sorted(set(stored) - set(pairs))
    for group in ties:
        known = next((parts[name] for name in group if name in parts), None)
        parts |= {name: known for name in group if known is not None and name in own.values and name not in parts}
    problems = [f"{name} is missing" for name in own.values if name not in parts] if strict else []
    problems += [f"{name} is unexpected" for name in unexpected] if strict else []
    wanted: dict[str, Any] = {}
    specs = reader.metadata.state_dict_metadata
    for name, keys in parts.items():
        value = own.values[name]
        if is_extra(name):  # it may be anything, and differ from what the module has now
            wanted |= {key: readers.memory_of(specs[key]) for key in keys.values() if key not in wanted}
            continue
        (key,) = keys.values()
        size = getattr(specs[key], "size", None)
        if isinstance(value, torch.Tensor) != (size is not None) or (size is not None and size != value.size()):
            here = tuple(value.size()) if isinstance(value, torch.Tensor) else type(value).__name__
            problems.append(f"{name} is {'no tensor' if size is None else tuple(size)} there and {here} in the model")
        elif key not in wanted:
            wanted[key] = None if size is None else fsdp_state.like(value, specs[key].properties.dtype)
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise RuntimeError(
            f"The weights in {reader.origin} do not fit the model; nothing was loaded.\n  "
            + "\n  ".join([*problems[:10], *more, "Build the model as it was when the checkpoint was saved."])
        )
    filled = reader.fill(wanted)
    return {
        name: dcp.nested({steps: filled[key] for steps, key in keys.items()}, reader.origin)
        for name, keys in parts.items()
    }


@fsdp_state.quietly()
def read_local(own: Mapping[str, Any], stored: Any, origin: str) -> dict[str, Any]:
    """Put what this rank wrote of a model into new memory with the model's sharding. Any rank, alone.

    Args:
        own: `ModelState.values` of the model.
        stored: what the rank's file holds.
        origin: for messages.

    Raises:
        RuntimeError: the model is sharded in another way.
    """
    if not isinstance(stored, Mapping) or stored.keys() != own.keys():
        differing = sorted(set(own) ^ set(stored if isinstance(stored, Mapping) else ()))
        raise RuntimeError(
            f"{origin} does not fit the model; nothing was loaded. These differ: {', '.join(differing[:10])}"
        )
    return {
        name: value if is_extra(name) else _part_like(own[name], value, f"{name} in {origin}")
        for name, value in stored.items()
    }


def _part_like(own: Any, stored: Any, where: str) -> Any:
    if not isinstance(own, torch.Tensor) or not isinstance(stored, torch.Tensor):
        return stored
    mine = fsdp_state.filled_like(own, stored)
    if mine is None:
        raise RuntimeError(
            f"{where} has the shape {tuple(fsdp_state.part(stored).shape)} on this rank, and the model has "
            f"{tuple(fsdp_state.part(own).shape)}: it is another model, or sharded in another way. Nothing was loaded."
        )
    return mine


# -- saving and loading ------------------------------------------------------------------------------------------------


def save_model(model: nn.Module, folder: Path, index: int = 0, layout: Layout = "sharded", **options: Any) -> None:
    """Write a model into a checkpoint's folder. All ranks.

    Args:
        model: of any kind.
        folder: the checkpoint's folder; it is made.
        index: which of the models it is.
        layout: how it is written. ``"local"`` writes FSDP1's flat parameters.
        **options: ``getter`` of `fsdp_state.model_state`, ``flat`` of `write`.
    """
    getters = {key: options.pop(key) for key in ("getter",) if key in options}
    flat = layout == "local" and options.setdefault("flat", fsdp_state.is_fsdp1(model))
    together(lambda: os.makedirs(folder, exist_ok=True))
    state = fsdp_state.model_state(model, layout="local" if flat else "sharded", **getters)
    write(state.values, folder, "model", index, layout, **options)


def load_model(
    model: nn.Module, folder: Path, index: int = 0, prefer: Layout | None = None, strict: bool = True, **options: Any
) -> Any:
    """Load a model from a checkpoint, whatever wrote it: read first, then applied if all ranks could read. All ranks.

    Args:
        model: of any kind; its optimizer need not be made again.
        folder: the checkpoint's folder.
        index: which of the models it is.
        prefer: the layout to take if the folder has several.
        strict: raise when a name is missing or unexpected.
        **options: ``getter`` of `fsdp_state.model_state` and ``setter`` of `fsdp_state.apply_model`.

    Returns:
        What the setter returns: missing and unexpected keys.

    Raises:
        RuntimeError: it does not fit, or another rank failed; the model is as it was.
        DamagedCheckpoint: a file is damaged; the model is as it was.
    """
    setters = {key: options.pop(key) for key in ("setter",) if key in options}
    found = required(folder, "model", index, prefer)
    stored = together(found.of_rank) if found.layout == "local" else None
    flat = stored is not None and any(str(name).endswith("_flat_param") for name in stored)
    layout: Layout = "local" if flat else "sharded"
    own = fsdp_state.model_state(model, layout=layout, **options)

    def read() -> dict[str, Any]:
        if stored is not None:
            return read_local(own.values, stored, f"{found.name} of rank {fsdp_state.rank_and_size()[0]}")
        return read_model(own, found.reader(), fsdp_state.tied_names(model), strict)

    return fsdp_state.apply_model(model, together(read), own, layout=layout, strict=strict, **setters)


def save_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    folder: Path,
    index: int = 0,
    layout: Layout = "sharded",
) -> None:
    """Write an optimizer's state, keyed by the names of parameters, into a checkpoint's folder. All ranks.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates.
        folder: the checkpoint's folder; it is made.
        index: which of the optimizers it is.
        layout: how it is written.
    """
    together(lambda: os.makedirs(folder, exist_ok=True))
    write(fsdp_state.optimizer_state(optimizer, model), folder, "optimizer", index, layout)


def load_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, folder: Path, index: int = 0, prefer: Layout | None = None
) -> None:
    """Load an optimizer's state, whatever wrote it: read first, then applied if all ranks could read. All ranks.

    Args:
        optimizer: wrapped or not.
        model: the model that it updates.
        folder: the checkpoint's folder.
        index: which of the optimizers it is.
        prefer: the layout to take if the folder has several.

    Raises:
        RuntimeError: it does not fit, or another rank failed; the optimizer is as it was.
        DamagedCheckpoint: a file is damaged; the optimizer is as it was.
    """
    found = required(folder, "optimizer", index, prefer)
    target = fsdp_optimizer.target(optimizer, model)
    state = together(lambda: fsdp_optimizer.read(target, found))
    fsdp_state.apply_optimizer(optimizer, model, state)
