"""Replicas that have parted, and losses that are no numbers: what ``ACCELERATE_CHECK_EVERY=N`` looks at before each N-th step.

One all-reduce says whether a loss was not finite, and whether checksums differ: one of learning rates and step counters, one of the
checksums of parameters and gradients. Only where they differ do the ranks exchange more, and all of them raise the same error.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate.base._warn import warn_user
from accelerate.base.environment import get_int_from_env, parse_flag_from_env
from accelerate.base.text import LISTED, listed
from accelerate.comm.in_step import ends_are_uneven
from accelerate.config.strategies import traits_of
from accelerate.extension import Extension
from accelerate.extensions.checks import CHECK_EVERY, CHECK_MODULES
from accelerate.extensions.same_model.consistency import checksum, differing, extremes, fold
from accelerate.modules.unwrap import canonical_name
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime.torch_private import local_part

_NEVER = torch.iinfo(torch.int64).max


class ReplicasDiffer(RuntimeError):
    """Parameters, gradients, learning rates or step counters differ between ranks that train the same. All ranks raise it."""


class ReplicaCheck(Extension):
    """Compares the ranks of one Accelerator every `interval` steps; with `modules` also the outputs of modules."""

    def __init__(self, run: Any, interval: int, modules: bool) -> None:
        super().__init__(run)
        self.interval, self.modules = interval, modules
        # Backward passes so far, where they were since the last comparison, and the first with a loss that is not finite.
        self._passes = 0
        self._places: list[str] = []
        self._first = torch.tensor(-1, device=run.device)
        self._outputs: dict[str, torch.Tensor] = {}
        self._steps: WeakKeyDictionary[AcceleratedOptimizer, int] = WeakKeyDictionary()
        self._hooks: list[RemovableHandle] = []

    @classmethod
    def attach(cls, run: Any) -> "ReplicaCheck | None":
        """Return the check that the environment asks for; None where an engine or a pipeline makes it meaningless."""
        interval = get_int_from_env([CHECK_EVERY], 0)
        if not interval:
            return None
        layout, traits = run.parallelism_config, traits_of(run.distributed_type)
        if not traits.scales_loss:
            warn_user(
                f"{CHECK_EVERY}={interval} has no effect with {run.distributed_type}, whose engine steps itself."
            )
            return None
        if layout is not None and layout.pp_enabled:
            warn_user(
                f"{CHECK_EVERY}={interval} has no effect with pp_size={layout.pp_size}: the ranks of a pipeline have different parameters."
            )
            return None
        return cls(run, interval, parse_flag_from_env(CHECK_MODULES))

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Note the outputs of a prepared model's modules, if they are requested."""
        if not self.modules or kind != "model" or evaluation:
            return
        for name, module in self.run.unwrap_model(prepared).named_modules():
            note = partial(self._note_output, f"{canonical_name(name)!r} ({type(module).__name__})")
            self._hooks.append(module.register_forward_hook(note))

    def released(self) -> None:
        """Look at no module of the released models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # Notes of a step, taken without waiting for the device.

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Note whether the loss of a backward pass is finite."""
        if isinstance(loss, torch.Tensor):
            self._first = self._earlier(self._first, loss)
            progress = getattr(self.run.gradient_state.active_dataloader, "_progress", None)
            batch = f" (batch {progress.batches - 1} of epoch {progress.epoch})" if progress is not None else ""
            self._places.append(f"backward pass {self._passes}{batch}")
            self._passes += 1

    def _note_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, torch.Tensor):
            self._outputs[name] = self._earlier(self._outputs.get(name, -torch.ones_like(self._first)), first)

    def _earlier(self, noted: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        finite = local_part(values).detach().isfinite().all()
        return torch.where(finite | (noted >= 0), noted, self._passes)

    # The comparison.

    def step_begins(self, optimizer: AcceleratedOptimizer) -> None:
        """Compare the ranks at every N-th step of an optimizer; raise the same error on all of them."""
        if ends_are_uneven():  # not counted either: ranks take different numbers of these steps
            return
        self._steps[optimizer] = step = self._steps.get(optimizer, 0) + 1
        if step % self.interval:
            return
        numbers, sums = self._described(optimizer)
        names = [*numbers, *sums]
        bits = torch.tensor([*numbers.values()], dtype=torch.float64).view(torch.int64).to(self._first.device)
        values = torch.cat([bits, torch.stack([*sums.values()])]) if sums else bits
        ranks, rank = self.run.num_processes, self.run.process_index
        communicator, part = self.run._communicator, self._part() if sums else (0, 1)
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
                f"{lines}\nThey were equal {self.interval} steps ago, or at the start. A smaller ACCELERATE_CHECK_EVERY "
                f"than {self.interval} finds the step; look there for code that only some ranks run."
            )
        self._first = -torch.ones_like(self._first)
        self._places.clear()
        self._outputs.clear()

    def _differences(self, names: list[str], numbers: int, values: torch.Tensor, differing: list[int]) -> str:
        """Return the first of each kind that differs, with its values and ranks. Collective: call on every rank."""
        places = [*{names[place].split()[0]: place for place in reversed(differing)}.values()][::-1]
        local_values = torch.cat([values.new_tensor([self._part()[0]]), values[places]])
        rows = self.run._communicator.all_gather(local_values).view(-1, len(local_values)).tolist()
        text = ""
        for column, place in enumerate(places, 1):
            groups: dict[int, dict[int, list[int]]] = {}
            for rank, row in enumerate(rows):
                part = row[0] if place >= numbers else 0
                groups.setdefault(part, {}).setdefault(row[column], []).append(rank)
            ranks_of_value = next(ranks for ranks in groups.values() if len(ranks) > 1)
            shown = [
                f"{value if place >= numbers else torch.tensor(value).view(torch.float64)} on rank {listed(ranks)}"
                for value, ranks in sorted(ranks_of_value.items(), key=lambda item: len(item[1]))[:LISTED]
            ]
            text += f"\n  - {names[place]}: {'; '.join(shown)}"
        return text

    def _described(self, optimizer: AcceleratedOptimizer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the compared values: numbers that are the same on all ranks, and checksums."""
        numbers, sums, gradients = {}, {}, {}
        # Without a mesh, or without replicas in it, each shard has no copy.
        ranks, sharded = self.run.num_processes, traits_of(self.run.distributed_type).sharded
        alone = self._part()[1] == ranks or (self.run.torch_device_mesh is None and sharded)
        compared, zero = ranks > 1 and not alone, torch.zeros_like(self._first)
        models = [self.run.unwrap_model(model) for model in self.run._models]
        names = {id(p): canonical_name(name) for model in models for name, p in model.named_parameters()}
        for index, group in enumerate(optimizer.param_groups):
            numbers[f"learning rate of group {index}"] = float(group["lr"])
            for place, p in enumerate(group["params"]):
                if not place:
                    numbers[f"step counter of group {index}"] = float(optimizer.state.get(p, {}).get("step", 0))
                if compared:
                    name = names.get(id(p), f"number {place} of group {index}")
                    sums[f"parameter {name!r}"] = checksum(p)
                    gradient = p.grad
                    gradients[f"gradient of {name!r}"] = zero if gradient is None else checksum(gradient)
        return numbers, sums | gradients

    def _part(self) -> tuple[int, int]:
        """Return which part of the weights this rank has, and of how many; without a mesh all is compared with all ranks."""
        sharded = traits_of(self.run.distributed_type).sharded
        mesh, part, parts = self.run.torch_device_mesh, 0, 1
        for name in () if mesh is None else mesh.mesh_dim_names:
            # Along the other dimensions ranks have the same part.
            if name == "tp" or (sharded and name != "dp_replicate"):
                part, parts = part * mesh[name].size() + mesh.get_local_rank(name), parts * mesh[name].size()
        return part, parts

    def _not_finite(self, first: int, rank: int) -> FloatingPointError:
        """Return the error for the first rank with a loss that is not finite. Collective: call on every rank."""
        place = self._places[first - self._passes] if rank == self.run.process_index else ""
        seen = [name for name, noted in self._outputs.items() if noted.item() == first]
        where = place + (f"; the first module with such an output: {seen[0]}" if seen else "")
        (where,) = self.run._communicator.broadcast_object_list([where], rank)
        hint = "" if self.modules else " Set ACCELERATE_CHECK_MODULES=true to learn in which module it began."
        return FloatingPointError(f"A loss is NaN or infinite: first on rank {rank}, in its {where}.{hint}")
