"""Which streams are restored and which are read again, and what is noted while one is read."""

import random
from itertools import islice
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accelerate.data import randomness, streams
from accelerate.data.state import Progress


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class StreamWithState(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_stream_with_a_state_is_restored_where_it_is_read_here():
    assert streams.restores(DataLoader(StreamWithState()))
    assert not streams.restores(DataLoader(StreamWithState(), num_workers=1))
    assert not streams.restores(DataLoader(Stream()))


class BufferShuffledExamples:
    """Named as the stage of the library `datasets` is."""


@pytest.mark.parametrize(
    "chain",
    [
        BufferShuffledExamples(),
        SimpleNamespace(ex_iterable=BufferShuffledExamples()),
        SimpleNamespace(ex_iterables=[SimpleNamespace(), SimpleNamespace(ex_iterable=BufferShuffledExamples())]),
    ],
)
def test_a_state_without_its_shuffling_buffer_is_not_used(chain):
    stream = StreamWithState()
    assert not streams.has_buffer(stream)
    stream._ex_iterable = chain
    assert streams.has_buffer(stream) and not streams.restores(DataLoader(stream))


def test_the_buffer_of_a_datasets_stream_is_seen():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(8))}).to_iterable_dataset(num_shards=2)
    assert not streams.has_buffer(stream)
    shuffled = stream.shuffle(seed=1, buffer_size=3)
    assert streams.has_buffer(shuffled) and streams.has_buffer(shuffled.map(lambda row: row))


def test_states_are_noted_before_the_reads_of_each_step():
    random.seed(1)
    progress, seen = Progress(), []

    def batches():
        for _ in range(6):
            seen.append(random.getstate())
            yield random.random()

    reading = streams.noting(batches(), progress, DataLoader(Stream()), reads=2, start=3, known=[])
    list(islice(reading, 4))
    assert [progress.before_read[step]["python"] for step in (4, 5)] == [seen[0], seen[2]]


def test_what_was_noted_before_an_interruption_stays_noted():
    progress, known = Progress(), [randomness.states()]
    random.random()
    reading = streams.noting(iter("ab"), progress, DataLoader(Stream()), reads=1, start=0, known=known)
    assert list(reading) == ["a", "b"]
    assert progress.before_read[1] is known[0] and progress.before_read[2]["python"] == random.getstate()


def test_reading_the_first_step_again_draws_as_before_and_leaves_no_trace():
    class Drawn(Stream):
        def __iter__(self):
            return (random.random() for _ in range(6))

    loader = DataLoader(Drawn(), batch_size=2)
    at_start = randomness.states()
    expected = next(iter(loader)).tolist()
    before = random.getstate()
    assert [batch.tolist() for batch in streams.first_step(loader, at_start, 1)] == [expected]
    assert random.getstate() == before


def test_a_stream_that_ends_before_the_place_is_an_error():
    with pytest.raises(ValueError, match="9 batches were to be left out, but the data ended after 6"):
        next(streams.dropped(iter(DataLoader(Stream())), 9))
