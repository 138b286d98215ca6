"""The accumulation step that is open: a record that each Accelerator has."""

from dataclasses import dataclass


@dataclass
class Window:
    """The accumulation step that is open.

    Attributes:
        micro_batches: How many have begun since the last optimizer step.
        done: Whether the current one is its last, so that the next begins a new accumulation step.
        inside: Whether an ``accumulate`` context is open.
        counted: Micro-batches that came with ``num_items``.
        items: Sum of their ``num_items`` on this rank.
        reference: What weights are kept relative to, so that they stay near one.
        usual: Items of a rank in the accumulation step before, on the average over the ranks; 0 before the first.
        factor: What the loss of the current micro-batch is multiplied by; None stands for 1/N.
        warned: Whether the note about short accumulation steps was given.
        joining: Whether ranks may run out of batches, and end accumulation steps at different times.
        held: Sharded models whose whole gradients a strategy keeps beside the shards, where nothing can be rescaled, by id.
    """

    micro_batches: int = 0
    done: bool = False
    inside: bool = False
    counted: int = 0
    items: float = 0.0
    reference: float = 0.0
    usual: float = 0.0
    factor: float | None = None
    warned: bool = False
    joining: bool = False
    held: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Count a micro-batch, as the first of a new accumulation step if the last one is done."""
        if self.done:
            self.micro_batches = self.counted = 0
            self.items = self.reference = 0.0
            self.done = False
        self.micro_batches += 1
        self.factor = None
