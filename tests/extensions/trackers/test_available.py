import pytest

from accelerate.extensions.trackers import available

# Package, distribution (if it is called otherwise), and a version that will do, of `is_<name>_available`; the name is that of the
# package if there is none.
_ROWS = """
aim aim 3.9.9|clearml|comet_ml comet-ml|dvclive|mlflow mlflow-skinny|swanlab|tensorboardX tensorboardX 1.0 tensorboard|trackio|wandb
"""
LIBRARIES = {}
for _row in _ROWS.strip().split("|"):
    _package, _distribution, _version, _name = (_row.split() + [None] * 3)[:4]
    LIBRARIES[f"is_{_name or _package}_available"] = (_package, _distribution or _package, _version or "1.0")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_found_when_its_distribution_is_installed(machine, name):
    check = getattr(available, name)
    assert check() is False and check.__name__ == name and check.__doc__
    machine.packages.add(LIBRARIES[name][0])  # a folder of the same name
    assert check() is False
    if name == "is_aim_available":
        machine.install(*LIBRARIES[name][:2], "4.0.0")
        assert check() is False
    machine.install(*LIBRARIES[name])
    assert check() is True
