"""Loops within, next to and after each other: accumulation, end, remainder and metrics are those of the right loader."""

import gc
import warnings

import torch
from harness import Stream, fresh_accelerator, world
from torch.utils.data import DataLoader

from accelerate import DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin

KINDS = ("shard", "dispatch", "stream")


def accelerator_for(kind, steps=1):
    return fresh_accelerator(
        dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatch"),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps),
    )


def numbered(accelerator, kind, steps, first, short=0):
    """A prepared loader of so many steps that counts from `first`; its last round lacks `short` samples.

    Returns it with what a loop over it should gather in each step.
    """
    numbers = torch.arange(first, first + 2 * world() * steps - short)
    dataset = Stream(list(numbers)) if kind == "stream" else numbers
    wanted = [part.tolist() for part in numbers.split(2 * world())]
    return accelerator.prepare(DataLoader(dataset, batch_size=2)), wanted


def mark(accelerator, model):
    """One micro-batch: + where gradients are synchronised, - where they accumulate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with accelerator.accumulate(model):
            return "+" if accelerator.sync_gradients else "-"


def expect(accelerator, loader, is_last, batch, want):
    """The loader is the active one, knows whether this is its end, and what it gathers is its own."""
    state = accelerator.gradient_state
    assert state.active_dataloader is loader, state.dataloader_references
    assert state.end_of_dataloader is loader.end_of_dataloader is is_last
    if is_last and len(want) % (2 * world()):
        # Alone, a stream without a length is not completed, so there is nothing to be known about it.
        known = world() > 1 or not isinstance(loader.dataset, Stream)
        assert state.remainder == loader.remainder == (len(want) if known else -1)
    assert accelerator.gather_for_metrics(batch).tolist() == want


def walk(accelerator, loader, want, stop=None):
    for number, batch in enumerate(loader):
        expect(accelerator, loader, number == len(want) - 1, batch, want[number])
        if number == stop:
            break


def at_rest(accelerator):
    state = accelerator.gradient_state
    assert not state.in_dataloader and state.active_dataloader is None, state.dataloader_references
    assert not state.end_of_dataloader and state.remainder == -1
    everything = accelerator.gather_for_metrics(torch.arange(3, device=accelerator.device)).tolist()
    assert everything == [0, 1, 2] * world(), "outside of a loop nothing is cut"


def check_three_deep():
    for kinds in (KINDS, ("shard",) * 3, ("dispatch",) * 3, ("stream", "shard", "dispatch")):
        accelerator = accelerator_for("shard", steps=2)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        loops = []
        for depth, kind in enumerate(kinds):
            accelerator.dataloader_config.dispatch_batches = kind == "dispatch"
            loops.append(numbered(accelerator, kind, 3 - depth % 2, 100 * depth, short=1 + depth % (2 * world() - 1)))
        (outer, outer_want), (middle, middle_want), (inner, inner_want) = loops
        marks = ""
        for number, batch in enumerate(outer):
            expect(accelerator, outer, number == 2, batch, outer_want[number])
            for second, other in enumerate(middle):
                expect(accelerator, middle, second == 1, other, middle_want[second])
                walk(accelerator, inner, inner_want, stop=second)
                expect(accelerator, middle, second == 1, other, middle_want[second])
                walk(accelerator, inner, inner_want)
                expect(accelerator, middle, second == 1, other, middle_want[second])
            expect(accelerator, outer, number == 2, batch, outer_want[number])
            marks += mark(accelerator, model)
        assert marks == "-++", marks
        at_rest(accelerator)


def check_loops_that_take_turns():
    """Each draws a batch when it is its turn: what follows belongs to the one that has drawn last."""
    for kind in KINDS:
        accelerator = accelerator_for(kind, steps=2)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        one, one_want = numbered(accelerator, kind, 5, 0, short=1)
        two, two_want = numbered(accelerator, kind, 3, 50, short=1)
        first, second, marks = iter(one), iter(two), ""
        for number in range(5):
            batch = next(first)
            expect(accelerator, one, number == 4, batch, one_want[number])
            marks += mark(accelerator, model)
            if number < 3:
                batch = next(second)
                expect(accelerator, two, number == 2, batch, two_want[number])
                marks += mark(accelerator, model)
                if number == 2:
                    assert next(second, None) is None
                    assert accelerator.gradient_state.active_dataloader is one
        assert next(first, None) is None
        # Windows of two micro-batches, which the end of either loop closes.
        assert marks == "-+-+-+-+", marks
        at_rest(accelerator)


def check_a_loader_in_two_loops_at_once():
    for kind in KINDS:
        accelerator = accelerator_for(kind)
        loader, want = numbered(accelerator, kind, 3, 0, short=1)
        for number, (batch, other) in enumerate(zip(loader, loader, strict=False)):
            expect(accelerator, loader, number == 2, batch, want[number])
            expect(accelerator, loader, number == 2, other, want[number])
        at_rest(accelerator)
    # One of them at its end, the other in the middle. (Dispatched rounds come in one order, so this is for shards.)
    for kind in ("shard", "stream"):
        accelerator = accelerator_for(kind)
        loader, want = numbered(accelerator, kind, 3, 0, short=1)
        slow = iter(loader)
        expect(accelerator, loader, False, next(slow), want[0])
        walk(accelerator, loader, want)
        for number, batch in enumerate(slow, 1):
            expect(accelerator, loader, number == 2, batch, want[number])
        at_rest(accelerator)


def check_a_loop_that_is_not_closed():
    """An iterator that is kept does not hold the other loops up."""
    for kind in KINDS:
        accelerator = accelerator_for(kind, steps=2)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        training, want = numbered(accelerator, kind, 3, 0, short=1)
        peeked, peeked_want = numbered(accelerator, kind, 4, 50)
        kept, marks = [], ""
        for number, batch in enumerate(training):
            expect(accelerator, training, number == 2, batch, want[number])
            marks += mark(accelerator, model)
            if number == 0:
                kept.append(iter(peeked))
                expect(accelerator, peeked, False, next(kept[0]), peeked_want[0])
        assert marks == "-++", marks
        assert accelerator.gradient_state.active_dataloader is peeked and not peeked.end_of_dataloader
        kept.clear()
        gc.collect()
        at_rest(accelerator)
        # Begun, but not a single batch drawn: it has not become active.
        never = iter(peeked)
        at_rest(accelerator)
        del never


def check_exceptions():
    for kind in KINDS:
        accelerator = accelerator_for(kind)
        outer, outer_want = numbered(accelerator, kind, 3, 0, short=1)
        inner, inner_want = numbered(accelerator, kind, 2, 50, short=1)
        # As in a notebook, which keeps the traceback, and with it the loop that was left.
        kept = []
        try:
            for _ in outer:
                for _ in inner:
                    raise KeyError("in both loops")
        except KeyError as error:
            kept.append(error)
        for _ in range(2):
            for number, batch in enumerate(outer):
                expect(accelerator, outer, number == 2, batch, outer_want[number])
                walk(accelerator, inner, inner_want)
                expect(accelerator, outer, number == 2, batch, outer_want[number])
        kept.clear()
        gc.collect()
        at_rest(accelerator)
