"""The states of Megatron core's engines: core writes and reads its own part of a checkpoint, optimizer included."""

import io
import os
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from accelerate.checkpoint import manifest
from accelerate.checkpoint.apply import Change
from accelerate.checkpoint.dcp import read_metadata
from accelerate.checkpoint.layouts import refuse_misfit
from accelerate.checkpoint.model_io import collected
from accelerate.checkpoint.save import SavePlan
from accelerate.checkpoint.state import Entries, Wanted
from accelerate.checkpoint.verify import CheckpointFolder
from accelerate.extensions.megatron.engine import MegatronEngine
from accelerate.extensions.megatron.steps import MegatronLMSchedulerWrapper
from accelerate.runtime.run import Run
from accelerate.strategies.state_io import StateIO


class MegatronIO(StateIO):
    """The states of a run with Megatron core."""

    saves_shards = True
    needs_all_files = True

    def owns_state(self, model: nn.Module) -> bool:
        """Whether it is an engine, which saves and loads its optimizer with its weights."""
        return isinstance(model, MegatronEngine)

    def whole_tensors(self, accelerator: Run, model: nn.Module, is_selected: Wanted = bool) -> Entries:
        """Gather a parameter at a time, and send it to the other stages. Collective: call on every rank."""
        return (
            model.entries(is_selected)
            if isinstance(model, MegatronEngine)
            else super().whole_tensors(accelerator, model, is_selected)
        )

    def model_state(self, accelerator: Run, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        """Return the full state dict under the names of transformers. Collective: call on every rank."""
        if not isinstance(model, MegatronEngine):
            return super().model_state(accelerator, model, unwrap)
        state = collected(model.entries(bool), model.source, everywhere=True)
        return {name: state[name] for name in model.source.state_dict()}

    def save_model(self, accelerator: Run, state: dict[str, Any], plan: SavePlan, index: int, **options: Any) -> None:
        """Let core write the engine's part into the staged folder, its optimizer included.

        Collective: call on every rank.
        """
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        place = os.path.join(plan.folder, _folder(index))
        os.makedirs(place, exist_ok=True)
        accelerator.wait_for_everyone()
        engine: Any = accelerator._models[index]
        engine.save(place)
        states = {name: torch.as_tensor(value) for name, value in get_cuda_rng_tracker().get_states().items()}
        plan.add_object(f"{_folder(index)}/rng_{accelerator.process_index}_states.pt", states)

    def load_model(self, accelerator: Run, model: Any, folder: CheckpointFolder, index: int, **options: Any) -> Change:
        """Compare an engine with what core wrote, and return what loads that, its optimizer included. All ranks load."""
        from megatron.core.dist_checkpointing import load_common_state_dict

        place = os.path.join(folder, _folder(index))
        if not os.path.isdir(place):
            raise FileNotFoundError(
                f"{folder!r} has no {_folder(index)}: Megatron-LM did not write it. Load it with the strategy that did, save_model, and load those "
                "weights into the transformers model before prepare."
            )
        folder.check([name for name in folder.listing.files if name.startswith(f"{_folder(index)}/")], shared=True)
        _refuse_code(place)
        refuse_misfit(place, type(model.source).__name__, model.misfits(place))
        common, degrees = load_common_state_dict(place), [model.plugin.tp_degree, model.plugin.pp_degree]
        divided, trains = (common.get("divided"), model.optimizer is not None and not model.plugin.no_load_optim)
        if trains and "divided" not in common:
            raise RuntimeError(f"{place} has no state of an optimizer; nothing was loaded. Set no_load_optim=True.")
        if trains and divided not in (None, degrees):
            raise RuntimeError(
                f"{place} has a distributed optimizer of tp_degree, pp_degree = {divided}, and here they are {degrees}; nothing was loaded. Without Apex or "
                "Transformer Engine, set no_load_optim=True, or save it with use_distributed_optimizer=False."
            )
        strict = options.get("model_options", {}).get("strict", True)
        return Change(partial(_load, model, place, accelerator.process_index, strict))

    def save_optimizer(self, accelerator: Run, optimizer: Any, plan: SavePlan, index: int, **options: Any) -> None:
        """Nothing: the engine's part has it."""

    def load_optimizer(
        self, accelerator: Run, optimizer: Any, folder: CheckpointFolder, index: int, **options: Any
    ) -> None:
        """Nothing: the engine's part has it."""

    def checkpointed_schedulers(self, accelerator: Run) -> list[Any]:
        """Return the schedulers that no engine saves."""
        return [item for item in accelerator._schedulers if not isinstance(item, MegatronLMSchedulerWrapper)]


def _folder(index: int) -> str:
    return manifest.indexed("megatron_model", index, "")


def _refuse_code(place: str) -> None:
    """Raise for metadata and objects whose pickles name anything but plain records and tensors: core reads them without a look.

    Not a collective.
    """
    metadata = read_metadata(place)
    for index, where in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with open(os.path.join(place, where.relative_path), "rb") as file:
                file.seek(where.offset)
                torch.load(io.BytesIO(file.read(where.length)), weights_only=True)


def _load(engine: MegatronEngine, place: str, rank: int, strict: bool) -> None:
    """Let core load its own files. Collective: call on every rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    engine.load(place, strict)
    file = os.path.join(place, f"rng_{rank}_states.pt")
    if os.path.isfile(file):
        get_cuda_rng_tracker().set_states(torch.load(file, weights_only=True))
