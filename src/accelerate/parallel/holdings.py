"""Which ranks of a pipeline have which of a model's parameters and buffers."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate import comm


@dataclass(frozen=True)
class Holdings:
    """Which ranks of a pipeline have which parameters and buffers, by the names of the user's model.

    Attributes:
        tensors: Of the whole model, each once, on the meta device.
        holders: Places in the pipeline that have each of them, in order.
        place: This rank's place in the pipeline.
        ranks: The ranks of this pipeline, and their process group.
        ties: Groups of names that mean one parameter.
        elsewhere: Names in the whole model's state that this rank's part does not have.
    """

    tensors: Mapping[str, torch.Tensor]
    holders: Mapping[str, tuple[int, ...]]
    place: int
    ranks: Sequence[int]
    group: Any
    ties: list[list[str]]
    elsewhere: frozenset[str]

    @functools.cached_property
    def repeated(self) -> list[str]:
        """The names of what this rank has and an earlier one, too."""
        return [name for name, places in self.holders.items() if self.place in places[1:]]

    def make_groups(self) -> dict[str, Any]:
        """Return the process group of each tensor that this rank and others of its pipeline have. The ranks that have it."""
        shared = sorted({places for places in self.holders.values() if len(places) > 1 and self.place in places})
        # One group a set of places, whatever the number of pipelines: no rank waits for those of another one.
        made = {
            places: self.group if len(places) == len(self.ranks) else comm.group_of([self.ranks[at] for at in places])
            for places in shared
        }
        return {name: made[places] for name, places in self.holders.items() if places in made}

    def shared(self, part: nn.Module, groups: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, int, Any]]:
        """Yield the trainable parameters of this rank's part that others have, too: each with their number and their group."""
        own = dict(part.named_parameters())
        for name, group in groups.items():
            if name in own and own[name].requires_grad:
                yield own[name], len(self.holders[name]), group
