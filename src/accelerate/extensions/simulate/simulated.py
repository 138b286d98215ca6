"""Whether this process plays one rank of a simulated run (`accelerate launch --simulate`); such a run writes no checkpoints."""

from dataclasses import dataclass, field

import torch.distributed as dist

from accelerate.extensions.simulate.torch_private import join_alone
from accelerate.runtime.ranks import Ranks

# The counters in the store by which ranks wait for each other; see `checkpoint.ranks` and `extensions.hang`.
_COUNTERS = ("arrived", "come", "left")


@dataclass(frozen=True)
class Written:
    """A checkpoint that a rank would have written: the bytes of each of its files."""

    location: str
    files: dict[str, int]


@dataclass
class SimulatedRun:
    """A simulated run in which this process plays one rank, and its checkpoints.

    Attributes:
        store: of the process group, which keeps no reference to it.
        loads: the checkpoints that would have been read.
        notes: invented values, in sentences; each is printed once.
        warnings: warnings during the run, such as of settings without effect.
    """

    ranks: Ranks
    store: dist.Store
    saves: list[Written] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)


_current: SimulatedRun | None = None


def current() -> SimulatedRun | None:
    """Return the simulated run of this process; None in a run whose ranks exist. Not a collective."""
    return _current


def start(ranks: Ranks) -> SimulatedRun:
    """Join a process group whose other ranks are made up."""
    global _current
    store = OthersCame(ranks.world_size)
    join_alone(ranks.rank, ranks.world_size, store)
    _current = SimulatedRun(ranks, store)
    return _current


def end() -> None:
    """Leave the process group of a simulated run."""
    global _current
    dist.destroy_process_group()
    _current = None


class OthersCame(dist.Store):
    """A key-value store in which all other ranks have added themselves to a counter of ranks before this one does."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._values, self._others = dist.HashStore(), world_size - 1

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        if key.endswith(_COUNTERS) and amount:
            amount += self.others(key)
        return self._values.add(key, amount)

    def others(self, key: str) -> int:
        """Return what the others have added to a counter since this rank last did."""
        return self._others


def _forwarded(name: str) -> None:
    def forward(self: OthersCame, *arguments: object) -> object:
        return getattr(self._values, name)(*arguments)

    forward.__name__, forward.__doc__ = name, f"Do what `{name}` of a store in this process does."
    setattr(OthersCame, name, forward)


for _name in ("set", "get", "check", "wait", "compare_set", "delete_key", "multi_get", "multi_set", "append"):
    _forwarded(_name)
