"""gather_for_metrics at the end of a loader, whatever it is given."""

import pytest
import torch

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("value", [torch.arange(5), [1, 2, 3, 4, 5], (1, 2, 3, 4, 5)])
def test_a_filled_up_last_batch_is_cut_on_one_process_too(value, as_objects):
    # Evaluation loops repeat a loss to the full batch size, and count on this.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(13), batch_size=5))
    assert [len(accelerator.gather_for_metrics(value, use_gather_object=as_objects)) for _ in loader] == [5, 5, 3]


class Short(torch.utils.data.Sampler):
    """A batch sampler that does not fill each batch."""

    batch_size = 4

    def __iter__(self):
        return iter([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]])

    def __len__(self):
        return 3


def test_short_batches_of_a_batch_sampler_are_kept():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_sampler=Short()))
    assert [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()] == [*range(10)]


class Named(torch.utils.data.BatchSampler):
    """A batch sampler of a library, whose batches are torch's."""


def test_the_remainder_is_upstreams_where_batches_are_full():
    pytest.importorskip("torchdata.stateful_dataloader")
    data, ordered = range(7), torch.utils.data.SequentialSampler(range(7))
    loaders = (
        (True, torch.utils.data.DataLoader(data, batch_size=2), 1),
        (True, torch.utils.data.DataLoader(data, batch_sampler=[[0, 1], [2]]), -1),
        (False, torch.utils.data.DataLoader(data, batch_sampler=Named(ordered, 2, False)), 1),
    )
    for stateful, loader, remainder in loaders:
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful)
        )
        assert {accelerator.gradient_state.remainder for _ in accelerator.prepare(loader)} == {remainder}
