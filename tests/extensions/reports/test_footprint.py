"""The parameters of a prepared model, and the note on unsharded gradients."""

import types

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate.extensions.reports.footprint import no_sync_memory_note, pieces
from accelerate.extensions.reports.torch_private import output_dtype, wrap_exchanges


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


def test_there_is_no_note_where_unsharded_gradients_cost_no_more_than_shards(process_group):
    assert no_sync_memory_note(fully_shard(nn.Linear(4, 4))) == ""
