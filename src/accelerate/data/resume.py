"""The position of a loader, in a form that can be saved and found again.

It holds the epoch, the batches and samples consumed, and what drew the order of the epoch that is running; so a restored
loader draws the same order again, whatever else has used the random generators in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from accelerate.base._warn import warn_user
from accelerate.data import adapter, generators, samplers, stateful
from accelerate.data.adapter import DataLoaderAdapter, DataLoaderStateMixin, is_stateful, is_stream, skipping
from accelerate.data.iterable import has_buffer
from accelerate.data.plan import DataPlan
from accelerate.data.progress import Pending, Progress
from accelerate.data.samplers import Part, ReplayableRandomSampler, SeedableRandomSampler
from accelerate.runtime import storage
from accelerate.state import GradientState

logger = logging.getLogger(__name__)

KEY = "accelerate_position"


class ResumableLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that has a position in its epoch, which can be saved and restored; how it gets its batches is left open."""

    # Who reads what, worked out when the loader was prepared.
    plan: DataPlan | None = None
    # Whether an epoch that was running when a checkpoint was saved goes on by itself after that is loaded.
    continue_after_load = True

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()
        self._progress = Progress(epoch=iteration)
        self._origin: ResumableLoader | None = None  # of a view that `skip_first_batches` made
        ReplayableRandomSampler.adopt(self.get_sampler())

    def _parts(self) -> int:
        """In how many parts ranks read, where the wrapped loader knows of its own alone; 1 where its shard knows of all."""
        if self.plan is None or isinstance(adapter.sharding(self.base_dataloader), Part):
            return 1
        return len(self.plan.shards) if self.plan.uneven else self.plan.parts

    def _batches_per_step(self) -> int:
        return super()._batches_per_step() * self._parts()

    def _reads_per_step(self) -> int:
        """Batches of the wrapped loader that this process reads for one step."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position and order as of the batch yielded last, of this process.

        JSON can hold it, but for what a dataset or its sampler says of itself. A stateful loader's state is around it.
        """
        noted, pending = (self._progress.noted or {}).get(self._progress.batches + 1), self._progress.pending
        if pending is not None and pending.loader_state is not None:
            state = pending.loader_state
        elif noted is not None and noted.loader is not None:
            state = noted.loader
        else:
            state = super().state_dict() if is_stateful(self.base_dataloader) else {}
        position = capture(self)
        # What a dataset says of itself stays as it is.
        own = {"dataset_state": position.pop("dataset_state")} if "dataset_state" in position else {}
        return {**state, KEY: generators.plain_states(position) | own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration yield the batches that were still to come in `state_dict`."""
        state = dict(state_dict)
        position = state.pop(KEY, None)
        if position is None and not is_stateful(self.base_dataloader):
            raise ValueError(
                f"state_dict has no {KEY!r} entry (its keys: {sorted(state)}), so it is the state of a stateful "
                "loader. Prepare this loader with use_stateful_dataloader=True to load it."
            )
        continues = self._continues_by_itself(state)
        if position is None and not continues:
            position = self._position_of(state)
        # A caller of this function wants to continue there, whether or not the loader was being iterated.
        batches = 0 if position is None else restore(self, {**position, "running": True})
        # At the beginning of an epoch only a dataset with a state of its own has something to restore; loading the
        # rest would make the wrapped loader run through the finished epoch's order once more.
        # Nor does the state fit that counts the batches of another number of processes, or of a loader without its first ones.
        if position is not None:
            has_place = batches > 0 or stateful.holds_dataset_state(state)
            fits = stateful.batches_read(state) in (None, batches * self._reads_per_step())
            continues = continues and has_place and fits
        if continues:
            super().load_state_dict(state)
        if is_stateful(self.base_dataloader) and self._progress.pending is not None:
            self._progress.pending = replace(self._progress.pending, loader_state=state, loader_continues=continues)

    def _continues_by_itself(self, state: dict[str, Any]) -> bool:
        """Whether the wrapped loader, given `state`, continues there with no sample lost."""
        base = self.base_dataloader
        if not is_stateful(base) or has_buffer(base.dataset):
            return False
        return not is_stream(base) or stateful.restores_stream(state)

    def _position_of(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return the position in a stream that a state of torchdata's loader has; None at the beginning of an epoch."""
        steps = (stateful.batches_read(state) or 0) // self._reads_per_step()
        return {**capture(self), "batches": steps, "samples": None} if steps else None

    def _left_out(self) -> int:
        """Number of steps that this loader leaves out at the beginning of every iteration."""
        _, skipped = samplers.unskipped(adapter.batching_sampler(self.base_dataloader))
        return self.skip_batches + skipped // self._reads_per_step()

    def _skipping(self, number: int) -> ResumableLoader:
        """A view that leaves out the first batches and shares the epoch with this loader."""
        view = object.__new__(type(self))
        vars(view).update(vars(self), _origin=self if self._origin is None else self._origin)
        if is_stream(self):
            view.skip_batches = self.skip_batches + number
        else:
            view.base_dataloader = skipping(self.base_dataloader, number * self._reads_per_step())
        return view


def shuffling_generator(loader: ResumableLoader) -> torch.Generator | None:
    """The generator that decides the order of the samples, or None if something else does."""
    sampler = loader.get_sampler()
    if isinstance(sampler, SeedableRandomSampler):
        return None
    for owner, name in ((sampler, "generator"), (loader, "synchronized_generator"), (loader.dataset, "generator")):
        generator = getattr(owner, name, None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def note_start(loader: ResumableLoader, pending: Pending | None) -> None:
    """Keep the states of the generators, as an epoch begins and before its order is drawn."""
    generator = shuffling_generator(loader)
    loader._progress.generator_state = None if generator is None else generator.get_state()
    if pending is None:  # else they are those that were loaded
        loader._progress.at_start = generators.states()


def capture(loader: ResumableLoader) -> dict[str, Any]:
    """Return the position of a loader, as of the batch yielded last; after the last batch, the next epoch's start.

    `batches` counts those of this process, `samples` those of all (None if batches have no fixed size), `shards` the
    batches of a step over all processes, and `finished` the batches of an epoch that has just ended.
    """
    progress = loader._progress
    if progress.pending is not None:
        return dict(progress.pending.position)
    epoch, yielded, at_end = progress.epoch, progress.batches, progress.at_end
    in_epoch = (yielded > 0 or progress.part > 0) and not at_end
    batches = yielded if in_epoch else 0
    size = loader._samples_per_step()
    position = {
        "epoch": epoch if in_epoch or yielded == 0 else epoch + 1,
        "batches": batches,
        "samples": None if size is None else size * batches + (progress.extra_samples if in_epoch else 0),
        "order": _order(loader, in_epoch),
        "shards": loader._batches_per_step(),
        "running": in_epoch and progress.running,
        "parts": progress.parts,
        "part": progress.part,
        "data": loader._data(),
        "worker_seed": progress.worker_seed,
        "workers_kept": progress.workers_kept,
        "finished": yielded if at_end else 0,
    }
    if in_epoch:
        generator, noted = shuffling_generator(loader), progress.noted or {}
        position["anew"] = None if generator is None else generator.get_state()
        position["at_start"] = progress.at_start
        # The reads that went ahead of the batch yielded last: a run that goes on makes them again.
        ahead = [noted[step] for step in sorted(noted) if step > batches]
        position["before_read"] = [note.random for note in ahead if note.random is not None]
        position["dataset_state"] = ahead[0].dataset if ahead else None
    return position


def _order(loader: ResumableLoader, in_epoch: bool) -> dict[str, Any]:
    sampler, generator = loader.get_sampler(), shuffling_generator(loader)
    if isinstance(sampler, SeedableRandomSampler):
        return {"kind": "seed_and_epoch", "seed": sampler.initial_seed}
    if generator is not None:
        return {"kind": "generator", "state": loader._progress.generator_state if in_epoch else generator.get_state()}
    if isinstance(sampler, ReplayableRandomSampler) and in_epoch:
        return {"kind": "seed", "seed": sampler.seed}
    return {"kind": "unrecorded"}


def kept(loader: ResumableLoader) -> Callable[[], None]:
    """Return what puts a loader back to where it stands now, with the parts of it that decide what it yields."""
    generator = shuffling_generator(loader)
    state = None if generator is None else generator.get_state()
    parts = (loader, loader._progress, loader.base_dataloader, loader.get_sampler())
    attributes = [(vars(part), dict(vars(part))) for part in parts if hasattr(part, "__dict__")]

    def put_back() -> None:
        for present, former in attributes:
            present.clear()
            present.update(former)
        if generator is not None:
            generator.set_state(state)

    return put_back


def check(loader: ResumableLoader, position: dict[str, Any], name: str = "The loader") -> None:
    """Refuse, before anything has changed, a position within an epoch of other data (ValueError). Any rank, alone."""
    saved = position.get("data")
    if saved is None or position["batches"] == 0:
        return
    own = loader._data()
    for part, label in (("length", "a dataset of {} samples"), ("sampler", "the sampler {}")):
        if saved[part] != own[part] and None not in (saved[part], own[part]):
            raise ValueError(
                f"{name} reads {label.format(own[part])}, but its checkpoint was saved within an epoch of "
                f"{label.format(saved[part])}. Prepare the data as it was, or set continue_after_load=False."
            )


def restore(loader: ResumableLoader, position: dict[str, Any], continuing: bool = True) -> int:
    """Put a loader into the epoch of a position, whose order it draws again; return the batches behind. All ranks.

    The next iteration goes on there if the loader was being iterated and `continuing` says so, or if it leaves out as
    many batches (`skip_first_batches`); any other begins the epoch anew. The number of processes may differ.
    """
    if continuing:
        check(loader, position)
    progress = loader._progress
    _drop_loaded_state(loader)
    progress.epoch = position["epoch"]
    progress.batches = progress.extra_samples = 0
    progress.at_end = False
    progress.worker_seed = position.get("worker_seed")
    progress.workers_kept = position.get("workers_kept", False)
    progress.finished = position.get("finished", 0)
    progress.at_start = position.get("at_start")
    in_epoch = position["batches"] > 0 or position.get("part", 0) > 0
    _restore_order(loader, position["order"], in_epoch=in_epoch)
    batches, extra = _behind(loader, position)
    resume_without_skip = continuing and position.get("running", True)
    progress.pending = Pending(position, batches, extra, resume_without_skip) if in_epoch else None
    return batches


def _drop_loaded_state(loader: ResumableLoader) -> None:
    """Let torchdata's loader begin its next epoch at the first batch, whatever state it was given."""
    origin = loader if loader._origin is None else loader._origin
    if getattr(origin.base_dataloader, "next_iter_state", None) is not None:
        origin.base_dataloader.next_iter_state = None


def _restore_order(loader: ResumableLoader, order: dict[str, Any], in_epoch: bool) -> None:
    sampler, kind, generator = loader.get_sampler(), order["kind"], shuffling_generator(loader)
    replayable = isinstance(sampler, ReplayableRandomSampler)
    if kind == "seed_and_epoch" and isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order["seed"]
    elif kind == "seed" and generator is not None:
        generator.manual_seed(order["seed"])
    elif kind == "seed" and replayable:
        sampler.replay = order["seed"]
    elif kind == "generator" and (generator is not None or replayable):
        if generator is None:
            generator = sampler.generator = torch.Generator()
        generator.set_state(generators.generator_state(order["state"]))
    elif in_epoch and kind != "unrecorded":
        warn_user(
            f"The saved order of the data ({kind}) does not fit the loader's sampler ({type(sampler).__name__}): the "
            "interrupted epoch will be continued in another order. Prepare the loader as it was when it was saved."
        )


def _behind(loader: ResumableLoader, position: dict[str, Any]) -> tuple[int, int]:
    """Steps behind a position, and samples of all processes beyond them, as this loader counts."""
    behind, size, unit = position["samples"], loader._samples_per_step(), "samples"
    if size is None or behind is None:  # nothing says how many samples a batch has
        size, unit = loader._batches_per_step(), "batches"
        behind = position["batches"] * position.get("shards", size)
    steps, rest = divmod(behind, size)
    if unit == "samples" and (steps, rest) != (position["batches"], 0):
        place = f"{steps} steps" + (f" and {rest} samples" if rest else "")
        _report(f"The interrupted epoch has {behind} samples behind it; with {size} a step it goes on after {place}.")
    base, plan = loader.base_dataloader, loader.plan
    before, parts = position.get("shards"), loader._parts()
    if parts > 1 and plan.uneven and before not in (None, loader._batches_per_step()):
        warn_user(
            f"The interrupted epoch had steps of {before} batches, and its sampler divides the data among {parts} processes now: "
            "some samples will be seen again and others left out, unless it deals them out in turn."
        )
    if rest and parts == 1 and unit == "samples" and adapter.skips_by_index(base):
        if samplers.skips_samples(adapter.batching_sampler(base)):
            return steps, rest
    if rest:
        warn_user(
            f"The interrupted epoch had consumed {behind} {unit}, which is not a multiple of the {size} that a step takes "
            f"now: its last {rest} {unit} will be seen again, because this kind of loader continues at whole steps only."
        )
    return steps, 0


def _report(message: str) -> None:
    # Visible by default, on one process of a machine: a program that leaves out batches by itself would do so twice.
    first = storage.process.current.get("local_process_index", 0) == 0
    logger.log(logging.WARNING if first else logging.INFO, message)


def replacement_iterator(view: ResumableLoader) -> Iterable[Any] | None:
    """Return what a view of `skip_first_batches` iterates over in place of its own batches, after a load.

    That is nothing, if it leaves out all batches of an epoch that is over: the loader stands at the next one already;
    or its origin, if that is stateful and continues there by itself.
    """
    progress = view._progress
    finished, progress.finished = progress.finished, 0
    if view._origin is None:
        return None
    left_out, pending = view._left_out(), progress.pending
    if finished and pending is None and left_out == finished:
        return ()
    if pending is not None and pending.batches == left_out and is_stateful(view.base_dataloader):
        progress.pending = replace(pending, resume_without_skip=True)
        return view._origin
    return None


def take_pending_position(loader: ResumableLoader) -> Pending | None:
    """Return the loaded position that an iteration continues at, or None for an epoch that begins anew. Any rank, alone."""
    progress = loader._progress
    pending, progress.pending = progress.pending, None
    if pending is None:
        return None
    left_out = loader._left_out()
    if left_out == pending.batches or (pending.resume_without_skip and loader._origin is None):
        if loader._origin is None:
            _report(
                f"The loader goes on in epoch {progress.epoch} after {pending.batches} of its batches, where the checkpoint was "
                "saved. DataLoaderConfiguration(continue_after_load=False) begins epochs anew."
            )
        return pending
    _drop_loaded_state(loader)
    if left_out:
        return Pending({}, left_out)
    generator, sampler = shuffling_generator(loader), loader.get_sampler()
    epoch_start_state = pending.position.get("anew")
    if generator is not None and epoch_start_state is not None:
        generator.set_state(generators.generator_state(epoch_start_state))
    if isinstance(sampler, ReplayableRandomSampler):
        sampler.replay = None
    return None
