import sys
import types
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerate.base import nested


def plus_one(data):
    return nested.recursively_apply(lambda tensor: tensor + 1, data)


def test_arguments_reach_the_function_and_other_types_can_be_refused():
    assert plus_one(defaultdict(list, a=torch.ones(1)))["new"] == []
    data = {"n": 1, "t": "x"}
    result = nested.recursively_apply(lambda a, b, c=0: a + b + c, data, 2, test_type=lambda o: o == 1, c=3)
    assert result == {"n": 6, "t": "x"}
    with pytest.raises(TypeError, match=r"str.*plus_one"):
        nested.recursively_apply(plus_one, {"a": "text"}, error_on_other_type=True)
    with pytest.raises(TypeError, match=r"NoneType.*`reduce`"):
        nested.outline([torch.ones(1), None], [], "reduce")


@given(length=st.integers(0, 50), world_size=st.integers(1, 9))
def test_bounds_cover_everything_once_and_differ_by_at_most_one(length, world_size):
    pieces = [nested.bounds(length, rank, world_size) for rank in range(world_size)]
    assert [i for start, end in pieces for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in pieces]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_dictionaries():
    with pytest.raises(ValueError, match=r"same length.*'a': 2.*'b': 3"):
        nested.piece({"a": [1, 2], "b": [1, 2, 3]}, 0, 2, False)
    assert nested.piece({"a": [1, 2, 3], "b": (4, 5, 6)}, 0, 2, False) == {"a": [1, 2], "b": (4, 5)}
    data = {"a": [1, 2], "b": 5}
    assert nested.piece(data, 0, 1, True) is data, "one process gets everything"


def test_strided_nested_tensors_have_a_batch_size_and_no_shape():
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert nested.find_batch_size({"x": rows}) == 2
    with pytest.raises(TypeError, match="to_padded_tensor"):
        nested.shape_of(rows)


def test_samples_of_nested_dictionaries_are_divided():
    data = {"text": {"ids": [1, 2, 3], "mask": torch.arange(3)}, "labels": (4, 5, 6), "style": "plain", "n": 3}
    whole = {"style": "plain", "n": 3}
    found = [nested.piece(data, rank, 2, True) for rank in (0, 1)]
    assert [repr(part) for part in found] == [
        repr({"text": {"ids": ids, "mask": torch.tensor([n - 1 for n in ids])}, "labels": labels, **whole})
        for ids, labels in (([1, 2], (4, 5)), ([3, 3], (6, 6)))
    ]
    with pytest.raises(ValueError, match="'text.mask': 4, 'labels': 3"):
        nested.piece({**data, "text": {"mask": torch.arange(4)}}, 0, 2, False)


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
