"""What a pipeline knows of a model's arguments and outputs, and how tracing cuts it."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from accelerate.parallel.pipeline import Inputs, Outputs, trace

Pair = namedtuple("Pair", ["a", "b"])


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.other = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, unused=None, *, table=None, number=None, words=None):
        return {"y": self.two(self.one(x)) + x}


def _inputs(**kwargs):
    return Inputs(_Model(), (torch.ones(2, 3),), kwargs)


@pytest.mark.parametrize(("rows", "start", "count"), [(5, 0, 2), (5, 4, 1), (1, 0, 1), (8, 2, 3)])
def test_batches_are_cut_into_micro_batches(rows, start, count):
    table, number = torch.arange(4.0), torch.tensor(7.0)
    inputs = _inputs(table=table, number=number)
    x = torch.arange(rows * 3.0).reshape(rows, 3)
    found, tensors = inputs.match((x,), {"table": table, "number": number})
    assert found == rows
    cut, tables, numbers = inputs.cut(tensors, start, count)
    assert torch.equal(cut, x[[min(start + i, rows - 1) for i in range(count * 2)]])
    assert torch.equal(tables, table.repeat(count)) and torch.equal(numbers, number.repeat(count))


def test_a_table_as_long_as_the_batch_is_still_the_table():
    inputs = _inputs(table=torch.arange(4.0))
    _, tensors = inputs.match((torch.ones(4, 3),), {"table": torch.arange(4.0)})
    assert inputs.cut(tensors, 0, 2)[1].tolist() == [0, 1, 2, 3] * 2


def test_a_table_of_one_row_serves_any_batch():
    inputs = Inputs(_Model(), (torch.ones(1, 3),), {"table": torch.ones(1, 2)})
    _, tensors = inputs.match((torch.ones(5, 3),), {"table": torch.ones(1, 2)})
    assert [tensor.shape for tensor in inputs.cut(tensors, 0, 5)] == [(5, 3), (5, 2)]


def test_constants_and_nested_values_are_named():
    inputs = _inputs(words={"a": [torch.ones(2), "b"]}, number=3)
    assert [leaf.name for leaf in inputs.leaves] == ["x", "number", "words['a'][0]", "words['a'][1]"]
    with pytest.raises(ValueError, match=r"words\['a'\]\[1\]='c' in .*, but the pipeline was traced with words\['a'\]\[1\]='b'"):
        inputs.match((torch.ones(2, 3),), {"words": {"a": [torch.ones(2), "c"]}, "number": 3})
    with pytest.raises(ValueError, match=r"number=3\.0 in .* traced with number=3 "):
        inputs.match((torch.ones(2, 3),), {"words": {"a": [torch.ones(2), "b"]}, "number": 3.0})
    with pytest.raises(ValueError, match=r"words\['b'\]\[0\]"):
        inputs.match((torch.ones(2, 3),), {"words": {"b": [torch.ones(2), "b"]}, "number": 3})


def test_calls_look_like_the_example():
    seen = []
    inputs = Inputs(_Model(), (torch.ones(2, 3),), {"number": torch.tensor(1.0), "unused": 2})
    example = inputs.traced()
    assert [tensor.shape for tensor in example] == [(2, 3), (1,)]
    inputs.call(lambda *args, **kwargs: seen.append((args, kwargs)), example)
    (x,), named = seen[0]
    assert x.shape == (2, 3) and named["number"].shape == () and named["unused"] == 2


def test_outputs_are_joined_without_the_samples_that_filled_them():
    outputs = Outputs(2)
    kept = outputs.record(Pair([torch.ones(2, 3), 7, None], {"rows": torch.ones(4), "same": torch.ones(2)}))
    pieces = [[torch.arange(len(t) * n * 1.0) for t in kept] for n in (2, 1)]
    joined = outputs.joined(pieces, 5)
    assert type(joined) is Pair and joined.a[1:] == [7, None]
    assert joined.a[0].tolist() == [0, 1, 2, 3, 0] and joined.b["rows"].tolist() == [*range(8), 0, 1]
    assert outputs.shapes(5) == [((5, 3), torch.float32), ((10,), torch.float32), ((5,), torch.float32)]


@pytest.mark.parametrize("output", [torch.tensor(1.0), {"loss": torch.tensor(1.0)}, [torch.ones(3, 2)]])
def test_outputs_without_samples_are_refused(output):
    with pytest.raises(ValueError, match="cannot be joined"):
        Outputs(2).record(output)


class _Cache:
    def get_seq_length(self):
        return 3


def test_a_cache_is_left_out():
    outputs = Outputs(2)
    outputs.record({"logits": torch.ones(2), "cache": _Cache()})
    assert outputs.joined([[torch.ones(2)]], 2)["cache"] is None


def test_tracing_leaves_the_model_as_it_was():
    model = _Model()
    before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    traced = trace(model, ["two"], (torch.ones(2, 3), torch.ones(2)), {}, 2)
    assert traced.pipe.num_stages == 2 and traced.used[0] == 0
    assert before == {name: sorted(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"\['other'\] cut _Model into 1 stages, but there are 2 processes"):
        trace(model, ["other"], (torch.ones(2, 3),), {}, 2)
    assert before == {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_a_forward_of_the_instance_stays():
    model = _Model()
    own = model.forward
    model.forward = lambda x: own(x)["y"]
    kept = model.forward
    trace(model, ["two"], (torch.ones(2, 3),), {}, 2)
    assert model.forward is kept


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["twoo"], r"split_points=\['twoo'\]: _Model has no module 'twoo'.* 'two'"),
        ([], r"split_points=\[\] name 0 modules, but 2 processes.*Name 1 modules"),
        (["one", "two"], "name 2 modules, but 2 processes"),
    ],
)
def test_points_that_do_not_cut_it(points, message):
    with pytest.raises(ValueError, match=message):
        trace(_Model(), points, (torch.ones(2, 3),), {}, 2)
