"""gather_for_metrics at the end of a loader, whatever it is given."""

import pytest
import torch

from accelerate import Accelerator


@pytest.mark.parametrize(
    "value", [torch.tensor(2.0), 3.0, {"text": ["a"]}, (torch.ones(2), None), "text", [torch.ones(3), torch.ones(1)]]
)
@pytest.mark.parametrize("as_objects", [False, True])
def test_one_process_gets_back_what_it_gave_also_in_the_last_batch(value, as_objects):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(3), batch_size=2))
    seen = [accelerator.gather_for_metrics(value, use_gather_object=as_objects) for _ in loader]
    assert seen[0] is value and seen[1] is value
