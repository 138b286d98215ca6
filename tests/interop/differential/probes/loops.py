"""Loaders in a loop: skipping, their classes by themselves, states, epochs."""

import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate import data_loader as loaders
from accelerate.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipDataLoader,
    prepare_data_loader,
)
from accelerate.state import GradientState
from interop.differential.core import probe
from interop.differential.probes.loaders import BOTH, SOURCES, Stream, attempt, plain, shown, started


@probe(
    "data_loader:skip_first_batches",
    "data_loader:SkipDataLoader",
    source=sorted(set(SOURCES) - {"none", "list", "dataset"}),
    skip=[0, 1, 2, 3, None],
    kind=["torch", "prepared", "second of two", "dispatched"],
)
def skipped(source: str, skip: Any, kind: str) -> Iterator[tuple[str, Any]]:
    started()
    loader = SOURCES[source]()
    given = {
        "second of two": {"num_processes": 2, "process_index": 1},
        "dispatched": {"dispatch_batches": True, "put_on_device": True},
    }
    if kind != "torch":
        loader = attempt(prepare_data_loader, loader, **given.get(kind, {}))
    rest = attempt(loaders.skip_first_batches, loader, skip)
    if isinstance(rest, Exception):
        yield "refused", rest
        return
    yield "class", type(rest).__name__ if skip else ""
    yield "batches", attempt(lambda: [plain(b) for b in rest])
    yield "length", attempt(len, rest)
    yield (
        "afterwards",
        attempt(lambda: [plain(b) for b in loader]) if kind == "torch" and "shuffled" not in source else None,
    )


@probe("data_loader:skip_first_batches", skip=[-1, 4, 5, 100, "1", 1.0, 2.5, True], stream=[False, True])
def skipped_odd(skip: Any, stream: bool) -> Any:
    return [plain(b) for b in loaders.skip_first_batches(DataLoader(Stream(7) if stream else range(7), 2), skip)]


CLASSES = {
    "DataLoaderShard": lambda: DataLoaderShard,
    "DataLoaderDispatcher": lambda: DataLoaderDispatcher,
    "SkipDataLoader": lambda: SkipDataLoader,
}


@probe(
    "data_loader:DataLoaderShard",
    "data_loader:DataLoaderDispatcher",
    "data_loader:SkipDataLoader",
    "data_loader:DataLoaderAdapter",
    "data_loader:DataLoaderStateMixin",
    kind=CLASSES,
    given=[
        {},
        {"batch_size": 2},
        {"batch_size": 4, "drop_last": True},
        {"skip_batches": 1},
        {"skip_batches": 100},
        {"batch_size": 3, "skip_batches": 2},
        {"use_stateful_dataloader": True, "batch_size": 2},
        {"batch_sampler": [[0, 1], [2]]},
        {"batch_size": None},
        {"batch_size": 0},
        {"shuffle": True, "batch_size": 3},
        {"nonsense": 1},
        {"iteration": 5, "batch_size": 4},
        {"device": "cpu", "batch_size": 4},
        {"_drop_last": True, "batch_size": 4},
        {"_non_blocking": True},
        {"rng_types": ["torch"], "batch_size": 4},
        {"slice_fn": None},
        {"split_batches": True, "batch_size": 4},
        {"torch_device_mesh": None},
    ],
    dataset={"numbers": lambda: list(range(7)), "none": lambda: None, "stream": lambda: Stream(7), "empty": list},
)
def built(kind: type, given: dict[str, Any], dataset: Any) -> Iterator[tuple[str, Any]]:
    """The classes by themselves."""
    if dataset is None and given or kind is SkipDataLoader and "iteration" in given:
        return
    started()
    made = attempt(kind, dataset, **given)
    if isinstance(made, Exception):
        yield "refused", made
        return
    yield from shown(made)
    yield (
        "is a loader",
        (isinstance(made, DataLoader), isinstance(made, kind), isinstance(made, loaders.DataLoaderAdapter)),
    )


@probe("data_loader:DataLoaderAdapter", stateful=[False, True], batch=[1, 3], processes=BOTH)
def adapter(stateful: bool, batch: int) -> Iterator[tuple[str, Any]]:
    made = loaders.DataLoaderAdapter(range(5), use_stateful_dataloader=stateful, batch_size=batch)
    yield "length", len(made)
    yield "base", type(made.base_dataloader).__name__
    yield "class", made.__class__.__name__
    yield "is a loader", isinstance(made, DataLoader)
    for name in ("batch_size", "num_workers", "drop_last", "use_stateful_dataloader", "nothing", "dataset"):
        yield name, attempt(getattr, made, name)
    yield "state", sorted(made.state_dict()) if stateful else attempt(made.state_dict)
    yield "load", attempt(made.load_state_dict, {})
    yield "adjust", None if stateful else attempt(made.adjust_state_dict_for_prefetch)
    made.extra = 4
    yield "assigned", (made.extra, hasattr(made.base_dataloader, "extra"))
    yield "dict", hasattr(made, "base_dataloader")


@probe(
    "data_loader:DataLoaderShard",
    "data_loader:DataLoaderAdapter",
    read=[0, 1, 2, 4],
    workers=[0],
    source=["plain", "sized stream"],
)
def stateful(read: int, workers: int, source: str) -> Iterator[tuple[str, Any]]:
    """A loader that is left in an epoch, and another one that goes on there."""
    started()

    def make() -> Any:
        loader = DataLoader(range(9), 2) if source == "plain" else DataLoader(Stream(9, True), 2)
        return prepare_data_loader(loader, use_stateful_dataloader=True)

    first, second = make(), make()
    batches = iter(first)
    yield "read", [plain(next(batches)) for _ in range(read)]
    second.load_state_dict(first.state_dict())
    yield "going on", [plain(b) for b in second]
    yield "next epoch", [plain(b) for b in second]
    yield "the first", [plain(b) for b in batches]


@probe("data_loader:DataLoaderStateMixin", "state:GradientState", drop=[True, False], length=[4, 5], batch=[2, 3])
def mixin(drop: bool, length: int, batch: int) -> Iterator[tuple[str, Any]]:
    """begin, end and reset called by hand."""

    class Own(loaders.DataLoaderStateMixin):
        def __init__(self) -> None:
            self.gradient_state = GradientState()
            self._drop_last, self.dataset, self.total_batch_size = drop, range(length), batch
            self.total_dataset_length = length

    own = Own()
    yield "class", (Own.end_of_dataloader, Own.remainder)
    yield "reset", (own.reset(), own.end_of_dataloader, own.remainder)
    yield "begin", (own.begin(), own.end_of_dataloader, own.remainder, own.gradient_state.in_dataloader)
    yield "active", own.gradient_state.active_dataloader is own
    yield "end", (own.end(), own.gradient_state.in_dataloader)


@probe(
    "data_loader:get_sampler",
    "data_loader:DataLoaderShard",
    source=sorted(set(SOURCES) - {"none", "list", "dataset"}),
    prepared=[False, True],
)
def samplers(source: str, prepared: bool) -> Iterator[tuple[str, Any]]:
    """Asking for the sampler, and replacing it."""
    started()
    loader = SOURCES[source]()
    loader = prepare_data_loader(loader, num_processes=2, process_index=0) if prepared else loader
    found = attempt(loaders.get_sampler, loader)
    kinds = (RandomSampler, SeedableRandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
    yield "sampler", [isinstance(found, kind) for kind in kinds]
    if prepared:
        yield "method", loader.get_sampler() is found
        yield (
            "batch sampler",
            (type(loader.batch_sampler).__name__, type(getattr(loader.batch_sampler, "batch_sampler", None)).__name__),
        )
        yield "set", attempt(loader.set_sampler, SequentialSampler([0, 1, 2]))
        yield "afterwards", attempt(lambda: [plain(b) for b in loader])


@probe(
    "data_loader:DataLoaderShard",
    "data_loader:DataLoaderDispatcher",
    epoch=[0, 1, 5, -1],
    source=["plain", "seedable", "stream"],
    dispatch=[False, True],
)
def epochs(epoch: int, source: str, dispatch: bool) -> Iterator[tuple[str, Any]]:
    started()
    made = prepare_data_loader(SOURCES[source](), dispatch_batches=dispatch, put_on_device=dispatch, device="cpu")
    yield "before", made.iteration
    yield "set", attempt(made.set_epoch, epoch)
    yield "iteration", made.iteration
    yield "batches", attempt(lambda: [plain(b) for b in made])
    yield "after", made.iteration
    yield "second", attempt(lambda: [plain(b) for b in made])
    yield "pickled", attempt(lambda: [plain(b) for b in pickle.loads(pickle.dumps(made))])


@probe("data_loader:prepare_data_loader", stop=[0, 1, 2], times=[1, 2])
def left_early(stop: int, times: int) -> Iterator[tuple[str, Any]]:
    """A loop that is left before the end of its loader."""
    started()
    made = prepare_data_loader(DataLoader(range(7), 2))
    for number in range(times):
        for at, _ in enumerate(made):
            if at == stop:
                break
        yield f"left {number}", (made.end_of_dataloader, made.remainder, made.iteration)
    yield "batches", [plain(b) for b in made]
    yield "iteration", made.iteration


@probe("data_loader:prepare_data_loader", "state:GradientState", outer=[1, 3], inner=[1, 2])
def nested(outer: int, inner: int) -> Any:
    """A loop over a loader within a loop over another."""
    started()
    first, second = (prepare_data_loader(DataLoader(range(2 * size), 2)) for size in (outer, inner))
    state, seen = GradientState(), []
    for _ in first:
        seen.append(("outer", state.end_of_dataloader, state.remainder, state.active_dataloader is first))
        for _ in second:
            seen.append(("inner", state.end_of_dataloader, state.remainder, state.active_dataloader is second))
        seen.append(("between", state.active_dataloader is first, state.in_dataloader))
    return [*seen, state.in_dataloader]
