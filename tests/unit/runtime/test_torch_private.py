import types

import pytest
import torch
from torch import nn

from accelerate.precision.footprint import no_sync_memory_note, pieces
from accelerate.runtime import torch_private


class Hidden(nn.Linear):
    """As `fully_shard` leaves a module, on a torch that keeps other books."""

    state = types.SimpleNamespace()

    def _get_fsdp_state(self):
        return self.state


@pytest.mark.parametrize("state", [{}, {"_fsdp_param_groups": [object()]}, {"_fsdp_param_group": object()}])
def test_a_torch_with_other_books_costs_a_report_not_the_training(state):
    model = Hidden(2, 1)
    model.state = types.SimpleNamespace(**state)
    assert [(piece.name, piece.strategy) for piece in pieces(model)] == [("weight", ""), ("bias", "")]
    assert no_sync_memory_note(model) == ""
    torch_private.wrap_exchanges(model, lambda method: pytest.fail("there is no such method"))
    assert torch_private.output_dtype(model) is None


def test_a_name_that_torch_has_given_up_is_named_with_what_to_do(monkeypatch):
    monkeypatch.delitem(vars(torch_private), "take_tensors", raising=False)
    monkeypatch.delattr(torch._utils, "_take_tensors")
    with pytest.raises(
        ImportError, match=rf"torch {torch.__version__[:3]}.* has no take_tensors in torch._utils.*install"
    ):
        from accelerate.runtime.torch_private import take_tensors  # noqa: F401


def test_every_name_is_there():
    for name in torch_private._HOME_OF:
        assert getattr(torch_private, name) is getattr(torch_private, name)
