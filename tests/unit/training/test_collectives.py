"""gather_for_metrics at the end of a loader, whatever it is given."""

import pytest
import torch

from accelerate import Accelerator


def at_the_end(value, as_objects):
    """Return what the last batch of a loader of 13 samples in batches of 5 gives back: 3 samples are real."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(13), batch_size=5))
    seen = [accelerator.gather_for_metrics(value, use_gather_object=as_objects) for _ in loader]
    assert seen[0] is value or torch.equal(seen[0], value)
    return seen[-1]


@pytest.mark.parametrize("value", [torch.tensor(2.0), 3.0, {"text": ["a"] * 5}])
@pytest.mark.parametrize("as_objects", [False, True])
def test_what_has_no_samples_comes_back_whole(value, as_objects):
    assert at_the_end(value, as_objects) is value


@pytest.mark.parametrize("as_objects", [False, True])
@pytest.mark.parametrize("value", [torch.arange(5), [1, 2, 3, 4, 5], (1, 2, 3, 4, 5)])
def test_a_filled_up_last_batch_is_cut_on_one_process_too(value, as_objects):
    # Evaluation loops repeat a loss to the full batch size, and count on this.
    assert len(at_the_end(value, as_objects)) == 3


def test_nested_tensors_are_cut_each():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(13), batch_size=5))
    value = {"a": torch.ones(5), "b": (torch.ones(5, 2), torch.tensor(1.0))}
    *_, last = [accelerator.gather_for_metrics(value) for _ in loader]
    assert last["a"].shape == (3,) and last["b"][0].shape == (3, 2) and last["b"][1].shape == ()
