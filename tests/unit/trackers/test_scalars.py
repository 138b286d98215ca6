"""Values as numbers."""

import numpy as np
import pytest
import torch

from accelerate.trackers.scalars import as_number


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        (0.5, 0.5),
        (True, True),
        (torch.tensor(2.0), 2.0),
        (torch.ones(1), 1.0),
        (np.float32(3), 3.0),
        (torch.ones(2), None),
        (np.ones(2), None),
        ("1", None),
        (None, None),
        ({"a": 1}, None),
    ],
)
def test_as_number(value, number):
    assert as_number(value) == number
