import pytest

from accelerate.extensions.quantize import config


@pytest.mark.parametrize(("name", "first", "older"), [("8bit", "0.37.2", "0.37.1"), ("4bit", "0.39.0", "0.38")])
def test_bitsandbytes_is_available_from_a_version_on(machine, name, first, older):
    check = getattr(config, f"is_{name}_bnb_available")
    assert check() is False and check.__name__ == f"is_{name}_bnb_available" and check.__doc__
    machine.packages.add("bitsandbytes")  # a folder of the same name
    assert check() is False
    machine.install("bitsandbytes", version=older)
    assert check() is False
    machine.install("bitsandbytes", version=first)
    assert check() is True
