"""Replicas that have parted, and losses that are no numbers: what ``ACCELERATE_CHECK_EVERY=N`` looks at before each N-th step.

Each rank sends one vector of 64-bit numbers: where its loss was not finite first, learning rates, step counters, and checksums of
parameters and gradients. All ranks see all vectors, so all of them raise the same error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accelerate.data.iterable import ends_are_uneven
from accelerate.modules.unwrap import canonical_name
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.consistency import checksum
from accelerate.precision.master import local_part
from accelerate.runtime import traits
from accelerate.training.prepared import Facade


class ReplicasDiffer(RuntimeError):
    """Parameters, gradients, learning rates or step counters differ between ranks that train the same. All ranks raise it."""


class CheckedOptimizer(AcceleratedOptimizer):
    """A prepared optimizer whose steps are counted, and checked before."""

    check: Callable[["CheckedOptimizer"], None] = staticmethod(lambda optimizer: None)
    steps = 0

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "check"}

    def step(self, closure: Callable | None = None) -> None:
        """Let the ranks compare what they train if it is time to, and update the parameters."""
        if self.gradient_state.sync_gradients:
            self.steps += 1
            self.check(self)
        super().step(closure)


class ReplicaCheck:
    """Compares the ranks of one Accelerator at every `every`-th step; with `modules` it looks at the outputs of modules, too."""

    def __init__(self, accelerator: Facade, every: int, modules: bool) -> None:
        self.accelerator, self.every, self.modules = accelerator, every, modules
        # Backward passes so far, where they were since the last comparison, and the first with a loss that is not finite.
        self._passes, self._places = 0, []
        self._first = torch.tensor(-1, device=accelerator.device)
        self._outputs: dict[str, torch.Tensor] = {}
        accelerator.backward = partial(self._backward, accelerator.backward)

    def optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> CheckedOptimizer:
        """Return a prepared optimizer whose steps are checked."""
        made = CheckedOptimizer(optimizer, **options)
        made.check = self._before_step
        for name, module in self._named("modules") if self.modules else ():
            module.register_forward_hook(partial(self._note_output, f"{name!r} ({type(module).__name__})"))
        return made

    def _named(self, what: str) -> list[tuple[str, Any]]:
        models = [self.accelerator.unwrap_model(model) for model in self.accelerator.prepared.models]
        return [(canonical_name(name), one) for model in models for name, one in getattr(model, f"named_{what}")()]

    # What is noted in a step, without waiting for the device.

    def _backward(self, method: Callable, loss: Any, *args: Any, **kwargs: Any) -> None:
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

    def _before_step(self, optimizer: CheckedOptimizer) -> None:
        if optimizer.steps % self.every or ends_are_uneven():
            return
        numbers, sums = self._described(optimizer)
        bits = torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64)
        vector = torch.stack(
            [self._first, *torch.tensor([self._part(), *bits.tolist()]).to(self._first), *sums.values()]
        )
        rows = self.accelerator._communicator.all_gather(vector).view(-1, len(vector)).tolist()
        self._require_finite([row[0] for row in rows])
        lines: dict[str, str] = {}
        for place, what in enumerate([*numbers, *sums], 2):
            kind, checked = what.split()[0], what in sums
            for part in {row[1] for row in rows} if kind not in lines else ():
                ranks: dict[int, list[str]] = {}
                for rank, row in enumerate(rows):
                    if row[1] == part or not checked:
                        ranks.setdefault(row[place], []).append(str(rank))
                told = [
                    f"{value if checked else torch.tensor(value).view(torch.float64)} on rank {', '.join(which)}"
                    for value, which in sorted(ranks.items(), key=lambda item: len(item[1]))
                ]
                if len(told) > 1:
                    lines[kind] = f"\n  - {what}: {'; '.join(told)}"
        if lines:
            raise ReplicasDiffer(
                f"The ranks have parted before step {optimizer.steps} of {type(optimizer.optimizer).__name__}; the first of each kind:"
                f"{''.join(lines.values())}\nThey were alike {self.every} steps ago, or at the start. A smaller ACCELERATE_CHECK_EVERY "
                f"than {self.every} finds the step; look there for code that only some ranks run."
            )
        self._first = -torch.ones_like(self._first)
        self._places.clear()
        self._outputs.clear()

    def _described(self, optimizer: CheckedOptimizer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return what is compared: numbers that are the same on all ranks, and checksums."""
        numbers, sums, gradients = {}, {}, {}
        names = {id(parameter): name for name, parameter in self._named("parameters")}
        for index, group in enumerate(optimizer.param_groups):
            numbers[f"learning rate of group {index}"] = float(group["lr"])
            for place, parameter in enumerate(group["params"]):
                if not place:
                    numbers[f"step counter of group {index}"] = float(optimizer.state[parameter].get("step", 0))
                if self.accelerator.num_processes > 1:
                    name = names.get(id(parameter), f"number {place} of group {index}")
                    sums[f"parameter {name!r}"] = checksum(parameter)
                    if parameter.grad is not None:
                        gradients[f"gradient of {name!r}"] = checksum(parameter.grad)
        return numbers, sums | gradients

    def _part(self) -> int:
        """Return a number that ranks with the same part of the weights share."""
        mesh, own = self.accelerator.torch_device_mesh, traits.of(self.accelerator.distributed_type).sharded
        if mesh is None:
            return self.accelerator.process_index if own else 0
        place = 0
        for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
            if name == "tp" or (own and name != "dp_replicate"):
                place = place * size + mesh.get_local_rank(name)
        return place

    def _require_finite(self, firsts: list[int]) -> None:
        """Raise FloatingPointError on all ranks, for the first rank with a loss that is not finite."""
        if max(firsts) < 0:
            return
        first, rank = min((first, rank) for rank, first in enumerate(firsts) if first >= 0)
        place = self._places[first - self._passes] if rank == self.accelerator.process_index else ""
        seen = [name for name, noted in self._outputs.items() if noted.item() == first]
        where = place + (f"; the first module with such an output: {seen[0]}" if seen else "")
        where = self.accelerator._communicator.gather_object(where)[rank]
        hint = "" if self.modules else " Set ACCELERATE_CHECK_MODULES=true to learn in which module it began."
        raise FloatingPointError(f"A loss is NaN or infinite: first on rank {rank}, in its {where}.{hint}")
