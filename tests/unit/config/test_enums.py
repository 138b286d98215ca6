"""The closed vocabularies: membership, printing, errors and pickles."""

import pickle

import pytest

from accelerate.config import enums
from accelerate.config.enums import DDPCommunicationHookType, DistributedType, DynamoBackend, LoggerType, PrecisionType

ALL = [
    enums.ComputeEnvironment,
    enums.CustomDtype,
    enums.DDPCommunicationHookType,
    enums.DistributedType,
    enums.DynamoBackend,
    enums.FP8BackendType,
    enums.LoggerType,
    enums.PrecisionType,
    enums.RNGType,
    enums.SageMakerDistributedType,
]


@pytest.mark.parametrize("kind", [kind for kind in ALL if issubclass(kind, enums.BaseEnum)])
def test_base_enums_print_list_and_contain_their_values(kind):
    assert kind.list() == [member.value for member in kind]
    for member in kind:
        assert str(member) == f"{member}" == member.value
        assert member in kind
        assert member.value in kind
    assert "surely not" not in kind
    assert None not in kind


def test_format_takes_a_width():
    assert f"{PrecisionType.NO:>4}" == "  no"


@pytest.mark.parametrize("kind", [enums.DistributedType, enums.ComputeEnvironment, enums.FP8BackendType])
def test_string_enums_equal_their_value_and_print_their_name(kind):
    for member in kind:
        assert member == member.value == member.name
        assert str(member) == f"{kind.__name__}.{member.name}"


def test_hooks_and_loggers_do_not_equal_strings():
    assert DDPCommunicationHookType.FP16 != "fp16"
    assert LoggerType.WANDB != "wandb"


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not enums.CustomDtype])
def test_an_unknown_value_is_answered_with_the_known_ones(kind):
    with pytest.raises(ValueError) as caught:
        kind("fp12")
    assert f"'fp12' is not a valid {kind.__name__}" in str(caught.value)
    for member in kind:
        assert repr(member.value) in str(caught.value)


def test_values_are_case_sensitive():
    with pytest.raises(ValueError):
        PrecisionType("BF16")
    with pytest.raises(ValueError):
        DynamoBackend("inductor")


def test_the_order_of_distributed_types():
    assert [member.name for member in DistributedType][:3] == ["NO", "MULTI_CPU", "MULTI_GPU"]
    assert len(DistributedType) == 14


@pytest.mark.parametrize("kind", ALL)
def test_public_module_path(kind):
    assert kind.__module__ == "accelerate.utils.dataclasses"


def test_pickles_name_the_public_path():
    assert b"accelerate.utils.dataclasses" in pickle.dumps(DistributedType.MULTI_GPU)
    assert pickle.loads(pickle.dumps(DistributedType.MULTI_GPU)) is DistributedType.MULTI_GPU
