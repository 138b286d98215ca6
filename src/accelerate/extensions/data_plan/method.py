"""The method of the Accelerator."""

from __future__ import annotations

from typing import Any

from accelerate.data.loader import PreparedLoader
from accelerate.data.reading import Reading
from accelerate.extensions.data_plan import counting
from accelerate.extensions.data_plan.plan import DataPlan
from accelerate.runtime.run import Run


def data_plan(run: Run, loader: Any) -> DataPlan:
    """Return who reads what of a prepared loader: shards, samples, batches, duplicates.

    Not a collective.

    Args:
        loader: A prepared data loader.

    Returns:
        A `DataPlan`; `str()` of it is a table. Numbers that are not known beforehand are None.

    Raises:
        TypeError: The loader was not prepared.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator()
        >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_size=4))
        >>> plan = accelerator.data_plan(loader)
        >>> plan.samples, plan.own.batches, plan.reading
        (10, 3, 'own shard by index')
        >>> print(plan)
        data     map-style, 10 samples
        read     own shard by index
        order    SequentialSampler
        epoch    10 samples, 0 duplicates, 0 dropped
        batch    4 per process, 4 in total
        workers  0 per process
        shard  ranks  samples  duplicates  batches  reads
        0      0      10       0           3        100%
    """
    return plan_of(loader)


def plan_of(loader: Any) -> DataPlan:
    """Return the plan of a prepared loader, or of a view of one; TypeError if it was not prepared."""
    # By the real type, because prepared loaders pass as the loader they wrap.
    if not issubclass(type(loader), PreparedLoader) or not isinstance(loader._reading, Reading):
        raise TypeError(
            f"loader is a {type(loader).__name__} that was not prepared, so nothing was planned for it. Pass what "
            "accelerator.prepare(loader) returned."
        )
    return counting.plan(loader._reading)
