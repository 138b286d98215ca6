"""The accumulation step that is open: a record that each Accelerator has."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field


def power_of_two_above(number: float) -> float:
    """Return the smallest power of two above a number; 0 for 0.

    Weights relative to a power of two differ from other such weights in their exponents only. So a resumed run, which does not know
    the accumulation step before, rounds gradients as the run that was not interrupted.
    """
    return 2.0 ** math.frexp(number)[1] if number else 0.0


@dataclass
class ItemMean:
    """The mean over the items (tokens, say) of an accumulation step, over all its micro-batches and all ranks.

    The number of all items is known with the last micro-batch only. Until then, losses are weighed relative to `reference`, which keeps
    gradients in the range of float16; `close` returns what takes its place.

    Attributes:
        counted: Micro-batches of the accumulation step that came with a count.
        items: Sum of their counts on this rank.
        reference: The count that weighs one while the step is open; 0 until a micro-batch has items.
        usual: Items of a rank in the accumulation step before, on the average over the ranks; 0 before the first.
    """

    counted: int = 0
    items: float = 0.0
    reference: float = 0.0
    usual: float = 0.0

    def begin(self) -> None:
        """Begin a new accumulation step."""
        self.counted = 0
        self.items = self.reference = 0.0

    def open(self, count: float, expected: Callable[[], float] | None) -> float:
        """Return the weight of a micro-batch in a step that stays open.

        Args:
            count: The items of the micro-batch.
            expected: Returns how many items a rank will have in the first step, where all ranks need the same reference. None where the
                first count of a rank is its reference.
        """
        if not self.reference:
            if expected is None:
                self.reference = count
            else:
                self.usual = self.usual or expected()
                self.reference = power_of_two_above(self.usual)
        return count / self.reference if self.reference else 0.0

    def close(self, total: float, replicas: int) -> float:
        """Return the weight of one item, now that their number is known.

        Args:
            total: All items of the step, over all ranks.
            replicas: Over how many gradients the strategy averages; the mean over items needs their sum.
        """
        if total == 0:
            raise ValueError(
                "num_items is 0 on every rank in every micro-batch of this accumulation step: no loss to average."
            )
        self.usual = total / replicas
        return replicas / total


@dataclass
class Window:
    """The accumulation step that is open.

    Attributes:
        micro_batches: How many have begun since the last optimizer step.
        done: Whether the current one is its last, so that the next begins a new accumulation step.
        inside: Whether an ``accumulate`` context is open.
        factor: What the loss of the current micro-batch is multiplied by; None stands for 1/N.
        items: The mean over items, where micro-batches come with ``num_items``.
        warned: Whether the note about short accumulation steps was given.
        held: Sharded models whose unsharded gradients a strategy keeps next to the shards, where nothing can be rescaled, by id.
    """

    micro_batches: int = 0
    done: bool = False
    inside: bool = False
    factor: float | None = None
    items: ItemMean = field(default_factory=ItemMean)
    warned: bool = False
    held: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Count a micro-batch, as the first of a new accumulation step if the last one is done."""
        if self.done:
            self.micro_batches = 0
            self.done = False
            if self.items.counted:
                self.items.begin()
        self.micro_batches += 1
        self.factor = None
