"""Loaders in a loop: skipping, their classes by themselves, states, epochs."""

from torch.utils.data import DataLoader

from accelerate import data_loader as loaders
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader, prepare_data_loader
from interop.differential.core import attempt, probe
from interop.differential.probes.loaders import SOURCES, Stream, plain, shown, started


@probe(
    "data_loader:skip_first_batches", "data_loader:SkipDataLoader",
    source=sorted(set(SOURCES) - {"none", "list", "dataset"}), skip=[0, 1, 2, 3, None],
    kind=["torch", "prepared", "second of two", "dispatched"],
)  # fmt: skip
def skipped(source, skip, kind):
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
def skipped_odd(skip, stream):
    return [plain(b) for b in loaders.skip_first_batches(DataLoader(Stream(7) if stream else range(7), 2), skip)]


CLASSES = {
    "DataLoaderShard": lambda: DataLoaderShard, "DataLoaderDispatcher": lambda: DataLoaderDispatcher,
    "SkipDataLoader": lambda: SkipDataLoader,
}  # fmt: skip


@probe(
    "data_loader:DataLoaderShard", "data_loader:DataLoaderDispatcher", "data_loader:SkipDataLoader",
    "data_loader:DataLoaderAdapter", "data_loader:DataLoaderStateMixin", kind=CLASSES,
    given=[
        {}, {"batch_size": 2}, {"batch_size": 4, "drop_last": True}, {"skip_batches": 1}, {"skip_batches": 100},
        {"batch_size": 3, "skip_batches": 2}, {"use_stateful_dataloader": True, "batch_size": 2},
        {"batch_sampler": [[0, 1], [2]]}, {"batch_size": None}, {"batch_size": 0}, {"shuffle": True, "batch_size": 3},
        {"nonsense": 1}, {"iteration": 5, "batch_size": 4}, {"device": "cpu", "batch_size": 4},
        {"_drop_last": True, "batch_size": 4}, {"_non_blocking": True}, {"rng_types": ["torch"], "batch_size": 4},
        {"slice_fn": None}, {"split_batches": True, "batch_size": 4}, {"torch_device_mesh": None},
    ], dataset={"numbers": lambda: list(range(7)), "none": lambda: None, "stream": lambda: Stream(7), "empty": list},
)  # fmt: skip
def built(kind, given, dataset):
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
