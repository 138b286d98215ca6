"""Continuing an interrupted epoch gives what the uninterrupted run would have given."""

import io
import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data import resume
from accelerate.data.build import prepare_data_loader, skip_first_batches
from loader_samples import Numbers, Stream, needs_torchdata


class Drawn(IterableDataset):
    """A stream of random numbers, of which the loop draws some, too."""

    def __iter__(self):
        return (float(torch.rand(())) for _ in range(22))


class StreamWithPlace(IterableDataset):
    """A stream that can save and restore its place."""

    def __init__(self, length):
        self.length, self.place = length, 0

    def __iter__(self):
        while self.place < self.length:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class PlaceOfGenerator(StreamWithPlace):
    """One that knows its place only once its generator has started, and whose first worker ends early."""

    start = 0

    def __iter__(self):
        self.place, self.start = self.start, 0
        while self.place < (self.length if torch.utils.data.get_worker_info().id else 7):
            self.place += 1
            yield self.place - 1
        self.place = 0

    def load_state_dict(self, state):
        self.start = state["place"]


LOADERS = {
    "in order": (lambda: DataLoader(Numbers(22), 2), {}),
    "default shuffle": (lambda: DataLoader(Numbers(22), 2, shuffle=True), {}),
    "own generator": (lambda: DataLoader(Numbers(22), 2, shuffle=True, generator=torch.Generator()), {}),
    "seedable": (lambda: DataLoader(Numbers(22), 2, shuffle=True), {"use_seedable_sampler": True, "data_seed": 3}),
    "stream": (lambda: DataLoader(Stream(22), 2), {"dispatch_batches": False}),
    "random stream": (lambda: DataLoader(Drawn(), 2), {"dispatch_batches": False}),
}


def build(case, processes):
    make, options = case
    return prepare_data_loader(make(), num_processes=processes, process_index=processes - 1, **options)


def through_json(loader):
    state = loader.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.load(file, weights_only=True)
    return json.loads(json.dumps(state))


def steps(loader):
    """Yield batches as to a training that uses the default generator as well."""
    for values in loader:
        torch.rand(1)
        yield values.tolist()


def interrupted(case, processes, epoch, batch):
    """Run three epochs; returns the batches after the interruption, per epoch, and what was saved at it."""
    torch.manual_seed(11)
    loader = build(case, processes)
    epochs = []
    for number in range(3):
        batches = []
        for values in steps(loader):
            batches.append(values)
            at_the_end = batch is None and loader.end_of_dataloader
            if number == epoch and (at_the_end or len(batches) == batch):
                saved = through_json(loader), torch.get_rng_state()
        epochs.append(batches)
    after = epochs[epoch + 1 :]
    return ([epochs[epoch][batch:], *after] if batch is not None else after), saved


@pytest.mark.parametrize("batch", [1, 4, None])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("case", LOADERS.values(), ids=LOADERS)
def test_a_resumed_run_equals_an_uninterrupted_one(case, processes, epoch, batch):
    want, (state, generator) = interrupted(case, processes, epoch, batch)
    # The other way: restore the epoch and its order, and omit what is behind manually.
    for by_hand in (False, True):
        torch.manual_seed(99)
        loader = build(case, processes)
        torch.set_rng_state(generator)
        behind = resume.restore(loader, state[resume.KEY]) if by_hand else loader.load_state_dict(state)
        assert not by_hand or behind == (batch or 0)
        for number, expected in enumerate(want):
            view = skip_first_batches(loader, behind) if by_hand and number == 0 else loader
            assert list(steps(view)) == expected


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
def test_a_state_of_torchdata_alone_can_be_loaded():
    from torchdata.stateful_dataloader import StatefulDataLoader

    source = StatefulDataLoader(Numbers(22), 2)
    iterator = iter(source)
    next(iterator), next(iterator)
    loader = prepare_data_loader(DataLoader(Numbers(22), 2), use_stateful_dataloader=True)
    loader.load_state_dict(source.state_dict())
    assert next(iter(loader)).tolist() == [4, 5]


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_state_of_a_stream_without_position_can_be_resumed_twice(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    want = [batch.tolist() for batch in DataLoader(Stream(40), 4, num_workers=workers)]
    source = StatefulDataLoader(Stream(40), 4, num_workers=workers)
    iterator = iter(source)
    got = [next(iterator).tolist() for _ in range(3)]
    state = source.state_dict()
    for _ in range(2):
        loader = prepare_data_loader(DataLoader(Stream(40), 4, num_workers=workers), use_stateful_dataloader=True)
        loader.load_state_dict(state)
        batches = iter(loader)
        got += [next(batches).tolist() for _ in range(2)]
        state = loader.state_dict()
    assert got == want[:7]


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda: DataLoader(Numbers(22), 2), lambda: DataLoader(StreamWithPlace(22), 2)])
def test_a_loaded_state_of_torchdata_is_replaced_by_what_comes_after_it(make):
    def stopped_after(count):
        loader = prepare_data_loader(make(), use_stateful_dataloader=True)
        for _ in zip(range(count), loader, strict=False):
            pass
        return loader.state_dict()

    loader = prepare_data_loader(make(), use_stateful_dataloader=True)
    loader.load_state_dict(stopped_after(3))
    loader.load_state_dict(stopped_after(0))
    assert [batch[0].item() for batch in loader] == [*range(0, 22, 2)]
    loader.load_state_dict(stopped_after(3))
    view = skip_first_batches(loader, 2)
    assert [batch[0].item() for batch in view] == [*range(4, 22, 2)]
    assert [batch[0].item() for batch in loader] == [*range(0, 22, 2)]


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_a_stateful_loader_resumes_on_another_number_of_processes(before, after):
    def make(processes):
        return prepare_data_loader(
            DataLoader(Numbers(32), 2), num_processes=processes, process_index=0, use_stateful_dataloader=True
        )

    loader = make(before)
    for number, _ in enumerate(loader, 1):
        if number == 8 // before:
            state = through_json(loader)
    for already in (0, 1):  # the second resume is that of a loader which skipped by indices
        loader = make(after)
        loader.load_state_dict(state)
        want = [[first, first + 1] for first in range(16 + 2 * after * already, 32, 2 * after)]
        got = []
        for batch in loader:
            got.append(batch.tolist())
            if len(got) == 1:
                state = loader.state_dict()
        assert got == want


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [1, 2, 3], ids="after {} batches".format)
def test_workers_that_have_read_nothing_since_a_resume_keep_their_place(saved):
    def make():
        return prepare_data_loader(DataLoader(PlaceOfGenerator(24), 2, num_workers=2), use_stateful_dataloader=True)

    want, state, got = [batch.tolist() for batch in make()], None, []
    for stop in (4, saved, 0, 99):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
            state = loader.state_dict()
        for number, batch in enumerate(loader if stop else (), 1):
            got.append(batch.tolist())
            if number == stop:
                state = loader.state_dict()
                break
    assert got == want


def test_a_state_that_does_not_fit_is_told():
    _, (state, _) = interrupted(LOADERS["default shuffle"], 1, 0, 4)
    loader = build(LOADERS["in order"], 1)
    with pytest.raises(ValueError, match="reads the sampler SequentialSampler.*RandomSampler"):
        resume.restore(loader, state[resume.KEY])
    with pytest.warns(UserWarning, match="continued in another order"):
        resume.restore(loader, state[resume.KEY], continuing=False)
    with pytest.raises(ValueError, match="use_stateful_dataloader=True"):
        loader.load_state_dict({"_num_yielded": 3})
    for saved, now in (("seedable", "default shuffle"), ("default shuffle", "seedable")):
        _, (state, _) = interrupted(LOADERS[saved], 1, 0, 4)
        with pytest.warns(UserWarning, match="continued in another order"):
            resume.restore(build(LOADERS[now], 1), state[resume.KEY], continuing=False)


def saved_after(batches, loader):
    """Return the state saved after so many batches, in the loop that is left then."""
    for number, _ in enumerate(loader, 1):
        if number == batches:
            return loader.state_dict()


@pytest.mark.parametrize("leave", [True, False], ids=["left by break", "continue_after_load=False"])
def test_epoch_begins_again_on_more_processes_than_a_step_was_behind(leave):
    before = prepare_data_loader(DataLoader(Numbers(100), 8), num_processes=2, process_index=0)
    state = saved_after(1, before)[resume.KEY]
    if leave:
        state = before.state_dict()[resume.KEY]
    loader = prepare_data_loader(DataLoader(Numbers(100), 8), num_processes=4, process_index=0)
    resume.restore(loader, state, continuing=leave)
    assert loader._progress.pending.extra_samples == 16
    assert next(iter(loader)).tolist() == list(range(8))


def uneven(rank, sampler=None):
    source = DataLoader(Numbers(100), 8) if sampler is None else DataLoader(Numbers(100), batch_sampler=sampler)
    return prepare_data_loader(source, num_processes=2, process_index=rank, even_batches=False)


class WholeBatches(torch.utils.data.Sampler):
    """13 batches, the last of 4 samples, from a class that is not torch's."""

    batch_size = 8

    def __len__(self):
        return 13

    def __iter__(self):
        return (list(range(start, min(start + 8, 100))) for start in range(0, 100, 8))


@pytest.mark.parametrize("sampler", [None, WholeBatches()], ids=["by samples", "by batches"])
def test_rank_that_ends_first_resumes_in_the_epoch_of_the_others(sampler):
    states = [saved_after(6, uneven(rank, sampler)) for rank in (0, 1)]
    assert [state[resume.KEY]["epoch"] for state in states] == [0, 0]
    assert [state[resume.KEY]["batches"] for state in states] == [6, 6]
    for rank, left in ((0, [[96, 97, 98, 99]]), (1, [])):
        loader = uneven(rank, sampler)
        loader.load_state_dict(states[rank])
        assert [batch.tolist() for batch in loader] == left
        assert loader.iteration == 1 and next(iter(loader))[0] == 8 * rank


class Augmented(Numbers):
    """Samples with noise from a generator that the dataset has for this purpose."""

    def __init__(self, length):
        super().__init__(length)
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index):
        return float(torch.rand((), generator=self.generator))


@pytest.mark.parametrize("shuffle", [False, True])
def test_generator_of_a_map_style_dataset_is_not_that_of_the_order(shuffle):
    def build():
        return prepare_data_loader(DataLoader(Augmented(22), 2, shuffle=shuffle))

    torch.manual_seed(11)
    loader, batches = build(), []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 4:
            state, of_data = loader.state_dict(), loader.dataset.generator.get_state()
    resumed = build()
    resumed.load_state_dict(state)
    resumed.dataset.generator.set_state(of_data)  # as the program that has it must save and load it
    assert [batch.tolist() for batch in resumed] == batches[4:]
    assert state[resume.KEY]["order"]["kind"] == ("seed" if shuffle else "unrecorded")


def seedable():
    source = DataLoader(Numbers(8), 2, shuffle=True)
    return prepare_data_loader(source, use_seedable_sampler=True, data_seed=3)


def test_loop_left_at_its_last_batch_has_finished_the_epoch():
    whole = seedable()
    epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
    loader, states, got = seedable(), [], []
    for _ in range(2):
        got.append([])
        for batch in loader:
            got[-1].append(batch.tolist())
            if loader.end_of_dataloader:
                states.append(loader.state_dict())
                break
        states.append(loader.state_dict())
    assert got == epochs[:2] and loader.iteration == 2
    for number, state in enumerate(states):
        resumed = seedable()
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == epochs[1 + number // 2]


@pytest.mark.parametrize("case", ["seedable", "default shuffle", "own generator"])
def test_set_epoch_after_a_load_begins_another_epoch_at_its_start(case):
    torch.manual_seed(11)
    source = build(LOADERS[case], 1)
    epochs = [[batch.tolist() for batch in source] for _ in range(2)]
    state = saved_after(3, source)
    for chosen in (2, 5):
        loader = build(LOADERS[case], 1)
        loader.load_state_dict(state)
        loader.set_epoch(chosen)
        position = loader.state_dict()[resume.KEY]
        assert (position["epoch"], position["batches"]) == (chosen, 3 if chosen == 2 else 0)
        batches = [batch.tolist() for batch in loader]
        assert len(batches) == (8 if chosen == 2 else 11) and loader.iteration == chosen + 1
    if case == "seedable":
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert [batch.tolist() for batch in loader] == epochs[1]
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert [batch.tolist() for batch in skip_first_batches(loader, 3)] == epochs[1][3:]


@needs_torchdata
@pytest.mark.filterwarnings("ignore")
def test_set_epoch_after_a_load_restarts_a_stateful_loader():
    def make():
        return prepare_data_loader(DataLoader(Numbers(22), 2), use_stateful_dataloader=True)

    state = saved_after(3, make())
    for skipped in (0, 3):
        loader = make()
        loader.load_state_dict(state)
        loader.set_epoch(1)
        batches = skip_first_batches(loader, skipped)
        assert [batch[0].item() for batch in batches] == [*range(2 * skipped, 22, 2)]


def test_epoch_without_a_full_step_left_ends_and_warns():
    def make(processes):
        source = DataLoader(Numbers(100), 8, drop_last=True)
        return prepare_data_loader(source, num_processes=processes, process_index=0)

    state = saved_after(5, make(2))
    loader = make(4)
    with pytest.warns(UserWarning, match="20 samples are left, a step takes 32 now"):
        loader.load_state_dict(state)
    assert list(loader) == []
    assert loader.end_of_dataloader and loader.iteration == 1
    assert len(list(loader)) == 3


def test_loaders_that_share_a_generator_resume_in_their_own_orders():
    def prepared(seed):
        generator = torch.Generator().manual_seed(seed)
        return [prepare_data_loader(DataLoader(range(8), 2, shuffle=True, generator=generator)) for _ in range(2)]

    loaders, seen, states = prepared(0), [], []
    for number, batch in enumerate(loaders[0]):
        seen.append(batch.tolist())
        if number == 1:
            states = [loader.state_dict() for loader in loaders]
    again = prepared(9)
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert [batch.tolist() for batch in again[0]] == seen[2:]
