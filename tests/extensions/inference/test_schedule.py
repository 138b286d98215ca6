"""What a pipeline knows of a model's arguments and outputs, and how tracing cuts it."""

import pytest
import torch
from torch import nn

from accelerate.extensions.pipeline.batches import Inputs, Outputs
from accelerate.extensions.pipeline.stages import trace

CPU = torch.device("cpu")


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.other = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, unused=None, *, table=None, number=None, words=None):
        return {"y": self.two(self.one(x)) + x}


def _inputs(**kwargs):
    return Inputs(_Model(), (torch.ones(2, 3),), kwargs)


def test_a_table_as_long_as_the_batch_is_still_the_table():
    inputs = _inputs(table=torch.arange(4.0))
    _, tensors = inputs.match((torch.ones(4, 3),), {"table": torch.arange(4.0)})
    assert inputs.cut(tensors, 0, 2, CPU)[1].tolist() == [0, 1, 2, 3] * 2


def test_constants_and_nested_values_are_named():
    inputs = _inputs(words={"a": [torch.ones(2), "b"]}, number=3)
    assert [leaf.name for leaf in inputs.leaves] == ["x", "number", "words['a'][0]", "words['a'][1]"]
    with pytest.raises(
        ValueError, match=r"words\['a'\]\[1\]='c' in .*, but the pipeline was traced with words\['a'\]\[1\]='b'"
    ):
        inputs.match((torch.ones(2, 3),), {"words": {"a": [torch.ones(2), "c"]}, "number": 3})
    with pytest.raises(ValueError, match=r"number=3\.0 in .* traced with number=3 "):
        inputs.match((torch.ones(2, 3),), {"words": {"a": [torch.ones(2), "b"]}, "number": 3.0})
    with pytest.raises(ValueError, match=r"words\['b'\]\[0\]"):
        inputs.match((torch.ones(2, 3),), {"words": {"b": [torch.ones(2), "b"]}, "number": 3})


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
    traced = trace(model, ["two"], (torch.ones(2, 3), torch.ones(2)), {}, 2, CPU, trains=False)
    assert [len(chain.names) for chain in traced.chains.values()] == [2]
    assert before == {name: sorted(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"\['other'\] cut _Model into 1 stages, but there are to be 2"):
        trace(model, ["other"], (torch.ones(2, 3),), {}, 2, CPU, trains=False)
    assert before == {name: sorted(module.__dict__) for name, module in model.named_modules()}


def test_a_forward_of_the_instance_stays():
    model = _Model()
    own = model.forward
    model.forward = lambda x: own(x)["y"]
    kept = model.forward
    trace(model, ["two"], (torch.ones(2, 3),), {}, 2, CPU, trains=False)
    assert model.forward is kept
