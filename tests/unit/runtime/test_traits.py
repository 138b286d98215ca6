import pytest

from accelerate.config.enums import DistributedType
from accelerate.runtime import traits


def test_every_type_has_a_row_under_its_name_too():
    assert all(isinstance(traits.of(member), traits.Traits) for member in DistributedType)
    assert traits.of("MULTI_GPU") is traits.of(DistributedType.MULTI_GPU)
    with pytest.raises(ValueError, match="MULTI_CPU"):
        traits.of("MULTI_TOASTER")
