"""The front: every name is the object of its home module, and pickles by the public path."""

import dataclasses
import pickle
import typing

import pytest
import torch

from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import dataclasses as front


@pytest.mark.parametrize(
    "value",
    [
        *(next(iter(getattr(front, name))) for name in ("DistributedType", "PrecisionType", "RNGType", "CustomDtype")),
        front.GradScalerKwargs(init_scale=3.0),
        front.DistributedDataParallelKwargs(comm_hook="fp16"),
        front.GradientAccumulationPlugin(num_steps=2, exact=True),
        front.ProjectConfiguration("run"),
        front.DataLoaderConfiguration(data_seed=1),
        front.TensorInformation(torch.Size([1]), torch.float32),
        front.TorchDynamoPlugin(backend="eager"),
        front.TorchContextParallelConfig("alltoall"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickles_name_the_public_path(value):
    text = pickle.dumps(value)
    assert b"accelerate.utils.dataclasses" in text
    assert b"accelerate.config" not in text
    assert pickle.loads(text) == value


def test_everything_is_there_and_its_type_hints_can_be_resolved():
    assert len(set(front.__all__)) == len(front.__all__)
    for settings in (*(getattr(front, name) for name in front.__all__), ParallelismConfig):
        if dataclasses.is_dataclass(settings):
            assert typing.get_type_hints(settings) and typing.get_type_hints(settings.__init__)


def test_a_replaced_method_takes_effect_everywhere(monkeypatch):
    from accelerate.config.handlers import TorchDynamoPlugin

    monkeypatch.setattr(front.TorchDynamoPlugin, "to_kwargs", lambda self: {"replaced": True})
    assert TorchDynamoPlugin().to_kwargs() == {"replaced": True}
