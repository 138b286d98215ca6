"""Which ranks read what is the same on all of them, the whole models and optimizers of replicas, and how the others get it.

Where a network is faster than the disk, a rank that reads for others broadcasts from its own tensors once they have their values; the
others open none of those files. ``ACCELERATE_CHECKPOINT_READERS`` chooses: ``all`` ranks read, ``one_per_node``, or ``one``.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate import comm
from accelerate.checkpoint import formats, load, manifest
from accelerate.checkpoint.load import Contents
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.state import inner_optimizer
from accelerate.training.prepared import Facade

logger = logging.getLogger(__name__)

VARIABLE = "ACCELERATE_CHECKPOINT_READERS"
CHOICES = ("all", "one_per_node", "one")
# File systems that machines share, as Linux names them; and how many bytes make a broadcast worth its while there.
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "fuse.", "9p", "wekafs")
_WORTH = 1 << 30


def wished() -> str | None:
    """Return the value of the variable, None without it; ValueError for another one."""
    value = os.environ.get(VARIABLE) or None
    if value not in (None, *CHOICES):
        raise ValueError(f"{VARIABLE}={value!r} is none of {', '.join(CHOICES)}. Set one of these, or leave it out.")
    return value


def usual(folder: str, listing: Manifest | None, machines: int) -> str:
    """Return who reads by default: one rank where several machines would read a large checkpoint from a file system that they share."""
    if machines < 2 or listing is None or sum(entry.size for entry in listing.files.values()) < _WORTH:
        return "all"
    return "one" if _file_system(folder).startswith(_NETWORK) else "all"


def _file_system(folder: str) -> str:
    """Return the type of the file system that a folder lies in, where the system says so; else an empty text."""
    best = ("", "")
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, kind = line.split(" ")[1:3]
            place = place.encode().decode("unicode_escape")  # spaces are written as \\040
            if f"{os.path.realpath(folder)}/".startswith(f"{place.rstrip('/')}/") and len(place) >= len(best[0]):
                best = (place, kind)
    return best[1]


def _obstacle(accelerator: Facade, listing: Manifest | None, options: dict[str, Any]) -> str:
    """Return why each rank has to read for itself, the same on all of them; an empty text if none has to."""
    layout = accelerator.parallelism_config
    if not accelerator._backend.replicates or (layout is not None and layout.total_size != layout.dp_replicate_size):
        return f"ranks of the strategy {accelerator._backend.name!r} do not have the same whole weights"
    if listing is None or any(
        "/" in name and not name.startswith(f"{manifest.PARTS_FOLDER}/") for name in listing.files
    ):
        return "the checkpoint has no manifest, or shards"
    if accelerator._load_model_state_pre_hook or any(options.values()):
        return "hooks or options of load_state decide what is read"
    models = [accelerator._backend.unwrap_model(model, keep_torch_compile=False) for model in accelerator._models]
    if any(weight.is_meta for model in models for weight in model.parameters()):
        return "some weights are not in memory"
    if not all(map(load.loads_by_name, models)) or not all(
        load.uses_torch_load(inner_optimizer(optimizer)) for optimizer in accelerator._optimizers
    ):
        return "a model or an optimizer has its own way of loading"
    return ""


@dataclass(eq=False)
class Readers:
    """One rank of a group that loads together.

    Attributes:
        reads: whether this rank reads models and optimizers.
        source: the rank that does so for it.
        group: the ranks that it gives them to; None for all.
    """

    reads: bool = True
    source: int = 0
    group: Any = None
    _outline: Any = None

    @classmethod
    def chosen(
        cls, accelerator: Facade, choice: str, listing: Manifest | None, options: dict[str, Any]
    ) -> "Readers | None":
        """Return the readers of a choice, None if every rank reads for itself. All ranks."""
        rank, local = accelerator.process_index, accelerator.local_process_index
        count = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
        obstacle = "" if choice == "all" else _obstacle(accelerator, listing, options)
        # Machines may have different numbers of ranks, and then some would read and others wait.
        if choice == "one_per_node" and not (
            comm.current().is_same(count) and count and accelerator.num_processes % count == 0
        ):
            obstacle = "the launcher did not number the ranks machine by machine"
        if choice == "all" or obstacle or accelerator.num_processes == 1:
            if obstacle and rank == 0 and wished() is not None:
                logger.warning("%s=%s has no effect: %s, so every rank reads.", VARIABLE, choice, obstacle)
            return None
        if rank == 0:
            logger.info("Readers of models and optimizers: %s.", choice)
        if choice == "one" or count == accelerator.num_processes:
            return cls(rank == 0)
        first = rank - local
        return cls(rank == first, first, comm.group_of(range(first, first + count)))

    def outline(self, contents: Contents) -> None:
        """Give all ranks of the group the names and shapes of what one has read; RuntimeError where they do not fit. All ranks."""
        said: list[Any] = [None]
        if self.reads:
            said = [formats.rebuilt([[s for _, s in contents.models], [o[1:] for o in contents.optimizers]], _bare)]
        dist.broadcast_object_list(said, self.source, group=self.group)
        self._outline = said[0]

    def fit(self, accelerator: Facade, contents: Contents) -> None:
        """Let models and optimizers of a rank that has read nothing take what is broadcast. Any rank, alone."""
        models, optimizers = self._outline
        for model, state in zip(accelerator._models, models, strict=True):
            model = accelerator._backend.unwrap_model(model, keep_torch_compile=False)
            own = model.state_dict()
            wrong = [
                f"{name} has {tuple(value.shape)} in the file and {tuple(own[name].shape) if name in own else 'no place'} in the model"
                for name, value in state.items()
                if name not in own or own[name].shape != value.shape
            ]
            load.refuse_misfit(contents.folder, type(model).__name__, wrong)
        if not self.reads:
            for optimizer, (state, file) in zip(accelerator._optimizers, optimizers, strict=True):
                device = next((p.device for g in optimizer.param_groups for p in g["params"]), accelerator.device)
                contents.optimizers.append((optimizer, formats.rebuilt(state, partial(_empty, device=device)), file))

    def broadcast(self, accelerator: Facade) -> None:
        """Give all ranks of the group the values that one of them has. All ranks."""
        models = self._outline[0]
        tensors: list[torch.Tensor] = []
        for model, state in zip(accelerator._models, models, strict=True):
            own = accelerator._backend.unwrap_model(model, keep_torch_compile=False).state_dict()
            tensors += [own[name] for name in state]
        for optimizer in accelerator._optimizers:
            inner = inner_optimizer(optimizer)
            for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
                values = inner.state.get(parameter, {})
                tensors += [values[name] for name in sorted(values) if isinstance(values[name], torch.Tensor)]
        on_host = "cpu:" in str(dist.get_backend_config(self.group))
        for tensor in tensors:
            travels = on_host or tensor.device.type != "cpu"
            carried = (tensor.detach() if travels else tensor.detach().to(accelerator.device)).contiguous()
            dist.broadcast(carried.reshape(-1).view(torch.uint8), self.source, group=self.group)
            if carried.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(carried)


def _bare(value: Any) -> Any:
    """Return a tensor without its values; other values as they are."""
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _empty(value: Any, device: torch.device) -> Any:
    """Return memory for a tensor without values, where an optimizer keeps it: counts of steps stay on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device=device if value.dim() else "cpu")
