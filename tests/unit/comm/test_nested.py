from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

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


def test_default_factory_survives():
    assert plus_one(defaultdict(list, a=torch.ones(1)))["new"] == []


def test_arguments_reach_the_function():
    result = nested.recursively_apply(
        lambda a, b, c=0: a + b + c, {"n": 1, "t": "x"}, 2, test_type=lambda o: o == 1, c=3
    )
    assert result == {"n": 6, "t": "x"}


def test_other_types_can_be_refused():
    with pytest.raises(TypeError, match=r"str.*plus"):

        def plus(tensor):
            return tensor

        nested.recursively_apply(plus, {"a": "text"}, error_on_other_type=True)


def test_flatten_and_rebuild():
    data = {"a": torch.tensor([1]), "b": [torch.tensor([2]), Pair(torch.tensor([3]), torch.tensor([4]))]}
    tensors, structure = nested.flatten(data, "gather")
    assert [t.item() for t in tensors] == [1, 2, 3, 4]
    assert hash(structure) and structure != nested.flatten({"c": data["a"], "b": data["b"]}, "gather")[1]
    result = nested.rebuild(data, [t * 10 for t in tensors])
    assert result["b"][1] == Pair(torch.tensor([30]), torch.tensor([40]))
    assert nested.flatten(torch.ones(1), "gather")[1] is None


def test_flatten_names_the_operation():
    with pytest.raises(TypeError, match=r"NoneType.*`reduce`"):
        nested.flatten([torch.ones(1), None], "reduce")


def test_namedtuple_or_not():
    assert nested.is_namedtuple(Pair(1, 2))
    assert not any(map(nested.is_namedtuple, [(1, 2), [1], torch.ones(2, 2).max(0), torch.Size([1])]))
