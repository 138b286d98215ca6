"""The states of DeepSpeed's engines: an engine writes and reads its own part of a checkpoint, optimizer included."""

from typing import Any

from torch import nn

from accelerate.checkpoint.apply import Change
from accelerate.checkpoint.model_io import collected
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Wanted
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.extensions.deepspeed import checkpoint
from accelerate.extensions.deepspeed.wrappers import DeepSpeedSchedulerWrapper, is_engine
from accelerate.runtime.run import Run
from accelerate.strategies.state_io import StateIO


class DeepSpeedIO(StateIO):
    """The states of a run with DeepSpeed; models without an engine are saved as replicas."""

    saves_shards = True
    save_options = ("client_state", "save_latest", "exclude_frozen_parameters")

    def owns_state(self, model: nn.Module) -> bool:
        """Whether it is an engine, which saves and loads its optimizer with its weights."""
        return is_engine(model)

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Gather a module of stage 3 at a time, on each rank; at other stages all ranks have the weights.

        Collective: call on every rank.
        """
        if is_engine(model) and model.zero_optimization_stage() == 3:
            return checkpoint.entries(model, is_selected)
        return super().whole_tensors(accelerator, model, is_selected)

    def model_state(  # type: ignore[override]  # None, as DeepSpeed returns it
        self, accelerator: Run, model: nn.Module, unwrap: bool
    ) -> dict[str, Any] | None:
        """Return the full state dict, an engine's under the names of its module; for stage 3 only on rank 0, None elsewhere.

        Collective: call on every rank.
        """
        if not is_engine(model):
            return super().model_state(accelerator, model, unwrap)
        checkpoint.require_gathering(model, accelerator.state.deepspeed_plugin.deepspeed_config)
        # Copies: ZeRO keeps parameters as views of one buffer.
        everywhere = model.zero_optimization_stage() < 3
        return collected(self.whole_tensors(accelerator, model), model, everywhere) or None

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Put an engine's state into a plan, its optimizer included; or the weights of a model without optimizer.

        Collective: call on every rank.
        """
        model = accelerator._models[index]
        engine_options = {name: options.pop(name) for name in self.save_options if name in options}
        if is_engine(model) and model.basic_optimizer is not None:
            checkpoint.save(model, plan, index, **engine_options)
        else:  # which DeepSpeed does not save
            weights = super().model_state(accelerator, model, True) if not is_engine(model) else None
            weights = weights or collected(self.whole_tensors(accelerator, model), model)
            super().save_model(accelerator, weights, plan, index, **options)

    def load_model(
        self, accelerator: Run, model: nn.Module, folder: CheckpointFolder, index: int, **options: Any
    ) -> Change:
        """Return what loads the engine's part, its optimizer included. Collective: call on every rank."""
        if not is_engine(model):
            return super().load_model(accelerator, model, folder, index, **options)
        trained = [wrapper.engine for wrapper in accelerator.prepared.engines]
        return checkpoint.read(
            model,
            folder,
            index,
            optimizer=trained.index(model) if model in trained else 0,
            strict=options.get("model_options", {}).get("strict", True),
            weights_only=(options.get("load_kwargs") or {}).get("weights_only", True),
        )

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Nothing: the engine's part has it."""

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> None:
        """Nothing: the engine's part has it."""

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers that no engine saves."""
        return [item for item in accelerator._schedulers if not isinstance(item, DeepSpeedSchedulerWrapper)]
