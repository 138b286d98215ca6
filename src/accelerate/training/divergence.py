"""Replicas that have parted, and losses that are no numbers: what ``ACCELERATE_CHECK_EVERY=N`` looks at before each N-th step.

One all-reduce says whether a loss was not finite, and whether checksums differ: one of learning rates and step counters, one of the
checksums of parameters and gradients. Only where they differ do the ranks exchange more, and all of them raise the same error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.comm.check import LISTED, listed
from accelerate.data.iterable import ends_are_uneven
from accelerate.modules.unwrap import canonical_name
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.consistency import checksum, fold
from accelerate.precision.master import local_part
from accelerate.runtime import traits
from accelerate.training.prepared import Facade

_NEVER = torch.iinfo(torch.int64).max


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
        names = [*numbers, *sums]
        bits = torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64).to(self._first.device)
        values = torch.cat([bits, torch.stack([*sums.values()])]) if sums else bits
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        first = torch.where(self._first < 0, _NEVER, self._first * ranks + rank)
        # Without a mesh all is compared with all ranks.
        count = len(values) if self.accelerator.torch_device_mesh is None else len(bits)
        least, differs = self._compare(torch.stack([first, fold(values[:count])]), fold(values[count:])[None])
        earliest, parted = torch.stack([least[0], differs[1:].any()]).tolist()
        if earliest != _NEVER:
            raise self._not_finite(*divmod(earliest, ranks))
        if parted:
            _, differs = self._compare(values[:count], values[count:])
            lines = self._differences(names, len(bits), values, differs.nonzero().flatten().tolist())
            raise ReplicasDiffer(
                f"The ranks have parted before step {optimizer.steps} of {type(optimizer.optimizer).__name__}; the first of each kind:"
                f"{lines}\nThey were alike {self.every} steps ago, or at the start. A smaller ACCELERATE_CHECK_EVERY "
                f"than {self.every} finds the step; look there for code that only some ranks run."
            )
        self._first = -torch.ones_like(self._first)
        self._places.clear()
        self._outputs.clear()

    def _compare(self, numbers: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least of each number on all ranks, and which numbers differ; of checksums, on ranks with the same part."""
        shared = torch.stack([sums, ~sums])
        for name in self._dimensions(replicas=True) if len(sums) else ():
            group = self.accelerator.torch_device_mesh.get_group(name)
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
        words = torch.cat([numbers, ~numbers, (shared[0] != ~shared[1]).long()])
        words = self.accelerator._communicator.all_reduce(words, "max")
        highest, lowest, differ = words.split([len(numbers), len(numbers), len(sums)])
        return ~lowest, torch.cat([highest != ~lowest, differ > 0])

    def _differences(self, names: list[str], numbers: int, values: torch.Tensor, differing: list[int]) -> str:
        """Return the first of each kind that differs, with its values and ranks. All ranks."""
        places = [*{names[place].split()[0]: place for place in reversed(differing)}.values()][::-1]
        own = torch.cat([values.new_tensor([self._part()]), values[places]])
        rows = self.accelerator._communicator.all_gather(own).view(-1, len(own)).tolist()
        text = ""
        for column, place in enumerate(places, 1):
            groups: dict[int, dict[int, list[int]]] = {}
            for rank, row in enumerate(rows):
                part = row[0] if place >= numbers else 0
                groups.setdefault(part, {}).setdefault(row[column], []).append(rank)
            found = next(ranks for ranks in groups.values() if len(ranks) > 1)
            told = [
                f"{value if place >= numbers else torch.tensor(value).view(torch.float64)} on rank {listed(ranks)}"
                for value, ranks in sorted(found.items(), key=lambda item: len(item[1]))[:LISTED]
            ]
            text += f"\n  - {names[place]}: {'; '.join(told)}"
        return text

    def _described(self, optimizer: CheckedOptimizer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return what is compared: numbers that are the same on all ranks, and checksums."""
        numbers, sums, gradients = {}, {}, {}
        # Without a mesh each shard is alone.
        alone = self.accelerator.torch_device_mesh is None and traits.of(self.accelerator.distributed_type).sharded
        compared, zero = self.accelerator.num_processes > 1 and not alone, torch.zeros_like(self._first)
        names = {id(parameter): name for name, parameter in self._named("parameters")}
        for index, group in enumerate(optimizer.param_groups):
            numbers[f"learning rate of group {index}"] = float(group["lr"])
            for place, parameter in enumerate(group["params"]):
                if not place:
                    numbers[f"step counter of group {index}"] = float(optimizer.state[parameter].get("step", 0))
                if compared:
                    name = names.get(id(parameter), f"number {place} of group {index}")
                    sums[f"parameter {name!r}"] = checksum(parameter)
                    gradient = parameter.grad
                    gradients[f"gradient of {name!r}"] = zero if gradient is None else checksum(gradient)
        return numbers, sums | gradients

    def _dimensions(self, replicas: bool) -> list[str]:
        """Return along which dimensions of the mesh ranks have the same part of the weights, or the others."""
        own = traits.of(self.accelerator.distributed_type).sharded
        names = getattr(self.accelerator.torch_device_mesh, "mesh_dim_names", ())
        return [name for name in names if (name == "tp" or (own and name != "dp_replicate")) != replicas]

    def _part(self) -> int:
        """Return a number that ranks with the same part of the weights share."""
        mesh, place = self.accelerator.torch_device_mesh, 0
        for name in self._dimensions(replicas=False):
            place = place * mesh[name].size() + mesh.get_local_rank(name)
        return place

    def _not_finite(self, first: int, rank: int) -> FloatingPointError:
        """Return the error for the first rank with a loss that is not finite. All ranks."""
        place = self._places[first - self._passes] if rank == self.accelerator.process_index else ""
        seen = [name for name, noted in self._outputs.items() if noted.item() == first]
        where = place + (f"; the first module with such an output: {seen[0]}" if seen else "")
        (where,) = self.accelerator._communicator.broadcast_object_list([where], rank)
        hint = "" if self.modules else " Set ACCELERATE_CHECK_MODULES=true to learn in which module it began."
        return FloatingPointError(f"A loss is NaN or infinite: first on rank {rank}, in its {where}.{hint}")
