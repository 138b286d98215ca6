"""The public path of offload files."""

import accelerate.offload.store as disk
import accelerate.utils.offload as offload


def test_the_names_are_those_of_the_home():
    assert all(getattr(offload, name) is getattr(disk, name) for name in offload.__all__)
