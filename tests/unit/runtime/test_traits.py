import pytest

from accelerate.config.enums import DistributedType
from accelerate.runtime import traits


def test_every_type_has_a_row_under_its_name_too():
    assert all(isinstance(traits.of(member), traits.Traits) for member in DistributedType)
    assert traits.of("MULTI_GPU") is traits.of(DistributedType.MULTI_GPU)


def test_unknown_type_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="MULTI_CPU"):
        traits.of("MULTI_TOASTER")


@pytest.mark.parametrize(
    ("name", "abilities"),
    [
        ("NO", {"distributed": False, "torch_distributed": False, "scales_loss": True}),
        ("MULTI_CPU", {"distributed": True, "joins_uneven_inputs": True}),
        ("FSDP", {"sharded": True, "clips_by_value": False, "custom_device_placement": True}),
        ("DEEPSPEED", {"deepspeed": True, "scales_loss": False}),
        ("MEGATRON_LM", {"custom_device_placement": True, "places_batches": False}),
        ("XLA", {"xla": True, "torch_distributed": False, "reduces_on_step": True}),
    ],
)
def test_abilities(name, abilities):
    row = traits.of(name)
    assert {field: getattr(row, field) for field in abilities} == abilities
