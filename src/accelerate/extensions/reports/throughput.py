"""Throughput: tokens and samples per second, MFU, the parts of a step's time, and the rank that the others wait for.

A clock stamps the moments at which a step enters its next part: CUDA events, read when a report is requested, or else the
host's clock. So the parts add up to the full step, and nothing is synchronised in a step.
"""

import bisect
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count, shape_wrapper

from accelerate.base.table import Report
from accelerate.config.strategies import traits_of
from accelerate.extension import Extension
from accelerate.extensions.reports import device_specs
from accelerate.extensions.reports.torch_private import (
    attention_operators,
    grouped_products,
    is_compiled_in_place,
    overload_packet,
    wrap_exchanges,
)
from accelerate.modules.unwrap import is_compiled_module
from accelerate.runtime import torch_private
from accelerate.runtime.run import Run

PARTS = ("data", "forward", "backward", "communication", "optimizer", "checkpoint", "rest")
# The part of a step that each call of the Accelerator is.
_PHASES = {
    "backward": "backward",
    "save_state": "checkpoint",
    "load_state": "checkpoint",
    "gather": "communication",
    "reduce": "communication",
}
# Parts in which a rank waits for the others; the remainder of a step is its own work.
_WAITING = ("communication", "checkpoint")
_RATES = ("tokens", "samples", "flops")
_COLUMNS = ("rank", "step", "tokens/s", "samples/s", "MFU", *PARTS, "score")
# A rank is named from this score on: so many times what chance explains, and as many times 3 % slower than the others.
NAMED = 3.0
_LEAST = 0.03
# Steps that a report is made from at most, the last ones, and stamps of a step.
_STEPS, _STAMPS = 1000, 1 << 16


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Keys and values may have fewer heads, which torch counts since 2.10; those of the queries say how often they are used.
    return sdpa_flop_count(query, (*query[:2], *key[2:]), (*query[:2], *value[2:]))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention(query, key, value)


def _grouped(first: Any, right: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    # For two matrices each group is the product of its columns and rows; a stack has a matrix for each group of rows.
    return 2 * math.prod(out_shape) * first[-1] // (out_shape[0] if len(first) == len(right) == 2 else 1)


# torch counts neither grouped products nor attention kernels of the CPU, nor recomputation in their backward passes.
COUNTED = dict.fromkeys(attention_operators("_backward"), _attention_backward)
COUNTED |= dict.fromkeys(attention_operators("_for_cpu"), _attention)
COUNTED |= dict.fromkeys(grouped_products(), _grouped)
_COUNTERS = {**flop_registry, **{operator: shape_wrapper(count) for operator, count in COUNTED.items()}}


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return how many floating-point operations an operator takes, as a dispatch mode sees its call; 0 of one that torch does not count."""
    counter = _COUNTERS.get(overload_packet(func))
    return 0 if counter is None else counter(*args, **kwargs, out_val=result)


@dataclass(frozen=True)
class ThroughputRow:
    """The measurements of one rank; nan if unknown.

    Attributes:
        step: seconds of a step, on average.
        tokens, samples, flops: per second.
        shares: of the wall time, in the order of `PARTS`; their sum is 1.
        own: seconds of the median step without communication and checkpoint, in which a rank waits for the others.
        spread: the standard error of `own`, from its median deviation.
        score: how much slower it is than the median of the others, as a multiple of the difference that chance explains.
    """

    rank: int
    step: float
    tokens: float
    samples: float
    flops: float
    mfu: float
    shares: tuple[float, ...]
    own: float
    spread: float
    score: float = math.nan

    def cells(self) -> list[str]:
        """Return the row as text."""
        rates = [(self.tokens, ",.0f"), (self.samples, ",.0f"), (self.mfu, ".1%")]
        numbers = [*rates, *((share, ".1%") for share in self.shares), (self.score, ".1f")]
        texts = ["-" if math.isnan(number) else format(number, form) for number, form in numbers]
        return [str(self.rank), f"{1000 * self.step:.1f} ms", *texts]


class Section(Protocol):
    """What another extension adds to the report, by a method `report_section` that all ranks call; `str()` prints it."""

    def values(self) -> dict[str, float]:
        """Return numbers for trackers."""


@dataclass(frozen=True)
class ThroughputReport(Report):
    """The measurements of all ranks since the last report; printed as a table.

    Attributes:
        slowest: the rank that the others wait for; None if none stands out.
        sections: of other extensions, such as the goodput of the run.
    """

    slowest: int | None = None
    sections: tuple[Section, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([super().__str__(), *map(str, self.sections)])

    def values(self) -> dict[str, float]:
        """Return numbers for trackers: rates of all ranks together, means of MFU and shares, the slowest rank (-1: none), and sections."""
        rates = {f"{name}_per_second": sum(getattr(row, name) for row in self.rows) for name in _RATES}
        shares = zip(*(row.shares for row in self.rows), strict=True)
        means = {f"share_{part}": statistics.mean(column) for part, column in zip(PARTS, shares, strict=True)}
        means |= {
            "mfu": statistics.mean(row.mfu for row in self.rows),
            "step_seconds": max(row.step for row in self.rows),
        }
        values = {**rates, **means, "slowest_rank": -1 if self.slowest is None else self.slowest}
        added = {name: number for section in self.sections for name, number in section.values().items()}
        return {f"throughput/{name}": number for name, number in values.items() if not math.isnan(number)} | added


class Meter(Extension):
    """Measures the steps of one rank from its construction on; `step` ends one, `row` reads them."""

    # A copy in another process measures nothing.
    _open: deque[tuple[str, Any]] = deque(maxlen=1)
    _stamp: Callable[[], Any] = staticmethod(time.perf_counter)

    def __init__(self, accelerator: Run) -> None:
        super().__init__(accelerator)
        if not accelerator._models:
            raise ValueError("throughput() found no prepared model to measure. Call it after `prepare`.")
        row = traits_of(accelerator.distributed_type)
        # Whether ranks wait for each other inside the passes, where waiting is not distinguished.
        self.hidden = row.steps_in_backward or (row.sharded and not accelerator.is_fsdp2)
        self.device, self._by_engine = accelerator.device, row.steps_in_backward
        if self.device.type == "cuda":
            stream, event = torch.cuda.current_stream, partial(torch.cuda.Event, enable_timing=True)
            self._stamp = lambda: stream().record_event(event())
        self._hooks = []
        for model in accelerator._models:
            # Before the strategy's own hooks, which gather parameters, and after them.
            self._hooks.append(model.register_forward_pre_hook(partial(self.enter, "forward"), prepend=True))
            self._hooks.append(model.register_forward_hook(partial(self.enter, "rest")))
            wrap_exchanges(model, lambda method: partial(self._timed, "communication", method))
        for optimizer in (getattr(outer, "optimizer", None) for outer in accelerator._optimizers):
            if isinstance(optimizer, torch.optim.Optimizer):
                self._hooks.append(optimizer.register_step_pre_hook(partial(self.enter, "optimizer")))
                self._hooks.append(optimizer.register_step_post_hook(partial(self.enter, "rest")))
        self._before: list[str] = []  # the part that continues after each open phase
        self._flops_each: float | None = None
        self._counter: FlopCounterMode | None = None
        self._open = deque(maxlen=0)  # the step before the first call is not measured
        self._steps: deque[tuple[list[tuple[str, Any]], list[float]]] = deque(maxlen=_STEPS)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (Meter,)  # hooks of a copied model refer to it, and stamps belong to this process

    def close(self) -> None:
        """Stop measuring. Not a collective."""
        for hook in self._hooks:
            hook.remove()
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None
        self.run.extensions.remove(self)

    def released(self) -> None:
        """Stop measuring."""
        self.close()

    def enter(self, part: str, *_: Any) -> None:
        """Go from one part of the step to another."""
        self._open.append((part, self._stamp()))

    def _timed(self, part: str, method: Callable, *args: Any, **kwargs: Any) -> Any:
        before = self._open[-1][0] if self._open else "rest"
        self.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            self.enter(before)

    def phase_begins(self, phase: str, loss: Any) -> None:
        """Go to the part of the step that a call of the Accelerator is."""
        if not self._by_engine and getattr(loss, "requires_grad", False):
            # The loss has a gradient first, so this comes before the strategy's own wait at the end of the pass. From there on
            # all gradients are there, and what remains is to wait for their exchange.
            last = partial(self.enter, "communication")
            loss.register_hook(lambda gradient: torch_private.execution_engine.queue_callback(last))
        self._before.append(self._open[-1][0] if self._open else "rest")
        self.enter(_PHASES[phase])

    def phase_ends(self, phase: str) -> None:
        """Go back to the part before; after a backward pass without an exchange another micro-batch follows."""
        self.enter(self._before.pop())
        if phase == "backward":
            self.enter("rest" if self.run.sync_gradients else "data")

    def step(self, *numbers: float | None) -> None:
        """End a step of so many tokens, samples and FLOPs, or begin again where all are None."""
        tokens, samples, flops = numbers
        has_numbers, items = numbers != (None, None, None), tokens or samples or 1
        # Bounded, for a loop that calls this no more.
        stamps, self._open = self._open, deque(maxlen=_STAMPS)
        self.enter("data")
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self._flops_each = counter.get_total_flops() / items or math.nan if has_numbers else None
        elif has_numbers and stamps:
            work = (self._flops_each or math.nan) * items if flops is None else flops
            counts = [math.nan if number is None else number for number in (tokens, samples, work)]
            self._steps.append(([*stamps, self._open[0]], counts))
        if flops is None and self._flops_each is None:
            # torch.compile runs uncompiled, or not at all, under a mode that looks at each operation.
            modules = [module for model in self.run._models for module in model.modules()]
            if any(is_compiled_module(module) or is_compiled_in_place(module) for module in modules):
                self._flops_each = math.nan
            else:
                self._counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
                self._counter.__enter__()

    def row(self, rank: int, peak: float) -> ThroughputRow | None:
        """Return the measurements since the last call; None without a step."""
        if not self._steps:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        totals, busy = dict.fromkeys(PARTS, 0.0), []
        for stamps, _ in self._steps:
            busy.append(0.0)
            for (part, start), (_, end) in pairwise(stamps):
                seconds = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
                totals[part] += seconds
                busy[-1] += 0.0 if part in _WAITING else seconds
        wall, middle = sum(totals.values()), statistics.median(busy)
        # For a normal distribution, the median has 1.25 and the median deviation 1.48 times the usual error.
        spread = 1.25 * 1.48 * statistics.median(abs(step - middle) for step in busy) / len(busy) ** 0.5
        rates = [sum(numbers) / wall for numbers in zip(*(counts for _, counts in self._steps), strict=True)]
        shares = tuple(total / wall for total in totals.values())
        self._steps.clear()
        return ThroughputRow(rank, wall / len(busy), *rates, rates[2] / peak, shares, middle, spread)


def scored(rows: Sequence[ThroughputRow]) -> list[ThroughputRow]:
    """Return the rows with their scores."""
    chance = statistics.median(row.spread for row in rows)
    ordered = sorted(row.own for row in rows)
    others = [_median_of_others(ordered, row.own) for row in rows]
    return [
        replace(row, score=(row.own - other) / max(_LEAST * other, chance))
        for row, other in zip(rows, others, strict=True)
    ]


def _median_of_others(ordered: Sequence[float], number_left_out: float) -> float:
    """Return the median of numbers in order without one of them; that number if it is the only one."""
    place, count = bisect.bisect_left(ordered, number_left_out), len(ordered) - 1
    middle = [number + (number >= place) for number in ((count - 1) // 2, count // 2)]
    return sum(ordered[number] for number in middle) / 2 if count else number_left_out


def report(
    meter: Meter | None,
    gather: Callable[[Any], list[Any]],
    rank: int,
    peak_flops: float | None,
    sections: Iterable[Section] = (),
) -> ThroughputReport:
    """Return all ranks' measurements since the last report; RuntimeError on all if one measured nothing.

    Collective: call on every rank.
    """
    cuda = meter is not None and meter.device.type == "cuda"
    table_flops = device_specs.peak_flops(torch.cuda.get_device_name(meter.device)) if cuda else None
    peak = peak_flops or table_flops or math.nan
    rows = gather(None if meter is None else meter.row(rank, peak))
    if meter is None or None in rows:
        raise RuntimeError(
            f"throughput_report() found no measured step on rank(s) {[n for n, row in enumerate(rows) if row is None]}. Call "
            "accelerator.throughput(tokens=...) at the end of each step: the first call starts the measurement, and the step after it "
            "counts FLOPs where none are given."
        )
    rows, slowest = rows if meter.hidden else scored(rows), None
    notes = [f"no rank stands out, with a score of {NAMED:.0f} or more."]
    if meter.hidden:
        notes = ["score: here the ranks wait for each other inside forward and backward, so none stands out."]
    elif (first := max(rows, key=lambda row: row.score)).score >= NAMED:
        slowest = first.rank
        notes = [f"rank {slowest} is slow: the others wait for it in communication."]
    if math.isnan(rows[0].flops):
        notes.append("MFU: FLOPs were not counted, because the model is compiled or none were seen; pass flops=.")
    elif math.isnan(peak):
        notes.append("MFU: the peak FLOPS of this device are not known; pass peak_flops=.")
    title = f"Throughput, by {'CUDA events' if cuda else 'the clock of the host'}"
    return ThroughputReport(title, _COLUMNS, tuple(rows), tuple(notes), slowest=slowest, sections=tuple(sections))
