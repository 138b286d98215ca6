import types

import pytest
from torch import nn

from accelerate.extensions.reports.torch_private import output_dtype, wrap_exchanges
from accelerate.precision.footprint import no_sync_memory_note, pieces


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
    wrap_exchanges(model, lambda method: pytest.fail("there is no such method"))
    assert output_dtype(model) is None
