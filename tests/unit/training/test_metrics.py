"""gather_for_metrics at the end of a loader, whatever it is given."""

import pytest
import torch

from accelerate import Accelerator


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("value", [torch.arange(5), [1, 2, 3, 4, 5], (1, 2, 3, 4, 5)])
def test_a_filled_up_last_batch_is_cut_on_one_process_too(value, as_objects):
    # Evaluation loops repeat a loss to the full batch size, and count on this.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(13), batch_size=5))
    assert [len(accelerator.gather_for_metrics(value, use_gather_object=as_objects)) for _ in loader] == [5, 5, 3]
