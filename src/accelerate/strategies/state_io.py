"""The contract of what a checkpoint has of a strategy: states of models and optimizers, and who saves them.

A `StateIO` is stateless, as a strategy is. The bodies here are the behaviour of replicas: each rank has all weights under its own
wrapper. For weights alone ``whole_tensors`` and ``model_state`` are called; for a checkpoint ``model_state``, ``save_model``,
``save_optimizer`` and ``checkpointed_schedulers``; for a restore ``load_model`` and ``load_optimizer``. Every rank calls them;
who writes is decided in `checkpoint.save`.
"""

from typing import Any, ClassVar

from torch import nn

from accelerate.checkpoint import layouts, optimizers, save
from accelerate.checkpoint.apply import Change
from accelerate.checkpoint.model_io import inner_optimizer, plain_state, tied_again
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Wanted
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.modules.unwrap import canonical_names
from accelerate.runtime.run import Run


class StateIO:
    """The states of replicas, or of one process."""

    # Whether a checkpoint has each rank's part of a model, so that the whole is not gathered for `save_model`.
    saves_shards: ClassVar[bool] = False
    # What `whole_tensors` has gathered is nobody else's memory, and stays; tensors that the model has whole are its own.
    gathers_new_memory: ClassVar[bool] = False
    # Which arguments of `save_state` reach `save_model`.
    save_options: ClassVar[tuple[str, ...]] = ()

    def owns_state(self, model: nn.Module) -> bool:
        """Whether hooks of `load_state` do not see this model, nor decide who loads it; those of `save_state` get it as it is."""
        return False

    def whole_tensors(self, accelerator: Run, model: nn.Module, wanted: Wanted = bool) -> Entries:
        """Yield the wanted entries of the user's model's state dict, each whole, of tied ones the first. All ranks, in step.

        A value is to be read before the next one is asked for: it may be the model's memory, or freed then.
        """
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
        state, again = inner.state_dict(), tied_again(model)
        for name, value in zip(canonical_names(state), state.values(), strict=True):
            if wanted(name) and name not in again:
                yield name, value

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict, with `unwrap` under the names of the user's model. All ranks."""
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        return inner.state_dict()

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Write a state from `model_state` (empty with `saves_shards`) into a plan. All ranks.

        `options` are `safe_serialization`, `save_on_each_node`, and those in `save_options` that the user gave.
        """
        save.write_model(state, plan, index, **options)

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Read a model's state from a checkpoint folder, and return what gives it to the model, which stays as it is. All ranks.

        `options` are `map_location`, `load_kwargs` of ``torch.load`` and `model_options` of the model's ``load_state_dict``.
        """
        inner = accelerator._strategy.unwrap_model(model, keep_torch_compile=False)
        return layouts.read_full_model(inner, folder, index, **options)

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Write an optimizer's state into a plan. All ranks."""
        save.write_optimizer(plain_state(inner_optimizer(optimizer)), plan, index, **options)

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> Any:
        """Return an optimizer's state in a checkpoint folder, for its ``load_state_dict``; None if its model's state has it. All ranks."""
        return optimizers.read_full_optimizer(optimizer, accelerator._models, folder, index, **options)

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers whose state is saved with a checkpoint."""
        return list(accelerator._schedulers)
