"""Replicas that have parted, and losses that are no numbers: what ``ACCELERATE_CHECK_EVERY=N`` looks at before each N-th step.

One all-reduce says whether a loss was not finite, and whether checksums differ: one of learning rates and step counters, one of the
checksums of parameters and gradients. Only where they differ do the ranks exchange more, and all of them raise the same error.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.comm.check import LISTED, listed
from accelerate.config.strategies import traits_of
from accelerate.data.iterable import ends_are_uneven
from accelerate.modules.unwrap import canonical_name
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime.torch_private import local_part
from accelerate.strategies.consistency import checksum, differing, extremes, fold
from accelerate.training.run import TrainingRun

_NEVER = torch.iinfo(torch.int64).max


class ReplicasDiffer(RuntimeError):
    """Parameters, gradients, learning rates or step counters differ between ranks that train the same. All ranks raise it."""


class ReplicaCheck:
    """Compares the ranks of one Accelerator at every `every`-th step; with `modules` it looks at the outputs of modules, too."""

    def __init__(self, accelerator: TrainingRun, every: int, modules: bool) -> None:
        self.accelerator, self.every, self.modules = accelerator, every, modules
        # Backward passes so far, where they were since the last comparison, and the first with a loss that is not finite.
        self._passes = 0
        self._places: list[str] = []
        self._first = torch.tensor(-1, device=accelerator.device)
        self._outputs: dict[str, torch.Tensor] = {}
        accelerator.backward = partial(self._backward, accelerator.backward)  # type: ignore[method-assign]  # meant

    def watch(self, optimizer: AcceleratedOptimizer) -> None:
        """Count the steps of a prepared optimizer, and check before them."""
        optimizer._before_step = partial(self._before_step, itertools.count(1))

    def watch_model(self, model: nn.Module) -> None:
        """Note the outputs of a prepared model's modules, if they are asked for."""
        for name, module in self.accelerator.unwrap_model(model).named_modules() if self.modules else ():
            note = partial(self._note_output, f"{canonical_name(name)!r} ({type(module).__name__})")
            self.accelerator.prepared.hooks.append(module.register_forward_hook(note))

    # What is noted in a step, without waiting for the device.

    def _backward(self, method: Callable[..., None], loss: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(loss, torch.Tensor):
            self._first = self._earlier(self._first, loss)
            progress = getattr(self.accelerator.gradient_state.active_dataloader, "_progress", None)
            batch = f" (batch {progress.batches - 1} of epoch {progress.epoch})" if progress is not None else ""
            self._places.append(f"backward pass {self._passes}{batch}")
            self._passes += 1
        method(loss, *args, **kwargs)

    def _note_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, torch.Tensor):
            self._outputs[name] = self._earlier(self._outputs.get(name, -torch.ones_like(self._first)), first)

    def _earlier(self, noted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        finite = local_part(values).detach().isfinite().all()
        return torch.where(finite | (noted >= 0), noted, self._passes)

    # The comparison.

    def _before_step(self, steps: Iterator[int], optimizer: AcceleratedOptimizer) -> None:
        if (step := next(steps)) % self.every or ends_are_uneven():
            return
        numbers, sums = self._described(optimizer)
        names = [*numbers, *sums]
        bits = torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64).to(self._first.device)
        values = torch.cat([bits, torch.stack([*sums.values()])]) if sums else bits
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        communicator, part = self.accelerator._communicator, self._part() if sums else (0, 1)
        first = torch.where(self._first < 0, _NEVER, self._first * ranks + rank)
        folded = torch.stack([first, fold(values[: len(bits)]), fold(values[len(bits) :])])
        highest, lowest = extremes(folded, *part, communicator)
        shared = highest[:, 1].max() != lowest[:, 1].min()
        parted = shared | (highest[:, 2] != lowest[:, 2]).any()
        earliest, parted = torch.stack([lowest[:, 0].min(), parted]).tolist()
        if earliest != _NEVER:
            raise self._not_finite(*divmod(earliest, ranks))
        if parted:
            places = differing(values[: len(bits)], communicator=communicator)
            places += [len(bits) + place for place in differing(values[len(bits) :], *part, communicator)]
            lines = self._differences(names, len(bits), values, places)
            raise ReplicasDiffer(
                f"The ranks have parted before step {step} of {type(optimizer.optimizer).__name__}; the first of each kind:"
                f"{lines}\nThey were equal {self.every} steps ago, or at the start. A smaller ACCELERATE_CHECK_EVERY "
                f"than {self.every} finds the step; look there for code that only some ranks run."
            )
        self._first = -torch.ones_like(self._first)
        self._places.clear()
        self._outputs.clear()

    def _differences(self, names: list[str], numbers: int, values: torch.Tensor, differing: list[int]) -> str:
        """Return the first of each kind that differs, with its values and ranks. All ranks."""
        places = [*{names[place].split()[0]: place for place in reversed(differing)}.values()][::-1]
        own = torch.cat([values.new_tensor([self._part()[0]]), values[places]])
        rows = self.accelerator._communicator.all_gather(own).view(-1, len(own)).tolist()
        text = ""
        for column, place in enumerate(places, 1):
            groups: dict[int, dict[int, list[int]]] = {}
            for rank, row in enumerate(rows):
                part = row[0] if place >= numbers else 0
                groups.setdefault(part, {}).setdefault(row[column], []).append(rank)
            found = next(ranks for ranks in groups.values() if len(ranks) > 1)
            shown = [
                f"{value if place >= numbers else torch.tensor(value).view(torch.float64)} on rank {listed(ranks)}"
                for value, ranks in sorted(found.items(), key=lambda item: len(item[1]))[:LISTED]
            ]
            text += f"\n  - {names[place]}: {'; '.join(shown)}"
        return text

    def _described(self, optimizer: AcceleratedOptimizer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return what is compared: numbers that are the same on all ranks, and checksums."""
        numbers, sums, gradients = {}, {}, {}
        # Without a mesh, or without replicas in it, each shard is alone.
        ranks, sharded = self.accelerator.num_processes, traits_of(self.accelerator.distributed_type).sharded
        alone = self._part()[1] == ranks or (self.accelerator.torch_device_mesh is None and sharded)
        compared, zero = ranks > 1 and not alone, torch.zeros_like(self._first)
        models = [self.accelerator.unwrap_model(model) for model in self.accelerator._models]
        names = {id(one): canonical_name(name) for model in models for name, one in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            numbers[f"learning rate of group {index}"] = float(group["lr"])
            for place, parameter in enumerate(group["params"]):
                if not place:
                    numbers[f"step counter of group {index}"] = float(
                        optimizer.state.get(parameter, {}).get("step", 0)
                    )
                if compared:
                    name = names.get(id(parameter), f"number {place} of group {index}")
                    sums[f"parameter {name!r}"] = checksum(parameter)
                    gradient = parameter.grad
                    gradients[f"gradient of {name!r}"] = zero if gradient is None else checksum(gradient)
        return numbers, sums | gradients

    def _part(self) -> tuple[int, int]:
        """Return which part of the weights this rank has, and of how many; without a mesh all is compared with all ranks."""
        sharded = traits_of(self.accelerator.distributed_type).sharded
        mesh, part, parts = self.accelerator.torch_device_mesh, 0, 1
        for name in () if mesh is None else mesh.mesh_dim_names:
            # Along the other dimensions ranks have the same part.
            if name == "tp" or (sharded and name != "dp_replicate"):
                part, parts = part * mesh[name].size() + mesh.get_local_rank(name), parts * mesh[name].size()
        return part, parts

    def _not_finite(self, first: int, rank: int) -> FloatingPointError:
        """Return the error for the first rank with a loss that is not finite. All ranks."""
        place = self._places[first - self._passes] if rank == self.accelerator.process_index else ""
        seen = [name for name, noted in self._outputs.items() if noted.item() == first]
        where = place + (f"; the first module with such an output: {seen[0]}" if seen else "")
        (where,) = self.accelerator._communicator.broadcast_object_list([where], rank)
        hint = "" if self.modules else " Set ACCELERATE_CHECK_MODULES=true to learn in which module it began."
        return FloatingPointError(f"A loss is NaN or infinite: first on rank {rank}, in its {where}.{hint}")
