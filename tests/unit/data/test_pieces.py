"""Cutting and joining batches."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from accelerate.data import pieces

Pair = namedtuple("Pair", "x y")


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(same, first, second))
    return first == second


def batch(start, stop):
    numbers = torch.arange(start, stop)
    return OrderedDict(
        ids=numbers,
        pair=Pair(numbers.view(-1, 1), [numbers]),
        text=[f"s{n}" for n in range(start, stop)],
        note="n",
        k=3,
    )


def test_cut_and_join_are_inverse():
    whole = pieces.join([batch(0, 2), batch(2, 3), batch(3, 7)])
    assert type(whole) is OrderedDict and type(whole["pair"]) is Pair
    assert same(whole, batch(0, 7))
    assert pieces.batch_length(whole) == 7
    assert same(pieces.take(whole, 2, 5), batch(2, 5))


def test_padding_repeats_the_head():
    padded = pieces.padded(batch(5, 7), 2, batch(0, 2), 7)
    assert padded["ids"].tolist() == [5, 6, 0, 1, 0, 1, 0]
    assert padded["text"] == ["s5", "s6", "s0", "s1", "s0", "s1", "s0"]


def test_length_is_that_of_the_first_leaf_with_samples():
    assert pieces.batch_length({"scale": torch.tensor(1.0), "x": [torch.zeros(3, 2)]}) == 3
    assert pieces.batch_length(["a", "b"]) == 2
    assert pieces.batch_length({"note": "n"}) is None and pieces.batch_length(torch.tensor(1)) is None


def test_batches_that_differ_are_refused():
    with pytest.raises(ValueError, match="cannot be joined"):
        pieces.join([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="cannot be joined"):
        pieces.join([[torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]])
