"""Models that a device map has placed, and that a run would prepare."""

import torch
from torch import nn

from accelerate.config.strategies import traits_of
from accelerate.extension import Extension


class PlacedModels(Extension):
    """Refuses models that this run cannot train where they are."""

    order = 0  # before extensions that change the layers of a model

    def convert(self, model: nn.Module, evaluation: bool) -> nn.Module:
        """Refuse (ValueError) a model on several devices in several processes, or a quantised one on another device. Not a collective."""
        run = self.run
        if run.verify_device_map(model) and traits_of(run.distributed_type).distributed:
            raise ValueError(
                "This model was loaded with a `device_map` over several devices, which cannot be combined with several "
                f"processes (num_processes={run.num_processes}). Load it without a device map, or run one process."
            )
        quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if quantized and len(devices) == 1 and run.device.type != "cpu":
            where = next(iter(devices))
            placed = torch.device(run.device.type, where) if isinstance(where, int) else torch.device(where)
            index = run.device.index or 0
            if (placed.type, placed.index or 0) != (run.device.type, index):
                raise ValueError(
                    f"This quantized model is on {placed}, but this process trains on {run.device}. Load it with "
                    f"device_map={{'': {index}}}."
                )
        return model
