"""The training state that a returning replica group takes over from a peer: captured, checked, sent and loaded."""

import io
import urllib.request
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._serialization import _streaming_load

from accelerate.precision import scaling
from accelerate.runtime.torch_private import local_part, pytree

# Marks the local part of a DTensor in the state of an optimizer.
_SHARD = "replica_shard"


class PlainTransport(HTTPTransport[Any]):  # type: ignore[misc]  # torchft is not installed everywhere
    """torchft's transport of states over HTTP, which loads tensors and plain data only, and so runs no code of the sender."""

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        with warnings.catch_warnings(), urllib.request.urlopen(address, timeout=timeout.total_seconds()) as response:
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            state = _streaming_load(response, weights_only=True)
        return pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, state)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def weights(run: Any) -> list[torch.Tensor]:
    """Return the local parts of all parameters and buffers that are not empty. Not a collective."""
    parts = (local_part(tensor.detach()) for model in run._models for tensor in _tensors(model).values())
    return [part for part in parts if part.numel()]


def capture(run: Any) -> dict[str, Any]:
    """Return the state of all prepared and registered objects, as local parts of tensors and plain data.

    Parameters and optimizer states are not copied: they stay until the next step, which waits for the peer. Buffers are copied, since a
    forward pass may change them.
    """
    if run.scaler is not None:
        scaling.flush_update(run.scaler)
    models = []
    for model in run._models:
        buffers = {name for name, _ in model.named_buffers()}
        parts = {name: local_part(tensor.detach()) for name, tensor in _tensors(model).items()}
        models.append({name: part.clone() if name in buffers else part for name, part in parts.items()})
    return {
        "models": models,
        "optimizers": [pytree.tree_map(_marked, item.optimizer.state_dict()) for item in run._optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in run._schedulers],
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "objects": [item.state_dict() for item in run._custom_objects],
    }


def _marked(value: Any) -> Any:
    return {_SHARD: value.to_local()} if isinstance(value, DTensor) else value


def check(state: dict[str, Any]) -> None:
    """Refuse a state that no peer could load; it would fail only once a group returns."""
    for kind, values in state.items():
        skeleton = pytree.tree_map(lambda value: torch.empty(0) if type(value) is torch.Tensor else value, values)
        buffer = io.BytesIO()
        try:
            torch.save(skeleton, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"The state of {kind} holds more than tensors and plain data, so no replica group could take it over: {error}. Let "
                "`state_dict` return tensors, numbers, texts, lists and dicts."
            ) from error


@torch.no_grad()
def restore(run: Any, state: dict[str, Any]) -> None:
    """Load a peer's state into the prepared and registered objects, in place; ValueError if they differ."""
    for kind, objects in (("models", run._models), ("optimizers", run._optimizers), ("schedulers", run._schedulers)):
        if len(state[kind]) != len(objects):
            raise ValueError(
                f"A replica group prepared {len(state[kind])} {kind}, and this one {len(objects)}. Run the same script in all groups."
            )
    for model, values in zip(run._models, state["models"], strict=True):
        parts = {name: local_part(tensor.detach()) for name, tensor in _tensors(model).items()}
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        if shapes != {name: tuple(value.shape) for name, value in values.items()}:
            differing = sorted(
                name
                for name in {*shapes, *values}
                if shapes.get(name) != tuple(getattr(values.get(name), "shape", ()))
            )
            raise ValueError(
                f"The model of this replica group differs from that of a peer in {differing[:3]}. Start all groups with the same model and "
                "the same number of ranks."
            )
        for name, part in parts.items():
            part.copy_(values[name])
    for optimizer, values in zip(run._optimizers, state["optimizers"], strict=True):
        _restore_optimizer(optimizer.optimizer, values)
    for scheduler, values in zip(run._schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(values)
    if run.scaler is not None and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    for item, values in zip(run._custom_objects, state["objects"], strict=True):
        item.load_state_dict(values)


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, parameters, strict=True))
    rebuilt = {
        number: {name: _rebuilt(value, owners[number]) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": rebuilt})


def _rebuilt(value: Any, parameter: Any) -> Any:
    if not (isinstance(value, dict) and _SHARD in value):
        return value
    part, layout = value[_SHARD].to(parameter.device), (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(part, *layout, run_check=False, shape=parameter.shape, stride=parameter.stride())
