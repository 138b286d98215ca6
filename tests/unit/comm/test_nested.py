import pickle
import sys
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate.comm import nested

Pair = namedtuple("Pair", "x y")


def plus_one(data):
    return nested.recursively_apply(lambda tensor: tensor + 1, data)


class Output(OrderedDict):
    pass


@pytest.mark.parametrize(
    "data",
    [
        [torch.ones(1)],
        (torch.ones(1), "text"),
        Pair(torch.ones(1), None),
        {"a": torch.ones(1)},
        Output(a=torch.ones(1), b=[torch.ones(1)]),
        UserDict(a=torch.ones(1)),
        defaultdict(list, a=torch.ones(1)),
        torch.Size([2, 3]),
    ],
)
def test_types_are_kept(data):
    result = plus_one(data)
    assert type(result) is type(data)
    before, after = list(nested.leaves(data)), list(nested.leaves(result))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old + 1) if isinstance(old, torch.Tensor) else new == old


def test_arguments_reach_the_function_and_other_types_can_be_refused():
    assert plus_one(defaultdict(list, a=torch.ones(1)))["new"] == []
    result = nested.recursively_apply(
        lambda a, b, c=0: a + b + c, {"n": 1, "t": "x"}, 2, test_type=lambda o: o == 1, c=3
    )
    assert result == {"n": 6, "t": "x"}
    with pytest.raises(TypeError, match=r"str.*plus_one"):
        nested.recursively_apply(plus_one, {"a": "text"}, error_on_other_type=True)
    with pytest.raises(TypeError, match=r"NoneType.*`reduce`"):
        nested.flatten([torch.ones(1), None], "reduce")


def test_flatten_and_rebuild():
    data = {"a": torch.tensor([1]), "b": [torch.tensor([2]), Pair(torch.tensor([3]), torch.tensor([4]))]}
    tensors, structure = nested.flatten(data, "gather")
    assert [t.item() for t in tensors] == [1, 2, 3, 4]
    assert hash(structure) and structure != nested.flatten({"c": data["a"], "b": data["b"]}, "gather")[1]
    result = nested.rebuild(data, [t * 10 for t in tensors])
    assert result["b"][1] == Pair(torch.tensor([30]), torch.tensor([40]))
    assert nested.flatten(torch.ones(1), "gather")[1] is None


def test_kinds():
    assert nested.is_namedtuple(Pair(1, 2))
    assert not any(map(nested.is_namedtuple, [(1, 2), [1], torch.ones(2, 2).max(0), torch.Size([1])]))
    information = nested.TensorInformation(shape=torch.Size([2, 3]), dtype=torch.bfloat16)
    assert pickle.loads(pickle.dumps(information)) == information
    assert information != nested.TensorInformation(torch.Size([2, 3]), torch.float16)


# -- pieces


@given(length=st.integers(0, 50), world_size=st.integers(1, 9))
def test_bounds_cover_everything_once_and_differ_by_at_most_one(length, world_size):
    pieces = [nested.bounds(length, rank, world_size) for rank in range(world_size)]
    assert [i for start, end in pieces for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in pieces]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(length=st.integers(0, 30), world_size=st.integers(1, 7))
def test_padded_pieces_are_equally_long_and_repeat_the_last_element(length, world_size):
    data = list(range(length))
    pieces = [nested.piece(data, rank, world_size, padded=True) for rank in range(world_size)]
    assert len({len(piece) for piece in pieces}) == 1
    for rank, piece in enumerate(pieces):
        plain = nested.piece(data, rank, world_size, padded=False)
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
    assert nested.piece(inputs, 0, 2, False) == first
    assert nested.piece(inputs, 1, 2, False) == second


def test_dictionaries():
    with pytest.raises(ValueError, match=r"same length.*'a': 2.*'b': 3"):
        nested.piece({"a": [1, 2], "b": [1, 2, 3]}, 0, 2, False)
    data = {"a": [1, 2], "b": 5}
    assert nested.piece(data, 0, 1, True) is data, "one process gets everything"


def test_tensors_are_cut_along_the_first_dimension():
    data = torch.arange(6).view(3, 2)
    assert nested.piece(data, 1, 2, True).tolist() == [[4, 5], [4, 5]]
    assert nested.piece(torch.arange(1), 2, 3, True).tolist() == [0]
    assert nested.piece(torch.arange(0), 1, 2, True).tolist() == []


def test_datasets_are_selected_from(monkeypatch):
    class Dataset:
        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def select(self, indices):
            return Dataset([self.rows[i] for i in indices])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(Dataset=Dataset))
    assert nested.piece(Dataset([1, 2, 3]), 0, 2, True).rows == [1, 2]
    assert nested.piece(Dataset([1, 2, 3]), 1, 2, True).rows == [3, 3]
