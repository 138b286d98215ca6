"""Generated evaluation loops: gather_for_metrics returns the dataset, each sample once and in order, on every rank."""

import faulthandler
import os
import traceback
import warnings
from itertools import islice, zip_longest

import torch
from harness import Stream, everywhere, fresh_accelerator, world
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import DataLoaderConfiguration
from accelerate.data.samplers import SeedableRandomSampler
from accelerate.utils.imports import is_torchdata_stateful_dataloader_available

STATEFUL = is_torchdata_stateful_dataloader_available()


class Rows(Dataset):
    """Rows that tell which one they are."""

    def __init__(self, length, shape):
        self.length = length
        self.shape = shape

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return f"row {index}" if self.shape == "text" else torch.tensor(index)


def own_part(length):
    """The rows that a worker reads, where several share a stream; else all."""
    worker = torch.utils.data.get_worker_info()
    return range(length) if worker is None else range(worker.id, length, worker.num_workers)


class SizedStream(Rows, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, own_part(self.length))


class Batches:
    """a separate batch sampler kind, with batches of any size and no `batch_size`."""

    def __init__(self, sizes):
        numbers = iter(range(sum(sizes)))
        self.batches = [list(islice(numbers, size)) for size in sizes]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


SOURCES = ("map", "map", "map", "shuffled", "sampler", "batches", "unbatched", "sized", "sized", "stream")
CASES = st.fixed_dictionaries(
    {
        "source": st.sampled_from(SOURCES),
        "length": st.integers(0, 40),
        "size": st.integers(1, 7),
        "sizes": st.lists(st.integers(1, 5), max_size=9),
        "drop_last": st.booleans(),
        "split": st.booleans(),
        "dispatch": st.booleans(),
        "even": st.sampled_from((True, True, False)),
        "shape": st.sampled_from(("tensor", "tensor", "text")),
        "objects": st.booleans(),
        "workers": st.sampled_from((0,) * 14 + (1, 1, 2)),
        "stateful": st.sampled_from((False, False, False, True)),
        "skip": st.sampled_from((0, 0, 0, 1, 2)),
        "epochs": st.sampled_from((1, 1, 2)),
    }
)


def possible(case, world):
    """Turn a generated case into one that makes sense: what contradicts the rest is put right."""
    case = dict(case)
    source, stream = case["source"], case["source"] in ("sized", "stream")
    if source == "batches":
        case |= {"split": False, "drop_last": False, "even": True, "skip": 0, "length": sum(case["sizes"])}
        case["objects"] = True  # batches of different sizes: ranks hold tensors of different shapes
    if source == "unbatched":
        case |= {"split": False, "drop_last": False, "dispatch": False, "shape": "tensor", "size": 1, "objects": False}
        case["even"] = True
    if case["dispatch"] or stream:
        case["even"] = True  # they always are
    if not case["even"]:
        # Ranks with nothing in the last round have left the loop, so only a round in which all have something counts.
        rest = case["length"] % (case["size"] * world)
        if rest and rest <= (world - 1) * case["size"]:
            case["length"] -= rest
        case["objects"] = True
    if stream and case["dispatch"]:
        case["workers"] = min(case["workers"], 1)  # more of them bring short batches in the middle, in another order
    case["stateful"] = case["stateful"] and STATEFUL
    case["skip"] = min(case["skip"], len(shared_steps(case, world)))
    return case


def build(case, world):
    """Return the loader of a case, and the rows in the order in which a loop over it should find them."""
    source, length, shape = case["source"], case["length"], case["shape"]
    total = case["size"] * world
    size = total if case["split"] else case["size"]
    kept = length // total * total if case["drop_last"] else length
    expected = list(range(length))
    options = {"num_workers": case["workers"]}
    if source == "unbatched":
        return DataLoader(Rows(length, shape), batch_size=None, **options), expected
    if source == "batches":
        return DataLoader(Rows(length, shape), batch_sampler=Batches(case["sizes"]), **options), expected
    options |= {"batch_size": size, "drop_last": case["drop_last"]}
    if source in ("sized", "stream"):
        rows = SizedStream(length, shape)
        return DataLoader(rows if source == "sized" else Stream(rows.__iter__), **options), expected[:kept]
    if source == "sampler":
        chosen = [(7 * number) % (length + 3) for number in range(length)]  # some of them twice
        return DataLoader(Rows(length + 3, shape), sampler=chosen, **options), chosen[:kept]
    if source == "shuffled" and length:
        return DataLoader(Rows(length, shape), shuffle=True, **options), kept
    return DataLoader(Rows(length, shape), **options), expected[:kept]


def order(case, expected, epoch, world, skip):
    """The rows of an epoch in their order, without those of the first steps."""
    if isinstance(expected, int):
        sampler = SeedableRandomSampler(range(case["length"]), data_seed=6)
        sampler.set_epoch(epoch)
        expected = list(sampler)[:expected]
    if case["workers"] > 1 and case["source"] in ("sized", "stream"):
        return [row for step in shared_steps(case, world)[skip:] for row in step]
    return expected[skip * case["size"] * world :]


def shared_steps(case, world):
    """The rows of each step, where several workers share a stream, one after the other, and each completes its last step."""
    total, left = case["size"] * world, []
    readers = max(1, case["workers"]) if case["source"] in ("sized", "stream") else 1
    for worker in range(readers):
        rows = range(worker, case["length"], readers)
        parts = [list(rows[at : at + total]) for at in range(0, len(rows), total)]
        left.append([part for part in parts if len(part) == total or not case["drop_last"]])
    return [part for parts in zip_longest(*left, fillvalue=[]) for part in parts if part]


def gathered(accelerator, case, batch):
    if case["source"] == "unbatched":
        batch = batch.reshape(1)
    if case["shape"] == "text":
        return [int(text.removeprefix("row ")) for text in accelerator.gather_for_metrics(list(batch))]
    batch = batch.tolist() if case["objects"] else batch
    return list(map(int, accelerator.gather_for_metrics(batch, use_gather_object=case["objects"])))


def loop(case):
    """Run the loops of a case; returns what each epoch has found, and what it should have."""
    options = DataLoaderConfiguration(
        split_batches=case["split"],
        dispatch_batches=case["dispatch"],
        even_batches=case["even"],
        use_seedable_sampler=True,
        data_seed=6,
        use_stateful_dataloader=case["stateful"],
    )
    accelerator = fresh_accelerator(dataloader_config=options)
    world = accelerator.num_processes
    loader, expected = build(case, world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(num_workers|set_vital).*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        prepared = accelerator.prepare(loader)
        found, wanted = [], []
        for epoch in range(case["epochs"]):
            skip = case["skip"] if epoch == 0 else 0
            seen = []
            for batch in accelerator.skip_first_batches(prepared, skip):
                seen += gathered(accelerator, case, batch)
            found.append(seen)
            wanted.append(order(case, expected, epoch, world, skip))
    assert not accelerator.gradient_state.in_dataloader
    return found, wanted


def check(case):
    case = possible(case, world())
    try:
        found, wanted = loop(case)
    except BaseException:
        # The others are in some collective and will not come out of it: end here, and the launcher ends them.
        print(f"a rank failed with {case}", flush=True)
        traceback.print_exc()
        os._exit(1)
    told = everywhere((case, found))
    assert all(other == (case, found) for other in told), (case, told)
    assert found == wanted, f"{case}\nfound  {found}\nwanted {wanted}"


def rare(source, length, **others):
    """A case that is too seldom generated to be left to chance."""
    plain = {"sizes": [], "drop_last": False, "split": False, "dispatch": False, "even": True, "shape": "tensor"}
    plain |= {"objects": False, "workers": 2, "stateful": False, "skip": 0, "epochs": 2, "size": 2}
    return {**plain, "source": source, "length": length, **others}


# Workers that share a stream: each of them ends with a separate round, which is not the last one of the epoch.
RARE = (
    rare("stream", 11),
    rare("sized", 22, size=3),
    rare("stream", 13, split=True),
    rare("stream", 11, stateful=True, skip=1),
    rare("map", 3, workers=0, shape="text"),
    rare("map", 1, workers=0, dispatch=True, objects=True),
    rare("batches", 0, sizes=[5, 1, 4, 4, 2], workers=0),
)


def generated(cases, chosen=None):
    """Run so many generated cases: the same on every rank, and no clock that could make them differ."""
    count = 0

    def counted(case):
        nonlocal count
        count += 1
        check(case)

    fresh_accelerator()
    test = given(CASES)(counted)
    test = test if chosen is None else seed(chosen)(test)
    options = {"derandomize": chosen is None, "database": None, "deadline": None, "phases": [Phase.generate]}
    settings(max_examples=cases, suppress_health_check=list(HealthCheck), **options)(test)()
    assert count == cases


def check_forty_loops_and_rare_ones():
    fresh_accelerator()
    for case in RARE:
        check(case)
    generated(40)


def thousand_1(chosen=1):
    # Before the test's own limit: should ranks ever wait for each other, this tells where.
    faulthandler.dump_traceback_later(220, exit=True)
    generated(1000, chosen)


def thousand_2():
    thousand_1(2)
