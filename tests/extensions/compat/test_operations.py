"""Operations between processes, for other programs."""

import pytest
import torch

from accelerate.comm import operations as core
from accelerate.extensions.compat import operations


def test_a_decorated_collective_compares_its_argument(monkeypatch):
    compared = []
    monkeypatch.setattr(
        operations, "compare_arguments", lambda communicator, name, data, module: compared.append(name)
    )
    operations.verify_operation(core.gather)(tensor=torch.ones(1))
    assert compared == ["gather"]
    with pytest.raises(TypeError, match="tensor"):
        operations.verify_operation(lambda tensor: tensor)()
