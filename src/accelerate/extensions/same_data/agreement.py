"""Comparison of what ranks read: orders or datasets that differ between them lose samples, without an error.

Once per loader and epoch, a rank leaves a small message in the key-value store of the process group, next to its first batch. Each
rank compares its message with the first one. All ranks read the outcome before the second batch. Nothing here is a collective: a loop
that only some ranks run ends as it would without the comparison.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from accelerate.base._warn import outside, warn_user
from accelerate.data import adapter, reading
from accelerate.data.loader import PreparedLoader
from accelerate.extension import Extension
from accelerate.extensions.same_data import contents, splitting
from accelerate.runtime import torch_private

# How long a rank waits for the messages of others, before its second batch. Loaders that only some ranks read cost this once.
PATIENCE_S = 5.0
_LONGEST_PAUSE_S = 0.05

_REMEDY = (
    "Draw the order and every random split from the same seed on all ranks: pass seed= or a torch.Generator with a fixed seed, and "
    "sort what comes from a set. If each rank has its own part already, pass DataLoaderConfiguration(already_sharded=True)."
)
_prepared_at: Counter[str] = Counter()
_read_by_some: set[str] = set()  # lines whose loaders not all ranks read

Facts = dict[str, Any]
_END = object()


class SameData(Extension):
    """Compares what the ranks read through each prepared loader that is divided among them."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._agreements: weakref.WeakKeyDictionary[PreparedLoader, Agreement] = weakref.WeakKeyDictionary()

    def registered(self, kind: str, prepared: Any, evaluation: bool) -> None:
        """Begin to compare a loader, unless each rank reads its own part, or what is dispatched has no table."""
        way = getattr(prepared, "_reading", None)
        if not isinstance(way, reading.Reading) or way.shards == 1 or isinstance(way, reading.AlreadySplit):
            return
        dataset, dispatched = way.loader.dataset, isinstance(way, reading.Dispatched)
        if adapter.is_stream(way.loader):
            splitting.warn_of_double_division(dataset)
        if not dispatched or contents.tables(dataset):
            self._agreements[prepared] = Agreement(dataset, isinstance(way, reading.OwnShard), not dispatched)

    def first_batches(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches until the ranks are compared."""
        agreement = self._agreements.get(loader if loader._origin is None else loader._origin)
        if agreement is None:
            return iter(())
        return agreement.compared(batches, loader.iteration, lambda: _drawn_order(loader))


def _drawn_order(loader: PreparedLoader) -> tuple[str | None, int | None]:
    """Return a digest of the undivided order, and the samples in it, of the epoch that runs."""
    base = loader.base_dataloader
    return contents.digest(getattr(adapter.part_of(base), "order_head", ())), adapter.samples_per_epoch(base)


def _user_lines(most: int = 4) -> list[str]:
    """Return the lines outside this package that run now, innermost first, each as file name and number."""
    frame, lines = outside()[1], []
    while frame is not None and len(lines) < most:
        lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return lines


class Agreement:
    """Compares what the ranks read through one loader; the views of `skip_first_batches` share it.

    Args:
        dataset: the data of all ranks, undivided.
        decided: the data has indices, and each rank reads those that the order gives it.
        read_by_all: each rank reads the stream; else the main process reads for all.
    """

    def __init__(self, dataset: Any, decided: bool, read_by_all: bool) -> None:
        # By the lines, because some ranks may prepare loaders that others do not, also by a function that all ranks call.
        lines = _user_lines()
        self.line, place = lines[0], "<".join(lines)
        self.name = f"{place}#{_prepared_at[place]}"
        _prepared_at[place] += 1
        self.dataset, self.decided, self.read_by_all = dataset, decided, read_by_all
        self.epoch, self.begun, self.former = -1, 0, ""
        self.warned = False
        self.arrangements = contents.Arrangements(dataset)
        self.tables: list[tuple[int, contents.Arrangement | None]] | None = None  # read once

    def compared(self, batches: Iterator[Any], epoch: int, order: Callable[[], tuple[Any, Any]]) -> Iterator[Any]:
        """Yield the first batches of an epoch, until the ranks are compared; RuntimeError if their orders or datasets differ.

        Args:
            batches: the batches of this rank.
            epoch: number of the epoch.
            order: returns a digest of the undivided order and its length, once the first batch is read.
        """
        store = _store()
        if store is None:
            return
        first = next(batches, _END)
        key = self._publish(store, epoch, self._facts(*order()))
        if first is not _END:
            yield first
        settled, due = self._settle(store, key, 0.0 if self.line in _read_by_some else PATIENCE_S), 2
        if not settled:
            _read_by_some.add(self.line)
            for number, batch in enumerate(batches, 2):
                yield batch
                if number == due:
                    settled, due = self._settle(store, key), 2 * due
                    if settled:
                        return
            self._settle(store, key)

    def _facts(self, order: str | None, length: int | None) -> Facts:
        """Return what this rank reads, in a form that is compared with another rank's."""
        if self.tables is None:
            self.tables = [contents.probe(table) for table in contents.tables(self.dataset)]
        facts: Facts = {"rank": dist.get_rank(), "tables": self.tables, "dispatched": not self.read_by_all}
        if self.read_by_all:
            facts["order" if self.decided else "stream"] = order
            facts["shuffles"] = None if self.decided else contents.shuffles(self.dataset)
            facts["arrangements"] = self.arrangements.describe()
        if self.decided:
            facts["samples"], facts["length"] = _length(self.dataset), length
        return facts

    def _publish(self, store: Any, epoch: int, facts: Facts) -> str:
        """Compare with the rank that came first; return the key of this epoch."""
        self.begun = self.begun + 1 if epoch == self.epoch else 1
        self.epoch = epoch
        key = f"{self.name}/{epoch}.{self.begun}"
        text = json.dumps(facts)
        with suppress(dist.DistError):  # the process that serves the store may have ended
            first = store.compare_set(f"{key}/first", "", text).decode()
            if first != text and (problem := difference(json.loads(first), json.loads(text))):
                raises, reason = problem
                outcome = json.dumps({"raises": raises, "text": reason})
                if raises:
                    store.set(f"{key}/outcome", outcome)
                store.compare_set(f"{key}/warning", "", outcome)
            if store.add(f"{key}/come", 1) == dist.get_world_size():
                store.compare_set(f"{key}/outcome", "", store.compare_set(f"{key}/warning", "", "null").decode())
                if self.former:  # all ranks have left that epoch
                    for name in ("first", "come", "warning", "outcome"):
                        store.delete_key(f"{self.former}/{name}")
        self.former = key
        return key

    def _settle(self, store: Any, key: str, patience: float = 0.0) -> bool:
        """Return whether the outcome is known or will not be, within a time; raise or warn if it says that ranks differ."""
        end, pause, name = time.monotonic() + patience, 0.0005, f"{key}/outcome"
        try:
            while not store.check([name]):
                if time.monotonic() >= end:
                    return False
                time.sleep(pause)  # not `wait`, which would keep the store from the process's other threads
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            outcome = json.loads(store.get(name))
        except dist.DistError:
            return True
        if outcome is not None:
            message = f"Ranks read different data from the loader prepared at {self.line}: {outcome['text']}"
            if outcome["raises"]:
                raise RuntimeError(message)
            if not self.warned:
                self.warned = True
                warn_user(message)
        return True


def difference(first: Facts, own: Facts) -> tuple[bool, str] | None:
    """Return whether a difference between two ranks is an error, and its text; None if they read the same."""
    if {**first, "rank": own["rank"]} == own:
        return None
    first, own = sorted((first, own), key=lambda facts: facts["rank"])
    ranks = f"rank {first['rank']} and rank {own['rank']}"
    problems = [*_differences(first, own, ranks)]
    problem = next((each for each in problems if each[0]), next(iter(problems), None))
    return None if problem is None else (problem[0], f"{problem[1]} {_REMEDY}")


def _differences(first: Facts, own: Facts, ranks: str) -> Iterator[tuple[bool, str]]:
    def differ(name: str) -> bool:
        return None not in (first.get(name), own.get(name)) and first[name] != own[name]

    for name, kind in (("samples", "dataset"), ("length", "sampler")):
        if differ(name):
            yield (
                True,
                f"the length of the {kind} is {first[name]} on rank {first['rank']}, but {own[name]} on rank {own['rank']}.",
            )
    if differ("order"):
        yield True, f"{ranks} draw different orders, so samples would be read twice or never."
    if differ("shuffles"):
        yield True, f"{ranks} shuffle the stream with different seeds, so samples would be read twice or never."
    for one, other in zip(first.get("arrangements", ()), own.get("arrangements", ()), strict=False):
        yield from _difference_of(contents.Arrangement(*one), contents.Arrangement(*other), ranks)
    if differ("stream"):
        yield (
            False,
            f"the stream begins with different samples on {ranks}. If its order differs, samples are read twice or never.",
        )
    for (length, rows), (own_length, own_rows) in zip(first["tables"], own["tables"], strict=False):
        if length == own_length and rows and own_rows:
            for raises, text in _difference_of(contents.Arrangement(*rows), contents.Arrangement(*own_rows), ranks):
                if not first.get("dispatched"):
                    yield raises, text
                elif rows[2] is None or rows[2] != own_rows[2]:  # the order is the main process's
                    yield False, text


def _difference_of(first: contents.Arrangement, own: contents.Arrangement, ranks: str) -> Iterator[tuple[bool, str]]:
    if first.name != own.name or (first.order, first.items) == (own.order, own.items):
        return
    decides, name = first.decides and own.decides, own.name
    if first.items == own.items is not None:
        yield decides, f"{name} has a different order on {ranks}, so samples would be read twice or never."
    elif first.sketch and own.sketch and set(first.sketch).isdisjoint(own.sketch):
        yield (
            False,
            f"{name} holds different values on {ranks}, and each rank reads a part of these: samples are lost.",
        )
    elif first.sketch and own.sketch:
        yield decides, f"{name} was drawn differently on {ranks}, so samples would be read twice or never."
    elif decides or first.items is None:
        # Only of numbers, such as the indices of a subset, it is certain that they decide the order.
        certain = decides and first.items is None
        yield certain, f"{name} is different on {ranks}, so samples may be read twice or never."


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _store() -> Any | None:
    """Return the store of the process group; None if there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.PrefixStore("accelerate/data", torch_private.default_store())
