"""The contract for checkpoints of a strategy: states of models and optimizers, and the ranks that save them.

A `StateIO` is stateless, like a strategy. The methods here implement replicas: each rank has all weights under its own
wrapper. Exported weights use ``whole_tensors`` and ``model_state``. A checkpoint uses ``model_state``, ``save_model``,
``save_optimizer`` and ``checkpointed_schedulers``; a restore uses ``load_model`` and ``load_optimizer``. Every rank calls
them; `checkpoint.save` decides which rank writes.
"""

from typing import Any, ClassVar

from torch import nn

from accelerate.checkpoint import layouts, manifest, optimizers, save
from accelerate.checkpoint.apply import Change, optimizer_change
from accelerate.checkpoint.model_io import inner_optimizer, plain_state, tied_again
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Wanted
from accelerate.checkpoint.stored import Plan
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.modules.unwrap import canonical_names
from accelerate.runtime.run import Run


class StateIO:
    """The states of replicas, or of one process."""

    # Whether a checkpoint has each rank's part of a model, so that `save_model` does not need the full model.
    saves_shards: ClassVar[bool] = False
    # Whether a rank reads files that only ranks of other machines write.
    needs_all_files: ClassVar[bool] = False
    # Whether the results of `whole_tensors` are copies, which stay valid, rather than the model's own memory.
    gathers_new_memory: ClassVar[bool] = False
    # Whether each rank has the names of all parameters, so that one rank can write them down.
    has_all_names: ClassVar[bool] = True
    # Which arguments of `save_state` reach `save_model`.
    save_options: ClassVar[tuple[str, ...]] = ()

    @property
    def gathers(self) -> bool:
        """Whether only rank 0 has a model's full weights, because they are gathered. Not a collective."""
        return self.saves_shards or self.needs_all_files

    def owns_state(self, model: nn.Module) -> bool:
        """Whether hooks of `load_state` do not see this model, nor decide who loads it; those of `save_state` get the model itself.

        Not a collective.
        """
        return False

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Yield the selected entries of the user's model's state dict, each unsharded, the first one of tied entries.

        Read a value before requesting the next one: it may be the model's memory, or freed then.

        Collective: call on every rank.
        """
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
        state, again = inner.state_dict(), tied_again(model)
        for name, value in zip(canonical_names(state), state.values(), strict=True):
            if is_selected(name) and name not in again:
                yield name, value

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict, with `unwrap` under the names of the user's model.

        Collective: call on every rank.
        """
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        return inner.state_dict()

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Write a state from `model_state` (empty with `saves_shards`) into a plan.

        `options` are `safe_serialization` and those in `save_options` that the user gave.

        Collective: call on every rank.
        """
        save.add_model(state, plan, index, **options)

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read a model's state from a checkpoint folder, and return what gives it to the model, which is not changed yet.

        `options` are `map_location`, `load_kwargs` of ``torch.load`` and `model_options` of the model's ``load_state_dict``.

        Collective: call on every rank.
        """
        # Only the strategy knows a wrapper that another package has put around the model.
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
        return layouts.read_full_model(inner, folder, index, **options)

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Write an optimizer's state into a plan.

        Collective: call on every rank.
        """
        save.add_optimizer(plain_state(inner_optimizer(optimizer)), plan, index, **options)

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change | None:
        """Read an optimizer's state, and return what gives it to the optimizer; None if its model's state has it.

        `options` are `map_location`, and `load_kwargs` of ``torch.load``.

        Collective: call on every rank.
        """
        fill: list[Plan] = []
        state = optimizers.read_full_optimizer(optimizer, accelerator._models, folder, index, fill=fill, **options)
        return optimizer_change(optimizer, state, manifest.optimizer_file(index), fill)

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers whose state is saved with a checkpoint. Not a collective."""
        return list(accelerator._schedulers)
