import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate.runtime import split


@given(length=st.integers(0, 50), world_size=st.integers(1, 9))
def test_bounds_cover_everything_once_and_differ_by_at_most_one(length, world_size):
    pieces = [split.bounds(length, rank, world_size) for rank in range(world_size)]
    assert [i for start, end in pieces for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in pieces]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(length=st.integers(0, 30), world_size=st.integers(1, 7))
def test_padded_pieces_are_equally_long_and_repeat_the_last_element(length, world_size):
    data = list(range(length))
    pieces = [split.piece(data, rank, world_size, padded=True) for rank in range(world_size)]
    assert len({len(piece) for piece in pieces}) == 1
    for rank, piece in enumerate(pieces):
        plain = split.piece(data, rank, world_size, padded=False)
        assert piece[: len(plain)] == plain and set(piece[len(plain) :]) <= {length - 1}


# What the reference implementation gives with two processes.
@pytest.mark.parametrize(
    ("inputs", "first", "second"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2], [3, 4]),
        ((1, 2, 3), (1, 2), (3,)),
        ([7], [7], []),
        ("abcde", "abcde", "abcde"),
        ({1, 2}, {1, 2}, {1, 2}),
        ({"a": [1, 2, 3], "b": (4, 5, 6)}, {"a": [1, 2], "b": (4, 5)}, {"a": [3], "b": (6,)}),
    ],
)
def test_pieces(inputs, first, second):
    assert split.piece(inputs, 0, 2, False) == first
    assert split.piece(inputs, 1, 2, False) == second


def test_tensors_are_cut_along_the_first_dimension():
    data = torch.arange(6).view(3, 2)
    assert split.piece(data, 1, 2, True).tolist() == [[4, 5], [4, 5]]
    assert split.piece(torch.arange(1), 2, 3, True).tolist() == [0]
    assert split.piece(torch.arange(0), 1, 2, True).tolist() == []


def test_dictionary_with_values_of_different_length():
    with pytest.raises(ValueError, match=r"same length.*'a': 2.*'b': 3"):
        split.piece({"a": [1, 2], "b": [1, 2, 3]}, 0, 2, False)


def test_alone_everything_comes_back():
    data = {"a": [1, 2], "b": 5}
    assert split.piece(data, 0, 1, True) is data


def test_datasets_are_selected_from(monkeypatch):
    class Dataset:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def select(self, indices):
            return Dataset([self.rows[i] for i in indices])

    import sys
    import types

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Dataset))
    assert split.piece(Dataset([1, 2, 3]), 0, 2, True).rows == [1, 2]
    assert split.piece(Dataset([1, 2, 3]), 1, 2, True).rows == [3, 3]
