"""Methods of the Accelerator that report on a run."""

from typing import Any

from torch import nn

from accelerate.base.table import Report
from accelerate.config.enums import FP8BackendType
from accelerate.extensions.reports import memory, precision
from accelerate.extensions.reports.throughput import Meter, report


def precision_report(accelerator: Any, model: nn.Module) -> Report:
    """Return which copy of a model is in which dtype: weights, computation, gradients, reduction, optimizer.

    Gradients and optimizer state are there after the first step.

    Not a collective.

    Args:
        model: A prepared model.

    Returns:
        A report with rows, and with warnings where settings contradict each other; its text is a table.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> report = accelerator.precision_report(accelerator.prepare(torch.nn.Linear(2, 1)))
        >>> print(report)  # doctest: +SKIP
    """
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    backend = getattr(accelerator, "fp8_backend", FP8BackendType.NO)  # of an extension
    return precision.precision_report(model, accelerator._optimizers, accelerator.mixed_precision, backend, hook)


def memory_report(accelerator: Any) -> Report:
    """Return how much memory each rank's parameters, gradients and optimizer states take, and its peak.

    Collective: call on every rank.

    Returns:
        A report with a row per rank; its text is a table.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> accelerator.memory_report().rows[0].parameters
        12
    """
    prepared = accelerator._models, accelerator._optimizers
    return memory.memory_report(*prepared, accelerator.device, accelerator.gather)


def throughput(
    accelerator: Any, tokens: float | None = None, samples: float | None = None, flops: float | None = None
) -> None:
    """End a step of so many tokens and samples, for `throughput_report`. The first call starts the measurement.

    Without any number it counts no step, and the next one begins here: after an evaluation, say.

    Not a collective.

    Args:
        tokens: How many this rank has trained on since the last call.
        samples: How many this rank has trained on since the last call.
        flops: FLOPs of the model for them, forward and backward, on this rank. None: `FlopCounterMode` counts the next step
            once, which takes longer and is not measured; other steps have as many for each token (or sample).

    Raises:
        ValueError: No model was prepared yet.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for batch in torch.ones(4, 8, 4):
        ...     accelerator.backward(model(batch).sum())
        ...     optimizer.step()
        ...     accelerator.throughput(samples=8)
        >>> report = accelerator.throughput_report()
        >>> print(report)  # doctest: +SKIP
        >>> accelerator.log(report.values(), step=4)
    """
    meters = accelerator.extensions.of_kind(Meter)
    meter = meters[0] if meters else accelerator.extensions.add(Meter(accelerator))
    meter.step(tokens, samples, flops)


def throughput_report(accelerator: Any, peak_flops: float | None = None) -> Report:
    """Return each rank's rates, MFU and shares of its time since the last report, and the slow rank.

    Collective: call on every rank.

    Args:
        peak_flops: Of a device, per second; None uses a known GPU's dense bfloat16 figure.

    Returns:
        A report with a row per rank; its text is a table, `values()` a dict for `log`, `slowest` the rank or None. Other
        extensions add `sections`: the goodput of a run that measures it.

    Raises:
        RuntimeError: Some rank has measured no step; raised on all ranks.
    """
    meter = next(iter(accelerator.extensions.of_kind(Meter)), None)
    gather = accelerator._communicator.gather_object
    adding = [getattr(extension, "report_section", None) for extension in accelerator.extensions.attached]
    sections = (section() for section in adding if section is not None)
    return report(meter, gather, accelerator.process_index, peak_flops, sections)
