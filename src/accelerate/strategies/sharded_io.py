"""Checkpoints of strategies with shards: each rank writes and reads its own shards, by the names of parameters."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.checkpoint import layouts, model_io, optimizers, state
from accelerate.checkpoint.load import Deferred, loads_by_name, uses_torch_load
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Layout, Wanted
from accelerate.runtime.run import Run
from accelerate.strategies.fsdp import public_module
from accelerate.strategies.state_io import StateIO


@dataclass(eq=False)
class ShardedModel:
    """A model whose state is that of its shards, as a restore takes it.

    Attributes:
        loads_by_name: names and shapes of the state have been compared with all of the model, which cannot refuse it.
        finish: reads the state over the model's.
    """

    model: nn.Module
    own: model_io.ModelState
    adapter_only: bool = False
    loads_by_name: bool = False
    finish: Callable[[], None] | None = None

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return this rank's parts of the parameters."""
        return self.model.parameters()

    def buffers(self) -> Iterable[torch.Tensor]:
        """Return the buffers."""
        return self.model.buffers()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, adapter_only: bool = False) -> Any:
        """Load shards, by the names of the user's model. Collective: call on every rank."""
        if self.finish is not None:
            return self.finish()
        options: dict[str, Any] = {}
        if self.adapter_only:
            options["setter"] = functools.partial(public_module()._set_model_state_dict, adapter_only=True)
        return io_of(self.model).apply_model(self.model, state, self.own, strict=strict, **options)


class ShardedIO(StateIO):
    """The states of FSDP: shards as they are, which are not gathered for a checkpoint."""

    saves_shards = True
    save_options: ClassVar[tuple[str, ...]] = ("use_dcp", "adapter_only")

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps the shards."""
        return layouts.layout_of(accelerator.state.fsdp_plugin, use_dcp)

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Gather a tensor at a time, on each rank. Collective: call on every rank."""
        again = model_io.tied_again(model)
        for name, value in io_of(model).model_state(model).values.items():
            if is_selected(name) and name not in again:
                yield name, state.full(value)

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict in host memory on rank 0, and an empty one elsewhere.

        Collective: call on every rank.
        """
        return model_io.collected(self.whole_tensors(accelerator, model), model)

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Write the shards of a model. Collective: call on every rank."""
        outer = accelerator._models[index]
        values = io_of(outer).model_state(outer, _getter(options.get("adapter_only", False))).values
        layouts.write(values, plan, "model", index, self.layout(accelerator, options.get("use_dcp", True)))

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: str, index: int, **options: Any
    ) -> tuple[ShardedModel, dict[str, Any]]:
        """Read this rank's shards of a model, whichever ranks wrote it, and return what takes them, and them.

        Collective: call on every rank.
        """
        adapter_only = options.get("adapter_only", False)
        prefer, strict = self.layout(accelerator), options.get("strict", True)
        by_name = not adapter_only and loads_by_name(model)
        state, local_state, finish = layouts.read_for_model(
            model, folder, index, prefer, strict, over=by_name, getter=_getter(adapter_only)
        )
        return ShardedModel(model, local_state, adapter_only, by_name, finish), state

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Write the shards of an optimizer's state, by the names of parameters. Collective: call on every rank."""
        model, _ = model_of(optimizer, accelerator._models)
        state = io_of(model).optimizer_state(optimizer, model)
        layouts.write(state, plan, "optimizer", index, self.layout(accelerator))

    def load_optimizer(self, accelerator: Run, optimizer: Any, folder: str, index: int, **options: Any) -> Deferred:
        """Read this rank's shards of an optimizer's state, whichever ranks wrote it.

        Collective: call on every rank.
        """
        model, groups = model_of(optimizer, accelerator._models)
        over = uses_torch_load(model_io.inner_optimizer(optimizer))
        return optimizers.read_for_optimizer(
            optimizer, model, folder, index, self.layout(accelerator), over=over, groups=groups
        )


class FSDP2IO(ShardedIO):
    """The states of FSDP2, whose gathered tensors are new memory."""

    gathers_new_memory = True


def _getter(adapter_only: bool) -> Callable[..., dict[str, Any]] | None:
    """Return the getter of only the active adapter's state; None for the full model."""
    return functools.partial(public_module()._get_model_state_dict, adapter_only=True) if adapter_only else None


def model_of(optimizer: Any, models: Sequence[nn.Module]) -> tuple[nn.Module, list[list[str]]]:
    """Return the model that has all parameters of an optimizer, and their names, for each group; ValueError if none has."""
    model, groups = model_io.owner(optimizer, models)
    if model is not None:
        return model, groups
    raise ValueError(
        f"No prepared model has all parameters of the optimizer ({type(model_io.inner_optimizer(optimizer)).__name__}), so "
        "its state cannot be saved as shards. Give each model a separate optimizer, made from its parameters."
    )
