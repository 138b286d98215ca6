"""The closed vocabularies: membership, printing, errors and pickles."""

import pytest

from accelerate.config import enums

_NAMES = (
    "ComputeEnvironment CustomDtype DDPCommunicationHookType DistributedType DynamoBackend FP8BackendType LoggerType PrecisionType "
    "RNGType SageMakerDistributedType"
)
ALL = [getattr(enums, name) for name in _NAMES.split()]


@pytest.mark.parametrize("kind", [kind for kind in ALL if issubclass(kind, enums.BaseEnum)])
def test_base_enums_print_list_and_contain_their_values(kind):
    assert kind.list() == [member.value for member in kind]
    for member in kind:
        assert str(member) == f"{member}" == member.value
        assert member in kind
        assert member.value in kind
    assert "surely not" not in kind
    assert None not in kind


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not enums.CustomDtype])
def test_an_unknown_value_is_answered_with_the_known_ones(kind):
    with pytest.raises(ValueError) as caught:
        kind("fp12")
    assert f"'fp12' is not a valid {kind.__name__}" in str(caught.value)
    for member in kind:
        assert repr(member.value) in str(caught.value)
