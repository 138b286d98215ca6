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
        front.DistributedType.NO,
        front.CustomDtype.INT4,
        front.GradScalerKwargs(init_scale=3.0),
        front.DataLoaderConfiguration(data_seed=1),
        front.TensorInformation(torch.Size([1]), torch.float32),
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
