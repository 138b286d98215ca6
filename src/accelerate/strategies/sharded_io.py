"""Checkpoints of strategies with shards: each rank writes and reads its own shards, by the names of parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn

from accelerate.checkpoint import layouts, manifest, model_io, optimizers
from accelerate.checkpoint.apply import Change, kept_tensors, loads_by_name, optimizer_change
from accelerate.checkpoint.model_io import io_of
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Layout, Wanted, full
from accelerate.checkpoint.stored import Plan
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.runtime.run import Run
from accelerate.strategies.fsdp import public_module
from accelerate.strategies.state_io import StateIO


class ShardedIO(StateIO):
    """The states of FSDP: shards as they are, which are not gathered for a checkpoint."""

    saves_shards = True
    needs_all_files = True
    save_options: ClassVar[tuple[str, ...]] = ("use_dcp", "adapter_only")

    def layout(self, accelerator: Run, use_dcp: bool = True) -> Layout:
        """Return how a checkpoint keeps the shards."""
        return layouts.layout_of(accelerator.state.fsdp_plugin, use_dcp)

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Gather a tensor at a time, on each rank.

        Collective: call on every rank.
        """
        again = model_io.tied_again(model)
        for name, value in io_of(model).model_state(model).values.items():
            if is_selected(name) and name not in again:
                yield name, full(value)

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict in host memory on rank 0, and an empty one elsewhere.

        Collective: call on every rank.
        """
        return model_io.collected(self.whole_tensors(accelerator, model), model)

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Write the shards of a model.

        Collective: call on every rank.
        """
        outer = accelerator._models[index]
        values = io_of(outer).model_state(outer, _getter(options.get("adapter_only", False))).values
        layouts.write(values, plan, "model", index, self.layout(accelerator, options.get("use_dcp", True)))

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read this rank's shards of a model, whichever ranks wrote it.

        Collective: call on every rank.
        """
        model_options = options.get("model_options", {})
        if unknown := sorted(model_options.keys() - {"strict", "adapter_only"}):
            raise TypeError(f"{type(model).__name__} does not take {unknown}; nothing was loaded.")
        adapter_only, strict = model_options.get("adapter_only", False), model_options.get("strict", True)
        by_name, fill = not adapter_only and loads_by_name(model), list[Plan]()
        state, own = layouts.read_for_model(
            model,
            folder,
            index,
            self.layout(accelerator),
            strict,
            fill if by_name else None,
            getter=_getter(adapter_only),
        )
        setter = functools.partial(public_module()._set_model_state_dict, adapter_only=True) if adapter_only else None
        apply = functools.partial(io_of(model).apply_model, model, state, own, setter, strict)
        return Change(apply, None if by_name else functools.partial(kept_tensors, model), fill=fill)

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Write the shards of an optimizer's state, by the names of parameters.

        Collective: call on every rank.
        """
        model, groups = model_of(optimizer, accelerator._models)
        state = io_of(model).optimizer_state(optimizer, model, groups)
        layouts.write(state, plan, "optimizer", index, self.layout(accelerator))

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read this rank's shards of an optimizer's state, whichever ranks wrote it.

        Collective: call on every rank.
        """
        model, groups = model_of(optimizer, accelerator._models)
        prefer, fill = self.layout(accelerator), list[Plan]()
        state = optimizers.read_for_optimizer(optimizer, model, folder, index, prefer, groups, fill)
        return optimizer_change(optimizer, state, manifest.optimizer_file(index), fill)


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
